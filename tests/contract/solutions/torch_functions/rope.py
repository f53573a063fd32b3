import torch
from einops import rearrange, repeat
from torch import nn


class RotaryPositionalEmbedding(nn.Module):
    """Rotate by cosines and sines of the width of x, and x with its pairs turned."""

    def __init__(self, theta, d_k, max_seq_len):
        super().__init__()
        exponents = torch.arange(0, d_k, 2, dtype=torch.float64) / d_k
        positions = torch.arange(max_seq_len, dtype=torch.float64)
        angles = positions[:, None] / theta**exponents
        angles = repeat(angles, "seq half -> seq (half pair)", pair=2)
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def forward(self, x, token_positions):
        even, odd = rearrange(x, "... (half pair) -> pair ... half", pair=2)
        turned = rearrange([-odd, even], "pair ... half -> ... (half pair)")
        cos = nn.functional.embedding(token_positions, self.cos)
        sin = nn.functional.embedding(token_positions, self.sin)
        return x * cos + turned * sin
