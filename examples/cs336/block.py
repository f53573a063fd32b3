"""A block that calls the functions of a CS336 solution: see rmsnorm.py."""

from typing import Any

from tests.adapters import run_transformer_block
from torch import Tensor, nn

from .attention import CausalMultiHeadSelfAttention
from .ffn import SwiGLU
from .rmsnorm import RMSNorm


class Block(nn.Module):
    def __init__(self, d_model: int, num_heads: int, d_ff: int, rope: Any) -> None:
        super().__init__()
        self.sizes = {
            "d_model": d_model,
            "num_heads": num_heads,
            "d_ff": d_ff,
            **rope.table,
        }
        self.ln1 = RMSNorm(d_model)
        self.attn = CausalMultiHeadSelfAttention(d_model, num_heads)
        self.ln2 = RMSNorm(d_model)
        self.ffn = SwiGLU(d_model, d_ff)

    def forward(self, x: Tensor) -> Tensor:
        return run_transformer_block(
            **self.sizes, weights=self.state_dict(), in_features=x
        )
