"""RoPE that calls a function of a CS336 solution: see rmsnorm.py."""

from tests.adapters import run_rope
from torch import Tensor, nn


class RotaryPositionalEmbedding(nn.Module):
    def __init__(self, theta: float, d_k: int, max_seq_len: int) -> None:
        super().__init__()
        self.d_k = d_k
        self.table = {"theta": theta, "max_seq_len": max_seq_len}

    def forward(self, x: Tensor, token_positions: Tensor) -> Tensor:
        return run_rope(
            **self.table,
            d_k=self.d_k,
            in_query_or_key=x,
            token_positions=token_positions,
        )
