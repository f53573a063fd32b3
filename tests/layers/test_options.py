"""Defaults, which the contract leaves to the owner of a copy, and rare options."""

import inspect
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tinyblock
from tinyblock import transformer

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


def test_transformer_builds_its_rope_on_its_device():
    rope = tinyblock.RotaryPositionalEmbedding
    with patch.object(transformer, rope.__name__, wraps=rope) as build:
        tinyblock.Transformer(1, 8, 2, max_seq_len=9, device="cpu")
    build.assert_called_once_with(1e4, 4, 9, device="cpu")


@pytest.mark.parametrize("masked", [False, True])
def test_heads_are_repeated_where_no_kernel_shares_them(masked, monkeypatch):
    """As on a GPU, where torch would store all scores."""
    layer = tinyblock.CausalMultiHeadSelfAttention(24, 6, num_kv_heads=2)
    mask = torch.rand(2, 7, 7) < 0.7 if masked else None
    x = torch.randn(2, 7, 24)
    expected = layer(x, mask=mask)
    name = "_has_kernel_for_shared_heads"
    monkeypatch.setattr(tinyblock.attention, name, lambda q, mask: False)
    attend = F.scaled_dot_product_attention
    with patch.object(F, attend.__name__, wraps=attend) as called:
        result = layer(x, mask=mask)
    heads_of_q_k_v = [tensor.shape[1] for tensor in called.call_args.args]
    assert heads_of_q_k_v == [6, 6, 6]
    torch.testing.assert_close(result, expected)


def test_a_block_need_not_take_a_head_size():
    def block(d_model, num_heads, d_ff, *, rope, norm, eps, device, dtype):
        return tinyblock.Block(d_model, num_heads, d_ff, rope=rope)

    stack = tinyblock.Transformer(1, 8, 2, max_seq_len=9, block=block)
    assert stack(torch.randn(2, 3, 8)).shape == (2, 3, 8)


def test_query_and_key_norms_may_have_no_gains():
    layer = tinyblock.CausalMultiHeadSelfAttention(24, 4, qk_norm=True)
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


@pytest.mark.parametrize(
    ("dtype", "of_gains"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.bfloat16),
        (torch.bfloat16, torch.float32),  # as under autocast
    ],
    ids=str,
)
def test_norm_of_heads_takes_gains_of_another_dtype(dtype, of_gains):
    """It computes in the wider dtype, and rounds once to the dtype of x."""
    norm = tinyblock.attention.HeadNorm(6, 1e-5)
    nn.init.normal_(norm.weight, mean=1)
    norm.to(of_gains)
    x = torch.randn(50, 6).to(dtype)
    exact = tinyblock.rms_norm(x.double(), norm.weight.double())
    result = norm(x)
    assert result.dtype == dtype
    half_a_unit = torch.finfo(dtype).eps / 2
    rounding = torch.finfo(torch.float32).eps * 8
    error = (result.double() - exact).abs()
    assert (error <= (half_a_unit + rounding) * exact.abs()).all()
