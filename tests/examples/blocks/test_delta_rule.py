"""The delta rule, and the layers that are built from it."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from delta_rule import delta_rule, unit
from einops import rearrange
from gated_delta_net import GatedDeltaNet, HeadDecay
from joint_qk_norm import JointNormAttention
from kimi_delta_attention import Forgetting, KimiDeltaAttention
from latent_attention import LatentAttention
from no_positions import NoPositions
from output_gate import GatedAttention
from partial_rope import PartialRope
from reordered_norm import ReorderedNormBlock
from their_models import (
    HALF_ROTATES,
    KIMI_DELTA_NAMES,
    LATENT_NAMES,
    Halves,
    our_model,
    require_same_model,
    their_model,
)

from tinyblock import Block, Transformer

LINEAR_THEN_FULL = ["linear_attention", "full_attention"]
LINEAR_SIZES = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "layer_types": LINEAR_THEN_FULL,
}
CENTERED = r"layernorm|[qk]_norm|^norm"
GATED_NAMES = {
    "linear_attn": "attn",
    "out_proj": "output_proj",
    "conv1d": "conv",
    "dt_bias": "decay.bias",
    "A_log": "decay.log_speed",
}


def our_delta_model(**options):
    ours = our_model(
        2,
        rope=PartialRope(Halves(1e4, 8, 128)),
        attention=GatedAttention,
        qk_norm=True,
    )
    ours.layers[0].attn = GatedDeltaNet(
        64, 4, d_head=16, d_key=8, num_key_heads=2, **options
    )
    return ours


def split_q_and_gate(state):
    """Qwen's q_proj alternates between the rows of a query and its gate."""
    name = "layers.1.attn.q_proj.weight"
    split = "(heads part d) x -> part (heads d) x"
    state[name], state["layers.1.attn.gate_proj.weight"] = rearrange(
        state[name], split, part=2, d=16
    )


def split_qwen3_next(state):
    split_q_and_gate(state)
    name = "layers.0.attn."
    joined = state.pop(f"{name}in_proj_qkvz.weight")
    joined = rearrange(joined, "(key_heads rows) x -> key_heads rows x", key_heads=2)
    parts = ("q_proj", "k_proj", "v_proj", "gate_proj")
    for part, rows in zip(parts, joined.split([8, 8, 32, 32], 1), strict=True):
        state[f"{name}{part}.weight"] = rows.flatten(0, 1)
    joined = state.pop(f"{name}in_proj_ba.weight")
    joined = rearrange(joined, "(key_heads rows) x -> key_heads rows x", key_heads=2)
    for part, rows in zip(("rate_proj", "decay.proj"), joined.split(2, 1), strict=True):
        state[f"{name}{part}.weight"] = rows.flatten(0, 1)


def split_qwen3_5(state):
    split_q_and_gate(state)
    name = "layers.0.attn."
    rows = state.pop(f"{name}in_proj_qkv.weight").split([16, 16, 64])
    for part, weight in zip("qkv", rows, strict=True):
        state[f"{name}{part}_proj.weight"] = weight


def test_equals_qwen3_next():
    theirs = their_model(
        "qwen3_next", 2, num_experts=0, rope_parameters=HALF_ROTATES, **LINEAR_SIZES
    )
    require_same_model(
        our_delta_model(),
        theirs,
        GATED_NAMES,
        split_qwen3_next,
        centered=CENTERED,
        is_padded=False,
    )


def test_equals_qwen3_5():
    theirs = their_model(
        "qwen3_5_text",
        2,
        rope_parameters={**HALF_ROTATES, "mrope_section": [2, 1, 1]},
        **LINEAR_SIZES,
    )
    names = {
        **GATED_NAMES,
        "in_proj_a": "decay.proj",
        "in_proj_b": "rate_proj",
        "in_proj_z": "gate_proj",
    }
    require_same_model(
        our_delta_model(),
        theirs,
        names,
        split_qwen3_5,
        centered=CENTERED,
        is_padded=False,
    )


