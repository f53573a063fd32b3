"""Call a copied Block, whose attention is own_attention.py."""

import torch
from my_layers.block import Block
from my_layers.rope import RotaryPositionalEmbedding


def test_block_keeps_the_shape():
    x = torch.randn(2, 3, 8)
    rope = RotaryPositionalEmbedding(theta=1e4, d_k=8, max_seq_len=9)
    block = Block(8, num_heads=2, rope=rope)
    block.reset_parameters()
    assert block(x).shape == x.shape
