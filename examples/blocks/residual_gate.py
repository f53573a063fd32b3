"""A gate for each component of the residual stream: how much it keeps, and takes over.

    take = sigmoid(w),  keep = sqrt(1 - take^2)
    y = keep * x + take * norm(attn(norm(x))),  and the same with ffn

    python examples/blocks/residual_gate.py

This command prints what a gate keeps and takes, from closed to open.

Because keep^2 + take^2 = 1, a sum of independent terms keeps the scale of x. `keep^2` is
at least 0.001, so that a gradient always flows through the stream.
Source: `MuseSparkResidualGate` of Muse Spark in transformers.
To copy this file, also copy sandwich_norm.py.
"""

from typing import Any

import torch
from jaxtyping import Float, Integer
from sandwich_norm import SandwichBlock
from torch import Tensor, nn


class ResidualGate(nn.Module):
    """Add a branch to x, with two weights for each component. `temperature` divides w."""

    def __init__(
        self, d_model: int, temperature: float = 1.0, device: Any = None
    ) -> None:
        super().__init__()
        self.d_model = d_model
        self.temperature = temperature
        self.weight = nn.Parameter(torch.empty(d_model, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set take to 1/2."""
        nn.init.zeros_(self.weight)

    def weights(self) -> tuple[Float[Tensor, " d_model"], Float[Tensor, " d_model"]]:
        """Return keep and take."""
        logits = self.weight / self.temperature
        take = logits.sigmoid()
        # 1 - take is sigmoid(-logits), which stays exact where take is almost 1.
        keep_squared = (-logits).sigmoid() * (1 + take)
        return keep_squared.clamp(min=1e-3).sqrt(), take

    def forward(
        self,
        x: Float[Tensor, "*batch {self.d_model}"],
        branch: Float[Tensor, "*batch {self.d_model}"],
    ) -> Float[Tensor, "*batch {self.d_model}"]:
        keep, take = self.weights()
        return (keep * x + take * branch).to(x.dtype)


class GatedResidualBlock(SandwichBlock):
    """A block with two norms per branch, and gates in place of its sums."""

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        d_ff: int | None = None,
        *,
        temperature: float = 1.0,
        **options: Any,
    ) -> None:
        super().__init__(d_model, num_heads, d_ff, **options)
        device = options.get("device")
        self.attn_gate = ResidualGate(d_model, temperature, device)
        self.ffn_gate = ResidualGate(d_model, temperature, device)

    def forward(
        self,
        x: Float[Tensor, "*batch seq {self.d_model}"],
        token_positions: Integer[Tensor, "*#batch seq"] | None = None,
        mask: Any = None,
    ) -> Float[Tensor, "*batch seq {self.d_model}"]:
        attended = self.attn(self.ln1(x), token_positions, mask)
        x = self.attn_gate(x, self.post_ln1(attended))
        return self.ffn_gate(x, self.post_ln2(self.ffn(self.ln2(x))))


@torch.no_grad()
def main() -> None:
    gate = ResidualGate(5)
    gate.weight.copy_(torch.tensor([-8.0, -2.0, 0.0, 2.0, 8.0]))
    for weight, keep, take in zip(gate.weight, *gate.weights(), strict=True):
        print(f"w = {weight:4.0f}: keeps {keep:.3f}, takes {take:.3f}")


if __name__ == "__main__":
    main()
