"""Partial RoPE: rotate the first d_k components of each head by positions.

    (x[:d_k], x[d_k:])  ->  (RoPE(x[:d_k]), x[d_k:])

    python examples/blocks/partial_rope.py

This command prints how much of a head a rotation changes.

The other components compare contents at any distance.
Sources: Black et al., "GPT-NeoX-20B" (arXiv 2204.06745); Phi-4-mini
(arXiv 2503.01743), GLM-4, Qwen3-Next and MiniMax-M2 also rotate a part of the head.
"""

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn

from tinyblock import RotaryPositionalEmbedding


class PartialRope(nn.Module):
    """Apply a `rope` to the first rope.d_k components, and keep the others."""

    def __init__(self, rope: RotaryPositionalEmbedding) -> None:
        super().__init__()
        self.rope = rope

    def forward(
        self,
        x: Float[Tensor, "*batch seq d_head"],
        token_positions: Integer[Tensor, "*#batch seq"] | None = None,
    ) -> Float[Tensor, "*batch seq d_head"]:
        d_k = self.rope.d_k
        rotated = self.rope(x[..., :d_k], token_positions)
        return torch.cat((rotated, x[..., d_k:]), dim=-1)


def main() -> None:
    rope = PartialRope(RotaryPositionalEmbedding(10000.0, 8, max_seq_len=128))
    x = torch.ones(128, 16)
    changed = (rope(x) != x).any(0).tolist()
    print("components that rotate:", "".join("x" if each else "-" for each in changed))


if __name__ == "__main__":
    main()
