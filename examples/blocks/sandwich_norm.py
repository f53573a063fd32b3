"""Two norms per branch: one before it, and one after it.

    y = x + norm(attn(norm(x))),  then  y + norm(ffn(norm(y)))

    python examples/blocks/sandwich_norm.py

This command multiplies the weights of both branches by 100, and prints how much they
then add to x, with one norm and with two.

What a branch adds is bounded, so training is more stable.
Sources: Ding et al., "CogView" (arXiv 2105.13290), as Sandwich LayerNorm;
Gemma 2 (arXiv 2408.00118), Gemma 3, GLM-4, Kolibri 1 and Trinity have it.
"""

from typing import Any

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from tinyblock import Block, RMSNorm


class SandwichBlock(Block):
    """A Block with a second norm, of the same kind, after each branch."""

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        d_ff: int | None = None,
        *,
        norm: Any = RMSNorm,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(
            d_model, num_heads, d_ff, norm=norm, eps=eps, **factory, **options
        )
        self.post_ln1 = norm(d_model, eps=eps, **factory)
        self.post_ln2 = norm(d_model, eps=eps, **factory)

    def forward(
        self,
        x: Float[Tensor, "*batch seq {self.d_model}"],
        token_positions: Integer[Tensor, "*#batch seq"] | None = None,
        mask: Any = None,
    ) -> Float[Tensor, "*batch seq {self.d_model}"]:
        x = x + self.post_ln1(self.attn(self.ln1(x), token_positions, mask))
        return x + self.post_ln2(self.ffn(self.ln2(x)))


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(20, 64)
    for kind in (Block, SandwichBlock):
        block: Any = kind(64, 4)
        block.attn.output_proj.weight *= 100
        block.ffn.w2.weight *= 100
        added = (block(x) - x).square().mean().sqrt()
        print(f"{kind.__name__}: the branches add {added:.1f} to each component of x")


if __name__ == "__main__":
    main()
