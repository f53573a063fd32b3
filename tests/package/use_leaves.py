"""Call each leaf layer, from copies beside this file."""

import pytest
import torch
from attention import CausalMultiHeadSelfAttention
from ffn import SwiGLU
from rmsnorm import RMSNorm
from rope import RotaryPositionalEmbedding
from tools.parallelize import parallelize  # noqa: F401  it runs on several processes only

LEAVES = [
    RMSNorm(8),
    SwiGLU(8),
    RotaryPositionalEmbedding(theta=1e4, d_k=8, max_seq_len=9),
    CausalMultiHeadSelfAttention(8, num_heads=2),
]


@pytest.mark.parametrize("layer", LEAVES, ids=lambda layer: type(layer).__name__)
def test_layer_keeps_the_shape(layer):
    x = torch.randn(2, 3, 8)
    assert layer(x).shape == x.shape
