"""Defaults, which the contract leaves to the owner of a copy, and rare options."""

import importlib
import inspect
from typing import Any

import pytest
import torch
from einops import EinopsError
from torch import nn

import tinyblock
from tinyblock.verify import LAYERS

PLACE = "device=None, dtype=None"
DEFAULTS = {
    "rms_norm": "eps=1e-05",
    "RMSNorm": f"eps=1e-05, {PLACE}",
    "feed_forward": "activation=gelu",
    "SwiGLU": f"d_ff=None, {PLACE}",
    "FeedForward": f"d_ff=None, activation=gelu, {PLACE}",
    "RotaryPositionalEmbedding": "device=None",
    "CausalMultiHeadSelfAttention": "num_kv_heads=None, d_head=None, rope=None, "
    f"qk_norm=False, eps=1e-05, {PLACE}",
    "Block": "d_ff=None, rope=None, ffn=SwiGLU, norm=RMSNorm, "
    f"attention=CausalMultiHeadSelfAttention, eps=1e-05, {PLACE}",
    "Transformer": "d_ff=None, theta=10000.0, rope=None, block=Block, norm=RMSNorm, "
    f"d_head=None, eps=1e-05, {PLACE}",
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_options_have_these_defaults(name):
    found = []
    for option in inspect.signature(getattr(tinyblock, name)).parameters.values():
        if option.default is not option.empty:
            value = getattr(option.default, "__name__", option.default)
            found.append(f"{option.name}={value}")
    assert ", ".join(found) == DEFAULTS[name]


@pytest.mark.parametrize("layer", LAYERS)
def test_each_case_of_the_contract_runs_on_tinyblocks_layer(layer):
    """A misspelled option would leave its case out, as in a copy without the option."""
    page = importlib.import_module(f"tinyblock.contract.test_{layer}")
    pages = [each for name, each in vars(page).items() if name.startswith("Test")]
    assert pages
    for each in pages:
        for title, case in each.cases.items():
            try:
                case.construct()
            except pytest.skip.Exception as reason:
                pytest.fail(f"{title}: {reason}")


def test_a_block_need_not_take_a_head_size():
    def block(d_model, num_heads, d_ff, *, rope, norm, eps, device, dtype):
        return tinyblock.Block(d_model, num_heads, d_ff, rope=rope)

    stack = tinyblock.Transformer(1, 8, 2, max_seq_len=9, block=block)
    assert stack(torch.randn(2, 3, 8)).shape == (2, 3, 8)


def test_query_and_key_norms_may_have_no_gains():
    layer: Any = tinyblock.CausalMultiHeadSelfAttention(24, 4, qk_norm=True)
    x = torch.randn(2, 7, 24)
    expected = layer(x)
    layer.q_norm = nn.RMSNorm(6, 1e-5, elementwise_affine=False)
    layer.k_norm = nn.RMSNorm(6, 1e-5, elementwise_affine=False)
    torch.testing.assert_close(layer(x), expected)


def test_query_and_key_norms_may_stay_in_float32():
    layer = tinyblock.CausalMultiHeadSelfAttention(24, 4, qk_norm=True)
    x = torch.randn(2, 7, 24)
    expected = layer(x)
    layer.bfloat16()
    layer.q_norm.float()
    layer.k_norm.float()
    result = layer(x.bfloat16())
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.float(), expected, rtol=0.1, atol=0.05)


def test_the_equation_rejects_rows_that_are_no_whole_heads():
    """10 rows are no 4 heads, but 5 heads of 2."""
    x, wq, wo = torch.randn(7, 24), torch.randn(10, 24), torch.randn(24, 10)
    with pytest.raises(EinopsError):
        tinyblock.causal_multi_head_self_attention(x, wq, wq, wq, wo, num_heads=4)


def test_every_positive_theta_and_eps_is_accepted():
    assert tinyblock.RotaryPositionalEmbedding(0.5, 6, 9).theta == 0.5
    assert tinyblock.RMSNorm(6, eps=2.0).eps == 2.0
    layer = tinyblock.CausalMultiHeadSelfAttention(24, 4, qk_norm=True, eps=2.0)
    assert layer.q_norm.eps == 2.0


def test_the_smallest_sizes_are_accepted():
    rope = tinyblock.RotaryPositionalEmbedding(100.0, 2, 1)
    model = tinyblock.Transformer(1, 1, 1, 1, max_seq_len=1, d_head=2, rope=rope)
    assert model(torch.ones(1, 1)).shape == (1, 1)


@pytest.mark.parametrize("layer", [tinyblock.SwiGLU, tinyblock.FeedForward])
def test_a_wrong_width_is_named(layer):
    with pytest.raises(ValueError, match="d_model=8, d_ff=0"):
        layer(8, 0)
