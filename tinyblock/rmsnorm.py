"""Root mean square layer normalization: RMSNorm(x) = x / sqrt(mean(x^2) + eps) * weight.

Source: equation 4 of Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv 1910.07467); CS336 3.4.1.
Convention: the sum, the root and the gain are computed in float32 or wider and rounded once, at the end. Hugging Face's
Llama rounds before the gain, which costs a second rounding in bfloat16 and float16.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from einops import reduce
from jaxtyping import Float
from torch import Tensor, nn

__all__ = ["RMSNorm", "rms_norm"]

_ROUNDS_ONCE = not torch.__version__.startswith("2.6.")  # there F.rms_norm still rounded before the gain


def rms_norm(
    x: Float[Tensor, "*batch d_model"], weight: Float[Tensor, " d_model"], eps: float = 1e-5
) -> Float[Tensor, "*batch d_model"]:
    """Scale each vector of `x` to unit root mean square, then each of its components by `weight`.

    Computed in float32 or wider, returned in the dtype of `x`.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    mean_square = reduce(wide.square(), "... d_model -> ... 1", "mean")
    return (wide * torch.rsqrt(mean_square + eps) * weight).to(x.dtype)


class _KeepInputs(torch.autograd.Function):
    """RMSNorm for training on a CPU: there F.rms_norm keeps two more tensors for backward, in float32 or wider.

    With n = x / rms and g = gradient * weight: the gradient of the gain is that of y times n, summed over all vectors,
    and that of x is (g - n mean(g n)) / rms.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return (_normalize(x, weight, eps)[0] * weight).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
        x, weight, ctx.eps = inputs
        ctx.save_for_backward(x, weight)
        ctx.save_for_forward(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        normal, scale = _normalize(x, weight, ctx.eps)
        grad = grad.to(normal.dtype)
        grad_weight = (grad * normal).sum_to_size(weight.shape)
        grad = grad * weight
        grad_x = (grad - normal * (grad * normal).mean(-1, keepdim=True)) * scale
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None

    @staticmethod
    def jvp(ctx: Any, x_tangent: Tensor, weight_tangent: Tensor, _: None) -> Tensor:
        x, weight = ctx.saved_tensors
        normal, scale = _normalize(x, weight, ctx.eps)
        tangent = (x_tangent - normal * (x_tangent * normal).mean(-1, keepdim=True)) * scale
        return (tangent * weight + normal * weight_tangent).to(x.dtype)


def _normalize(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x / rms and 1 / rms, in float32 or wider."""
    wide = torch.promote_types(torch.promote_types(x.dtype, torch.float32), weight.dtype)
    mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide).square() / x.shape[-1]
    scale = torch.rsqrt(mean_square + eps)
    return x.to(wide) * scale, scale


class RMSNorm(nn.Module):
    """Normalize the last axis by its root mean square, with one learned gain per component.

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
            raise ValueError(f"RMSNorm needs d_model of at least 1, got {d_model}")
        if not 0 < eps < math.inf:
            raise ValueError(f"RMSNorm needs a positive finite eps, such as 1e-5, got {eps}")
        self.d_model = d_model
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(d_model, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set every gain to 1."""
        nn.init.ones_(self.weight)

    def forward(self, x: Float[Tensor, "*batch {self.d_model}"]) -> Float[Tensor, "*batch {self.d_model}"]:
        traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined]
        if torch.is_grad_enabled() and x.is_cpu and not traced:  # a compiler has its own choice of what to keep
            return _KeepInputs.apply(x, self.weight, self.eps)
        if x.dtype == self.weight.dtype and (_ROUNDS_ONCE or x.dtype.itemsize > 2):
            return F.rms_norm(x, (self.d_model,), self.weight, self.eps)
        # Under autocast the gains stay in float32. Given two dtypes, F.rms_norm warns and leaves its fused kernel.
        wide = torch.promote_types(torch.promote_types(x.dtype, torch.float32), self.weight.dtype)
        return F.rms_norm(x.to(wide), (self.d_model,), self.weight.to(wide), self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.d_model}, eps={self.eps}"
