"""Rotate the last position of a table of 16 on a GPU, and then the one that is passed."""

import sys

import torch

from tinyblock import RotaryPositionalEmbedding

x = torch.ones(1, 8, device="cuda")
rope = RotaryPositionalEmbedding(10000.0, d_k=8, max_seq_len=16, device="cuda")
print(rope(x, torch.tensor([15], device="cuda")).isfinite().all().item())
rope(x, torch.tensor([int(sys.argv[1])], device="cuda")).sum().item()