def test_equals_olmo_hybrid():
    """The delta layers have norms before the branches, the others after them."""
    theirs = their_model("olmo_hybrid", 2, rms_norm_eps=1e-5, **LINEAR_SIZES)
    ours = our_model(
        2, block=ReorderedNormBlock, attention=JointNormAttention, eps=1e-5
    )
    ours.layers[0] = Block(
        64,
        4,
        96,
        attention=GatedDeltaNet,
        d_head=16,
        d_key=8,
        num_key_heads=2,
        max_rate=2.0,
    )
    names = {
        "linear_attn": "attn",
        "conv1d": "conv",
        "a_proj": "decay.proj",
        "b_proj": "rate_proj",
        "g_proj": "gate_proj",
        "o_norm": "norm",
        "dt_bias": "decay.bias",
        "A_log": "decay.log_speed",
        "layers.1.post_attention_layernorm": "layers.1.ln1",
        "layers.1.post_feedforward_layernorm": "layers.1.ln2",
        "layers.1.self_attn.q_proj": "layers.1.attn.q_proj.0",
        "layers.1.self_attn.k_proj": "layers.1.attn.k_proj.0",
        "layers.1.self_attn.q_norm": "layers.1.attn.q_proj.1",
        "layers.1.self_attn.k_norm": "layers.1.attn.k_proj.1",
    }
    require_same_model(ours, theirs, names, is_padded=False)


class Unrotated(NoPositions):
    """The part of Kimi Linear's queries and keys that others rotate."""

    d_k = 8


def test_equals_kimi_linear():
    theirs = their_model(
        "kimi_linear",
        2,
        layer_types=LINEAR_THEN_FULL,
        mlp_layer_types=["dense", "dense"],
        linear_head_dim=16,
        linear_num_heads=4,
        num_key_value_heads=4,
        q_lora_rank=40,
        kv_lora_rank=24,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
    )
    ours = Transformer(
        2, 64, 4, 96, max_seq_len=128, eps=1e-6, attention=KimiDeltaAttention, d_head=16
    )
    ours.layers[1].attn = LatentAttention(
        64, 4, rope=Unrotated(), d_head=16, q_rank=40, kv_rank=24
    )
    names = {**KIMI_DELTA_NAMES, **LATENT_NAMES}
    require_same_model(ours, theirs, names, flatten_speed, is_padded=False)


def flatten_speed(state):
    name = "layers.0.attn.forgetting.log_speed"
    state[name] = state[name].flatten()


DECAYS = {
    "per head": partial(HeadDecay, 1, 4000),
    "per component": partial(Forgetting, 1, 4000, 1),
}


@pytest.mark.parametrize("build", DECAYS.values(), ids=DECAYS)
def test_a_token_forgets_between_a_thousandth_and_80_percent(build):
    forgotten = 1 - build()(torch.zeros(1, 1))
    assert 0.0009 < forgotten.min().item() < 0.0015
    assert 0.7 < forgotten.max().item() < 0.8


@pytest.mark.parametrize("build", DECAYS.values(), ids=DECAYS)
def test_a_bfloat16_layer_computes_its_decay_in_float32(build):
    layer = build(dtype=torch.bfloat16)
    found = layer(torch.zeros(1, 1, dtype=torch.bfloat16)).flatten()
    speed = layer.log_speed.double().exp()
    expected = torch.exp(-speed * F.softplus(layer.bias.double())).float()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


def test_vectors_whose_squares_overflow_get_length_1():
    x = torch.full((3, 4), 6e4, dtype=torch.float16)
    assert torch.equal(unit(x), torch.full_like(x, 0.5))


def test_the_result_has_the_dtype_of_the_query():
    q, k, v = torch.randn(3, 7, 8)
    decay, rate = torch.rand(2, 7, 1)
    assert delta_rule(q.bfloat16(), k, v, decay, rate).dtype == torch.bfloat16


def test_autocast_does_not_lower_the_memory():
    inputs = (*torch.randn(3, 7, 8), *torch.rand(2, 7, 1))
    with torch.autocast("cpu", torch.bfloat16):
        out = delta_rule(*inputs)
    assert torch.equal(out, delta_rule(*inputs))
