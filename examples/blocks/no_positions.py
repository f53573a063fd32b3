"""No positions in some layers: these find contents at any distance.

    q = W_q x,  k = W_k x,  without a rotation

    python examples/blocks/no_positions.py

This command shows that a layer without positions gives the last token the same output
when the earlier tokens change their order, and that RoPE does not.

Sources: Yang et al., "RoPE to NoPE and Back Again" (arXiv 2501.18795); Bakouch et al.,
SmolLM3 (2025), where every 4th layer has no positions. In EXAONE 4, Command R7B, Flint
and Trinity, only the layers with windows have positions.
To copy this file, import Transformer from your copy of transformer.py.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tinyblock import Transformer


class NoPositions(nn.Module):
    """A rope that rotates nothing, and accepts any positions."""

    def forward(
        self, x: Float[Tensor, "*batch seq d_head"], token_positions: Any = None
    ) -> Float[Tensor, "*batch seq d_head"]:
        return x


def drop_positions(model: Transformer, every: int = 4) -> None:
    """Take the positions from every n-th layer."""
    layers: Any = model.layers
    for block in layers[every - 1 :: every]:
        block.attn.rope = NoPositions()


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(20, 64)
    swapped = x.clone()
    swapped[:2] = x[:2].flip(0)
    model = Transformer(1, 64, 4, max_seq_len=20)
    for kind in ("RoPE", "no positions"):
        difference = (model(x)[-1] - model(swapped)[-1]).abs().max()
        print(
            f"{kind}: the order of other tokens changes the last one by {difference:.0e}"
        )
        drop_positions(model, every=1)


if __name__ == "__main__":
    main()
