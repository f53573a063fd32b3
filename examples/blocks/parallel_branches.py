"""Parallel branches: attention and feed-forward both read the same normalized x.

    x + attn(norm(x)) + ffn(norm(x))

    python examples/blocks/parallel_branches.py

This command removes attention, and prints by how much this changes what the feed-forward
layer reads: in Block it reads what attention has added, and here it does not.

The matmuls of both branches can run at the same time, and the block has one norm.
Sources: Wang and Komatsuzaki, GPT-J (2021); Chowdhery et al., "PaLM" (arXiv 2204.02311).
Command R has it, with a LayerNorm without bias.
"""

from typing import Any

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from tinyblock import Block


class ParallelBlock(Block):
    """A Block whose branches share `ln1`. It has no `ln2`."""

    def __init__(
        self, d_model: int, num_heads: int, d_ff: int | None = None, **options: Any
    ) -> None:
        super().__init__(d_model, num_heads, d_ff, **options)
        del self.ln2

    def forward(
        self,
        x: Float[Tensor, "*batch seq {self.d_model}"],
        token_positions: Integer[Tensor, "*#batch seq"] | None = None,
        mask: Any = None,
    ) -> Float[Tensor, "*batch seq {self.d_model}"]:
        normalized = self.ln1(x)
        attended = self.attn(normalized, token_positions, mask)
        return x + attended + self.ffn(normalized)


def input_of_ffn(block: Block, x: Tensor) -> Tensor:
    """Return what a block's feed-forward layer reads."""
    inputs: list[Tensor] = []
    hook = block.ffn.register_forward_pre_hook(lambda _, args: inputs.append(*args))
    block(x)
    hook.remove()
    return inputs[0]


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(20, 64)
    for kind in (Block, ParallelBlock):
        block: Any = kind(64, 4)
        before = input_of_ffn(block, x)
        block.attn.output_proj.weight.zero_()
        difference = (input_of_ffn(block, x) - before).abs().max()
        print(f"{kind.__name__}: attention changes what ffn reads by {difference:.1f}")


if __name__ == "__main__":
    main()
