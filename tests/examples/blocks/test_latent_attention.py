"""Latent attention, with and without an indexer."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from experts import MixtureOfExperts
from indexer import Indexer, SparseAttention
from latent_attention import LatentAttention
from their_models import (
    EXPERTS,
    LATENT_NAMES,
    Halves,
    require_same_model,
    split_experts,
    their_model,
)

from tinyblock import RotaryPositionalEmbedding, Transformer

LATENT_SIZES = {
    "q_lora_rank": 40,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "first_k_dense_replace": 0,
    "mlp_layer_types": ["sparse"],
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "index_n_heads": 6,
    "index_head_dim": 16,
    "index_topk": 5,
    **EXPERTS,
}
DEEPSEEK_NAMES = {
    **LATENT_NAMES,
    "indexer.wq_b": "indexer.q_proj",
    "indexer.wk": "indexer.k_proj",
}
LATENT = partial(LatentAttention, d_head=16, q_rank=40, kv_rank=24)
SPARSE = partial(
    SparseAttention,
    d_head=16,
    q_rank=40,
    kv_rank=24,
    top_k=5,
    index_heads=6,
    index_d_head=16,
)


def our_model(attention, **experts):
    return Transformer(
        1,
        64,
        4,
        96,
        max_seq_len=128,
        eps=1e-6,
        rope=RotaryPositionalEmbedding(1e4, 8, 128),
        attention=attention,
        ffn=partial(MixtureOfExperts, top_k=3, scale=2.5, **experts),
    )


def test_equals_deepseek_v2():
    theirs = their_model("deepseek_v2", topk_method="greedy", **LATENT_SIZES)
    ours = our_model(LATENT, is_softmax=True, is_normalized=False)
    require_same_model(ours, theirs, DEEPSEEK_NAMES, split_experts)


def test_equals_deepseek_v3():
    theirs = their_model("deepseek_v3", **LATENT_SIZES)
    require_same_model(our_model(LATENT), theirs, DEEPSEEK_NAMES, split_experts)


def test_equals_deepseek_v32():
    theirs = their_model("deepseek_v32", **LATENT_SIZES)
    ours = our_model(SPARSE)
    # Its indexer pairs other components than its attention does.
    ours.layers[0].attn.indexer.rope.rope = Halves(1e4, 8, 128)
    require_same_model(ours, theirs, DEEPSEEK_NAMES, split_experts)


def test_equals_glm_moe_dsa():
    theirs = their_model("glm_moe_dsa", **LATENT_SIZES)
    require_same_model(our_model(SPARSE), theirs, DEEPSEEK_NAMES, split_experts)


@pytest.mark.parametrize("top_k", [6, 9])
def test_all_earlier_keys_are_chosen_where_they_are_top_k_or_fewer(top_k):
    rope = RotaryPositionalEmbedding(1e4, 8, 128)
    attention = SPARSE(64, 4, rope=rope, top_k=top_k)
    chosen = attention.choose(torch.randn(6, 64), None, None)
    assert torch.equal(chosen, torch.ones(6, 6, dtype=torch.bool).tril())


def test_scores_of_the_indexer_are_those_of_its_formula():
    """The keys are small, so that the eps of their norm matters."""
    rope = RotaryPositionalEmbedding(1e4, 2, 9)
    indexer = Indexer(8, 3, rope=rope, d_head=4, q_rank=6, dtype=torch.float64)
    indexer.k_proj.weight.data *= 1e-3
    x = torch.randn(5, 8, dtype=torch.float64)
    latent = torch.randn(5, 6, dtype=torch.float64)
    k = F.layer_norm(indexer.k_proj(x), (4,), eps=1e-6)
    k = torch.cat((rope(k[:, :2]), k[:, 2:]), dim=-1)
    expected = torch.zeros(5, 5, dtype=torch.float64)
    for q, weight in zip(
        indexer.q_proj(latent).split(4, -1), indexer.weights_proj(x).mT, strict=True
    ):
        q = torch.cat((rope(q[:, :2]), q[:, 2:]), dim=-1)
        expected += weight[:, None] / 3**0.5 * F.relu(q @ k.mT / 4**0.5)
    torch.testing.assert_close(indexer(x, latent, None), expected)


@torch.no_grad()
def test_autocast_does_not_lower_the_scores_of_the_indexer():
    """Each of 9 sequences has one token, at position 0, where nothing is rotated."""
    indexer = Indexer(
        64, 4, rope=RotaryPositionalEmbedding(1e4, 8, 9), d_head=8, q_rank=6
    )
    x = torch.randn(9, 1, 64)
    q_latent = torch.randn(9, 1, 6)
    with torch.autocast("cpu", torch.bfloat16):
        scores = indexer(x, q_latent, None)
        q = indexer.q_proj(q_latent).double()
        k = indexer.k_norm(indexer.k_proj(x)).double()
        weights = indexer.weights_proj(x).double() / 4**0.5
    q = rearrange(q, "... (heads d_head) -> ... heads d_head", heads=4)
    dots = (q @ k.unsqueeze(-1)).squeeze(-1) / 8**0.5
    expected = (weights * dots.relu()).sum(-1, keepdim=True).float()
    torch.testing.assert_close(scores, expected)
