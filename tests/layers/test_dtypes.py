"""The dtype and the device of each result, and how often it is rounded."""

import pytest
import torch
from torch import nn

import tinyblock
from tinyblock import (
    Block,
    CausalMultiHeadSelfAttention,
    FeedForward,
    RMSNorm,
    RotaryPositionalEmbedding,
    SwiGLU,
    Transformer,
)

# Under autocast to bfloat16, for x in float32.
RESULTS = {
    RMSNorm(24): torch.float32,
    RotaryPositionalEmbedding(100.0, 24, 40): torch.float32,
    SwiGLU(24): torch.bfloat16,
    FeedForward(24): torch.bfloat16,
    CausalMultiHeadSelfAttention(24, 4, qk_norm=True): torch.bfloat16,
    Block(24, 4, qk_norm=True): torch.float32,
    Transformer(1, 24, 4, max_seq_len=40): torch.float32,
}


@pytest.mark.parametrize("layer", RESULTS, ids=lambda layer: type(layer).__name__)
def test_autocast_rounds_the_results_of_products_alone(layer):
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(2, 7, 24)).dtype == RESULTS[layer]


@pytest.mark.parametrize("build", [RMSNorm, tinyblock.attention.HeadNorm])
@pytest.mark.parametrize(
    ("dtype", "of_gains"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.bfloat16),
        (torch.bfloat16, torch.float32),  # as under autocast
        (torch.float64, torch.float32),
    ],
    ids=str,
)
def test_a_norm_takes_gains_of_another_dtype(dtype, of_gains, build):
    """It computes in the wider dtype, and rounds once to the dtype of x."""
    norm = build(6, eps=1e-5)
    nn.init.normal_(norm.weight, mean=1)
    norm.to(of_gains)
    x = torch.randn(50, 6).to(dtype)
    exact = tinyblock.rms_norm(x.double(), norm.weight.double())
    result = norm(x)
    assert result.dtype == dtype
    half_a_unit = torch.finfo(dtype).eps / 2
    rounding = 8 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    error = (result.double() - exact).abs()
    assert (error <= (half_a_unit + rounding) * exact.abs()).all()
