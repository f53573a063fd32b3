"""The dtype of each result, under autocast and with gains of another dtype."""

import pytest
import torch
from torch import nn

from tinyblock import (
    Block,
    CausalMultiHeadSelfAttention,
    FeedForward,
    RMSNorm,
    RotaryPositionalEmbedding,
    SwiGLU,
    Transformer,
    rms_norm,
)
from tinyblock.attention import HeadNorm

# Under autocast to bfloat16, for x in float32.
RESULTS = [
    (RMSNorm(24), torch.float32),
    (RotaryPositionalEmbedding(100.0, 24, 40), torch.float32),
    (SwiGLU(24), torch.bfloat16),
    (FeedForward(24), torch.bfloat16),
    (CausalMultiHeadSelfAttention(24, 4, qk_norm=True), torch.bfloat16),
    (Block(24, 4, qk_norm=True), torch.float32),
    (Transformer(1, 24, 4, max_seq_len=40), torch.float32),
]


@pytest.mark.parametrize(
    ("layer", "dtype"), RESULTS, ids=lambda value: str(value).partition("(")[0]
)
def test_autocast_rounds_the_results_of_products_alone(layer, dtype):
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(2, 7, 24)).dtype == dtype


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
    norm = HeadNorm(6, 1e-5)
    nn.init.normal_(norm.weight, mean=1)
    norm.to(of_gains)
    x = torch.randn(50, 6).to(dtype)
    exact = rms_norm(x.double(), norm.weight.double())
    result = norm(x)
    assert result.dtype == dtype
    half_a_unit = torch.finfo(dtype).eps / 2
    rounding = torch.finfo(torch.float32).eps * 8
    error = (result.double() - exact).abs()
    assert (error <= (half_a_unit + rounding) * exact.abs()).all()
