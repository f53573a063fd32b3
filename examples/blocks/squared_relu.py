"""A feed-forward layer with a squared ReLU, and without a gate.

    w2(relu(w1(x))^2)

    python examples/blocks/squared_relu.py

This command prints how many hidden components are zero, with random weights.

Source: So et al., "Primer" (arXiv 2109.08668), which finds a lower loss than with GELU
at equal cost. nanochat, Arcee and Nemotron have it.
To copy this file, import FeedForward from your copy of ffn.py. Only `main` uses it.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from tinyblock import FeedForward


def squared_relu(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return relu(x)^2. Pass `ffn=partial(FeedForward, activation=squared_relu)`."""
    return F.relu(x).square()


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    layer = FeedForward(64, activation=squared_relu)
    hidden = layer.activation(layer.w1(torch.randn(1000, 64)))
    print(f"{(hidden == 0).float().mean():.0%} of the hidden components are zero")


if __name__ == "__main__":
    main()
