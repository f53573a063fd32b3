"""Root mean square layer normalization: x / sqrt(mean(x^2) + eps) * weight.

Source: equation 4 of Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv
1910.07467); CS336 section 3.4.1.
Convention: the sum, the root and the gain are computed in float32 or wider, and rounded
once, at the end. Hugging Face's Llama rounds before the gain, which costs a second
rounding in bfloat16 and float16.
"""

import math

import torch
import torch.nn.functional as F
from einops import reduce
from jaxtyping import Float
from torch import Tensor, nn

__all__ = ["RMSNorm", "rms_norm"]


def rms_norm(
    x: Float[Tensor, "*batch d_model"],
    weight: Float[Tensor, " d_model"],
    eps: float = 1e-5,
) -> Float[Tensor, "*batch d_model"]:
    """Scale each vector of `x` to unit root mean square, then by `weight`.

    Computed in float32 or wider, returned in the dtype of `x`.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    mean_square = reduce(wide.square(), "... d_model -> ... 1", "mean")
    normalized = wide * torch.rsqrt(mean_square + eps)
    return (normalized * weight).to(x.dtype)


class RMSNorm(nn.Module):
    """Normalize the last axis by its root mean square, with a gain for each component.

    Computed in float32 or wider, returned in the dtype of the input.

    Raises:
        ValueError: d_model is below 1, or eps is not a positive finite number.
    """

    def __init__(
        self,
        d_model: int,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if d_model < 1:
            raise ValueError(f"d_model of RMSNorm must be at least 1, got {d_model}")
        if not 0 < eps < math.inf:
            raise ValueError(
                f"eps of RMSNorm must be positive and finite, such as 1e-5, got {eps}"
            )
        self.d_model = d_model
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(d_model, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set every gain to 1."""
        nn.init.ones_(self.weight)

    def forward(
        self, x: Float[Tensor, "*batch {self.d_model}"]
    ) -> Float[Tensor, "*batch {self.d_model}"]:
        weight = self.weight  # read once: the look-up costs as much as a shape check
        if x.dtype == weight.dtype:
            return F.rms_norm(x, (self.d_model,), weight, self.eps)
        # Under autocast, gains stay in float32. Given two dtypes, F.rms_norm warns and
        # leaves its fused kernel.
        wide = torch.promote_types(x.dtype, torch.float32)
        wide = torch.promote_types(wide, weight.dtype)
        out = F.rms_norm(x.to(wide), (self.d_model,), weight.to(wide), self.eps)
        return out.to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.d_model}, eps={self.eps}"
