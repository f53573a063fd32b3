import torch
from torch import nn


class RotaryPositionalEmbedding(nn.Module):
    """Multiply pairs, as complex numbers, by those of a table."""

    def __init__(self, theta, d_k, max_seq_len):
        super().__init__()
        frequencies = 1.0 / theta ** (torch.arange(0, d_k, 2) / d_k)
        angles = torch.outer(torch.arange(max_seq_len), frequencies)
        table = torch.polar(torch.ones_like(angles), angles)
        self.register_buffer("table", table, persistent=False)

    def forward(self, x, token_positions):
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * self.table[token_positions]).flatten(-2)
