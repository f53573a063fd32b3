"""A norm without gains: the next projection can learn them.

    norm(x) = x / sqrt(mean(x^2) + eps)

    python examples/blocks/norm_without_gain.py

This command shows that a projection whose columns are scaled replaces the gains.

Sources: Groeneveld et al., "OLMo" (arXiv 2402.00838), section 2.1, for a LayerNorm
without gains and bias; nanochat, for RMSNorm.
To copy this file, import RMSNorm from your copy of rmsnorm.py. Only `main` uses it.
"""

from typing import Any

import torch
from torch import nn

from tinyblock import RMSNorm


def norm_without_gain(d_model: int, eps: float, **_: Any) -> nn.Module:
    """Build an RMSNorm without parameters, as `Transformer(norm=...)` calls it."""
    return nn.RMSNorm(d_model, eps, elementwise_affine=False)


def layer_norm_without_gain(d_model: int, eps: float, **_: Any) -> nn.Module:
    """Build a LayerNorm without parameters, as `Transformer(norm=...)` calls it."""
    return nn.LayerNorm(d_model, eps, elementwise_affine=False)


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(20, 64)
    linear = nn.Linear(64, 64, bias=False)
    with_gains = RMSNorm(64)
    with_gains.weight.uniform_(0.5, 2)
    expected = linear(with_gains(x))
    linear.weight *= with_gains.weight
    without = linear(norm_without_gain(64, eps=1e-5)(x))
    print(f"difference: {(without - expected).abs().max():.0e}")


if __name__ == "__main__":
    main()
