"""Scaled residual sums: each branch adds only a part to the residual stream.

    y = x + scale * attn(norm(x)),  then  y + scale * ffn(norm(y))

    python examples/blocks/scaled_residual.py

This command prints the root mean square of a stream after 16 layers, for several scales.

Sources: `residual_multiplier` of Granite in transformers; Yang et al., "Tensor Programs
VI" (arXiv 2310.02244), which derives the scale 1 / sqrt(number of layers).
To copy this file, import Block and Transformer from your copies of block.py and
transformer.py.
"""

from typing import Any

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from tinyblock import Block, Transformer


class ScaledBlock(Block):
    """A Block that multiplies what each branch adds by `residual_scale`."""

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        d_ff: int | None = None,
        *,
        residual_scale: float,
        **options: Any,
    ) -> None:
        super().__init__(d_model, num_heads, d_ff, **options)
        self.residual_scale = residual_scale

    def forward(
        self,
        x: Float[Tensor, "*batch seq {self.d_model}"],
        token_positions: Integer[Tensor, "*#batch seq"] | None = None,
        mask: Any = None,
    ) -> Float[Tensor, "*batch seq {self.d_model}"]:
        attended = self.attn(self.ln1(x), token_positions, mask)
        x = x + self.residual_scale * attended
        return x + self.residual_scale * self.ffn(self.ln2(x))


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(20, 64)
    for scale in (1.0, 0.5, 0.25):
        model = Transformer(
            16, 64, 4, max_seq_len=20, block=ScaledBlock, residual_scale=scale
        )
        stream = x
        for block in model.layers:
            stream = block(stream)
        print(f"scale {scale}: {stream.square().mean().sqrt():.2f}")


if __name__ == "__main__":
    main()
