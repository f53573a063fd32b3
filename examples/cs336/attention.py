"""Attention that calls the functions of a CS336 solution: see rmsnorm.py."""

from typing import Any

from tests.adapters import (
    run_multihead_self_attention,
    run_multihead_self_attention_with_rope,
    run_scaled_dot_product_attention,
)
from torch import Tensor, nn

from .ffn import frozen_linear


def scaled_dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Any = None
) -> Tensor:
    return run_scaled_dot_product_attention(Q=q, K=k, V=v, mask=mask)


class CausalMultiHeadSelfAttention(nn.Module):
    def __init__(self, d_model: int, num_heads: int, rope: Any = None) -> None:
        super().__init__()
        self.sizes = {"d_model": d_model, "num_heads": num_heads}
        self.rope = rope
        self.q_proj = frozen_linear(d_model, d_model)
        self.k_proj = frozen_linear(d_model, d_model)
        self.v_proj = frozen_linear(d_model, d_model)
        self.output_proj = frozen_linear(d_model, d_model)

    def forward(self, x: Tensor, token_positions: Tensor | None = None) -> Tensor:
        inputs = {
            **self.sizes,
            "q_proj_weight": self.q_proj.weight,
            "k_proj_weight": self.k_proj.weight,
            "v_proj_weight": self.v_proj.weight,
            "o_proj_weight": self.output_proj.weight,
            "in_features": x,
        }
        if self.rope is None:
            return run_multihead_self_attention(**inputs)
        return run_multihead_self_attention_with_rope(
            **inputs, **self.rope.table, token_positions=token_positions
        )
