"""Position-wise feed-forward layers: SwiGLU, which has a gate, and FeedForward.

    SwiGLU(x) = W2 (SiLU(W1 x) * W3 x)
    FeedForward(x) = W2 activation(W1 x)

Sources: Shazeer, "GLU Variants Improve Transformer" (arXiv 2002.05202) for GLU and
SwiGLU, without biases; Hendrycks and Gimpel, "Gaussian Error Linear Units" (arXiv
1606.08415) for GELU and SiLU; Vaswani et al., "Attention Is All You Need" (arXiv
1706.03762), equation 2, for the feed-forward layer; CS336 2026, section 3.4.2 (the
edition of 2024 has GELU).
Convention: SwiGLU's d_ff defaults to the multiple of 64 nearest to 8/3 d_model (Llama
rounds up, to a multiple of 256). In SwiGLU, w1 is the gate, w3 is the value, and w2
returns to d_model, as in Llama and CS336. GELU is exact, with erf.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from einops import einsum
from jaxtyping import Float
from torch import Tensor, nn

__all__ = ["FeedForward", "SwiGLU", "feed_forward", "gelu", "glu", "silu", "swiglu"]


def silu(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return x * sigmoid(x), also called swish, in the dtype of `x`."""
    return F.silu(x)


def gelu(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return x / 2 * (1 + erf(x / sqrt(2))), the exact GELU, in the dtype of `x`."""
    return F.gelu(x)


def glu(
    x: Float[Tensor, "*batch d_model"],
    w1: Float[Tensor, "d_ff d_model"],
    w2: Float[Tensor, "d_ff d_model"],
) -> Float[Tensor, "*batch d_ff"]:
    """Return sigmoid(W1 x) * W2 x: equation 4 of arXiv 2002.05202 without biases."""
    gate = torch.sigmoid(einsum(x, w1, "... d_model, d_ff d_model -> ... d_ff"))
    value = einsum(x, w2, "... d_model, d_ff d_model -> ... d_ff")
    return gate * value


def swiglu(
    x: Float[Tensor, "*batch d_model"],
    w1: Float[Tensor, "d_ff d_model"],
    w2: Float[Tensor, "d_model d_ff"],
    w3: Float[Tensor, "d_ff d_model"],
) -> Float[Tensor, "*batch d_model"]:
    """Return W2 (SiLU(W1 x) * W3 x): equation 6 of arXiv 2002.05202.

    The paper's W, W2 and V are w1, w2 and w3 here.
    """
    gate = silu(einsum(x, w1, "... d_model, d_ff d_model -> ... d_ff"))
    value = einsum(x, w3, "... d_model, d_ff d_model -> ... d_ff")
    return einsum(gate * value, w2, "... d_ff, d_model d_ff -> ... d_model")


def feed_forward(
    x: Float[Tensor, "*batch d_model"],
    w1: Float[Tensor, "d_ff d_model"],
    w2: Float[Tensor, "d_model d_ff"],
    activation: Callable[[Tensor], Tensor] = gelu,
) -> Float[Tensor, "*batch d_model"]:
    """Return W2 activation(W1 x): equation 2 of arXiv 1706.03762 without biases."""
    hidden = activation(einsum(x, w1, "... d_model, d_ff d_model -> ... d_ff"))
    return einsum(hidden, w2, "... d_ff, d_model d_ff -> ... d_model")


class Linear(nn.Linear):
    """A projection whose initial weights are normal, of variance 2 / (d_in + d_out).

    They are cut at 3 sigma. A bias starts at 0.
    """

    def reset_parameters(self) -> None:
        """Draw new weights."""
        # With nn.init, because transformers then keeps the weights that it has loaded.
        std = math.sqrt(2 / (self.in_features + self.out_features))
        nn.init.trunc_normal_(self.weight, std=std, a=-3 * std, b=3 * std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class SwiGLU(nn.Module):
    """Apply the SwiGLU feed-forward layer, w2(silu(w1(x)) * w3(x)), to the last axis.

    d_ff defaults to the multiple of 64 nearest to 8/3 d_model, but at least 64. The
    layer then has about as many parameters as an ungated layer with d_ff = 4 d_model.
    Returns the dtype of the input or, under autocast, the dtype of autocast.

    Raises:
        ValueError: d_model or d_ff is below 1.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if d_ff is None:  # 8/3 d_model is 64 times d_model / 24, rounded here
            d_ff = 64 * max(1, (d_model + 12) // 24)
        _require_sizes(d_model, d_ff)
        self.d_model = d_model
        self.d_ff = d_ff
        self.w1 = Linear(d_model, d_ff, bias=False, device=device, dtype=dtype)
        self.w2 = Linear(d_ff, d_model, bias=False, device=device, dtype=dtype)
        self.w3 = Linear(d_model, d_ff, bias=False, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Let each layer below initialize itself, also what a subclass adds.

        A subclass must reset an nn.Parameter of its own.
        """
        for layer in self.children():
            _reset(layer)

    def forward(
        self, x: Float[Tensor, "*batch {self.d_model}"]
    ) -> Float[Tensor, "*batch {self.d_model}"]:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class FeedForward(nn.Module):
    """Apply the ungated feed-forward layer, w2(activation(w1(x))), to the last axis.

    d_ff defaults to 4 d_model. `activation` maps a tensor to one of the same shape:
    `gelu` (CS336 2024), `silu` (the ablation of CS336 2025), `torch.relu`, or a module.
    Returns the dtype of the input or, under autocast, the dtype of autocast.

    Raises:
        ValueError: d_model or d_ff is below 1.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int | None = None,
        activation: Callable[[Tensor], Tensor] = F.gelu,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if d_ff is None:
            d_ff = 4 * d_model
        _require_sizes(d_model, d_ff)
        self.d_model = d_model
        self.d_ff = d_ff
        self.activation = activation
        self.w1 = Linear(d_model, d_ff, bias=False, device=device, dtype=dtype)
        self.w2 = Linear(d_ff, d_model, bias=False, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Let each layer below initialize itself, also what a subclass adds."""
        for layer in self.children():
            _reset(layer)

    def forward(
        self, x: Float[Tensor, "*batch {self.d_model}"]
    ) -> Float[Tensor, "*batch {self.d_model}"]:
        return self.w2(self.activation(self.w1(x)))


def _require_sizes(d_model: int, d_ff: int) -> None:
    if min(d_model, d_ff) < 1:
        sizes = f"d_model={d_model}, d_ff={d_ff}"
        raise ValueError(f"d_model and d_ff must be at least 1, got {sizes}")


# Repeated in attention.py, block.py and transformer.py, so that each file works alone.
def _reset(layer: nn.Module) -> None:
    """Let a layer initialize itself. If it has no method for this, go into it."""
    reset = getattr(layer, "reset_parameters", None)
    if reset is not None:
        reset()
    else:  # such as nn.Sequential
        for inner in layer.children():
            _reset(inner)
