"""tests/adapters.py of a solution, as the course's handout defines its functions."""

from cs336_basics.attention import (
    CausalMultiHeadSelfAttention,
    scaled_dot_product_attention,
)
from cs336_basics.block import Block
from cs336_basics.ffn import SwiGLU
from cs336_basics.rmsnorm import RMSNorm
from cs336_basics.rope import RotaryPositionalEmbedding
from torch.func import functional_call


def run_rmsnorm(d_model, eps, weights, in_features):
    return functional_call(RMSNorm(d_model, eps), {"weight": weights}, in_features)


def run_swiglu(d_model, d_ff, w1_weight, w2_weight, w3_weight, in_features):
    state = {"w1.weight": w1_weight, "w2.weight": w2_weight, "w3.weight": w3_weight}
    return functional_call(SwiGLU(d_model, d_ff), state, in_features)


def run_rope(d_k, theta, max_seq_len, in_query_or_key, token_positions):
    rope = RotaryPositionalEmbedding(theta, d_k, max_seq_len)
    return rope(in_query_or_key, token_positions)


def run_scaled_dot_product_attention(Q, K, V, mask=None):
    return scaled_dot_product_attention(Q, K, V, mask)


def run_multihead_self_attention(
    d_model,
    num_heads,
    q_proj_weight,
    k_proj_weight,
    v_proj_weight,
    o_proj_weight,
    in_features,
    token_positions=None,
    rope=None,
):
    state = {
        "q_proj.weight": q_proj_weight,
        "k_proj.weight": k_proj_weight,
        "v_proj.weight": v_proj_weight,
        "output_proj.weight": o_proj_weight,
    }
    layer = CausalMultiHeadSelfAttention(d_model, num_heads, rope)
    return functional_call(layer, state, (in_features, token_positions))


def run_multihead_self_attention_with_rope(
    d_model,
    num_heads,
    max_seq_len,
    theta,
    q_proj_weight,
    k_proj_weight,
    v_proj_weight,
    o_proj_weight,
    in_features,
    token_positions=None,
):
    rope = RotaryPositionalEmbedding(theta, d_model // num_heads, max_seq_len)
    weights = (q_proj_weight, k_proj_weight, v_proj_weight, o_proj_weight)
    inputs = (in_features, token_positions)
    return run_multihead_self_attention(d_model, num_heads, *weights, *inputs, rope)


def run_transformer_block(
    d_model, num_heads, d_ff, max_seq_len, theta, weights, in_features
):
    assert weights["ffn.w1.weight"].shape == (d_ff, d_model)
    rope = RotaryPositionalEmbedding(theta, d_model // num_heads, max_seq_len)
    block = Block(d_model, num_heads, d_ff, rope)
    return functional_call(block, weights, in_features)
