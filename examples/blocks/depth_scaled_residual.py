"""Residual sums scaled by depth: a branch counts as much as each branch before it.

    sum number n:  x * sqrt((n - 1) / n) + branch(x) / sqrt(n)

    python examples/blocks/depth_scaled_residual.py

This command prints the root mean square of the stream after 1, 4 and 16 layers, in a
Transformer and here.

The embedding is the first term. If all terms have one scale and are independent, the
stream keeps this scale, and late layers change it as much as early ones.
Source: `depth_scaled_residual_add` of Beam in transformers. Beam has two norms per
branch, too.
To copy this file, also copy sandwich_norm.py, and import Transformer from your copy of
transformer.py.
"""

from typing import Any

import torch
from jaxtyping import Float, Integer
from sandwich_norm import SandwichBlock
from torch import Tensor

from tinyblock import Transformer


class DepthScaledBlock(SandwichBlock):
    """A block whose sums have the numbers `first_sum` and `first_sum + 1`."""

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        d_ff: int | None = None,
        *,
        first_sum: int,
        **options: Any,
    ) -> None:
        super().__init__(d_model, num_heads, d_ff, **options)
        self.first_sum = first_sum

    def forward(
        self,
        x: Float[Tensor, "*batch seq {self.d_model}"],
        token_positions: Integer[Tensor, "*#batch seq"] | None = None,
        mask: Any = None,
    ) -> Float[Tensor, "*batch seq {self.d_model}"]:
        attended = self.attn(self.ln1(x), token_positions, mask)
        x = add(x, self.post_ln1(attended), number=self.first_sum)
        return add(x, self.post_ln2(self.ffn(self.ln2(x))), number=self.first_sum + 1)


def add(
    x: Float[Tensor, "*shape"], branch: Float[Tensor, "*shape"], number: int
) -> Float[Tensor, "*shape"]:
    """Return the weighted sum after its term `branch`, which has this number."""
    kept = (number - 1) / number
    return kept**0.5 * x + (1 - kept) ** 0.5 * branch


class DepthScaledTransformer(Transformer):
    """A Transformer that numbers its sums from 2, because the embedding is term 1."""

    def __init__(
        self,
        num_layers: int,
        d_model: int,
        num_heads: int,
        d_ff: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            num_layers,
            d_model,
            num_heads,
            d_ff,
            block=DepthScaledBlock,
            first_sum=2,
            **options,
        )
        layers: Any = self.layers
        for index, block in enumerate(layers):
            block.first_sum = 2 + 2 * index


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(20, 64)
    for kind in (Transformer, DepthScaledTransformer):
        stream = x
        sizes = []
        for block in kind(16, 64, 4, max_seq_len=20).layers:
            stream = block(stream)
            sizes.append(stream.square().mean().sqrt().item())
        print(f"{kind.__name__}: {sizes[0]:.2f}, {sizes[3]:.2f}, {sizes[15]:.2f}")


if __name__ == "__main__":
    main()
