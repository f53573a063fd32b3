"""Call each leaf layer, from copies beside this file."""

import refuse  # noqa: F401  before the copies
import torch
from attention import CausalMultiHeadSelfAttention
from ffn import SwiGLU
from parallelize import parallelize  # noqa: F401  it runs on several processes only
from rmsnorm import RMSNorm
from rope import RotaryPositionalEmbedding

x = torch.randn(2, 3, 8)
for layer in (
    RMSNorm(8),
    SwiGLU(8),
    RotaryPositionalEmbedding(theta=1e4, d_k=8, max_seq_len=9),
    CausalMultiHeadSelfAttention(8, num_heads=2),
):
    assert layer(x).shape == x.shape, layer
