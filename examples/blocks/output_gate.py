"""Output gates: each head's result is multiplied by a gate before the heads merge.

    gate = sigmoid(W_g x),  out = W_o (gate * heads)

    python examples/blocks/output_gate.py

This command prints how much a head adds for an open and a closed gate.

With a gate, a head can add nothing. Without one, it often attends to the first token
for this.
Source: Qiu et al., "Gated Attention for Large Language Models" (arXiv 2505.06708), for
one gate per component, as in Qwen3-Next and Trinity. LFM3 and Step 3.7 have one gate per
head, and the gate of Laguna is softplus(W_g x).
"""

from collections.abc import Callable
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float, Integer
from torch import Tensor

from tinyblock import CausalMultiHeadSelfAttention
from tinyblock.attention import Linear


class GatedAttention(CausalMultiHeadSelfAttention):
    """Attention with a gate for each component of each head, or one for each head."""

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        gate_per_head: bool = False,
        gate_activation: Callable[[Tensor], Tensor] = torch.sigmoid,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(d_model, num_heads, **factory, **options)
        self.gate_activation = gate_activation
        gates = num_heads if gate_per_head else num_heads * self.d_head
        self.gate_proj = Linear(d_model, gates, bias=False, **factory)

    def forward(
        self,
        x: Float[Tensor, "*batch seq {self.d_model}"],
        token_positions: Integer[Tensor, "*#batch seq"] | None = None,
        mask: Any = None,
    ) -> Float[Tensor, "*batch seq {self.d_model}"]:
        q, k, v = self.project(x, token_positions)
        out = self.attend(q, k, v, mask)
        gate = self.gate_activation(self.gate_proj(x))
        # With a gate per head, `gates` is 1, and the product broadcasts.
        split = "... seq (heads gates) -> ... heads seq gates"
        out = out * rearrange(gate, split, heads=self.num_heads)
        merged = rearrange(out, "... heads seq d_head -> ... seq (heads d_head)")
        return self.output_proj(merged)


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(20, 64).abs()
    attention = GatedAttention(64, num_heads=1, gate_per_head=True)
    for value in (1.0, -1.0):
        attention.gate_proj.weight.fill_(value)
        size = attention(x).square().mean().sqrt()
        print(f"gate weights of {value:4}: the head adds {size:.0e}")


if __name__ == "__main__":
    main()
