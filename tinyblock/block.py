"""The pre-norm Transformer block: y = x + attention(norm(x)), then y + ffn(norm(y)).

Sources: Xiong et al., "On Layer Normalization in the Transformer Architecture" (arXiv 2002.04745) for the norm before
each sub-layer; Touvron et al., "LLaMA" (arXiv 2302.13971) for RMSNorm, SwiGLU and RoPE; CS336 section 3.5.
Convention: each norm is before its sub-layer, and the residual stream is not normalized; a stack ends with a norm.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from .attention import CausalMultiHeadSelfAttention, Rope
from .ffn import SwiGLU
from .rmsnorm import RMSNorm

__all__ = ["Block"]


class Block(nn.Module):
    """Add causal self-attention and a feed-forward layer, each after a norm. Only `rope` adds positions.

    `norm(d_model, eps=..., device=..., dtype=...)`, `ffn(d_model, d_ff, device=..., dtype=...)` and
    `attention(d_model, num_heads, *, num_kv_heads, d_head, rope, qk_norm, eps, device, dtype)` are any callables that
    build a module: `nn.LayerNorm`, `FeedForward` (CS336 2024), `functools.partial(FeedForward, activation=silu)`.
    d_ff=None leaves the width to `ffn`. All blocks share one `rope`; None adds no positions (CS336 2024). The other
    arguments, `token_positions` and `mask` are those of CausalMultiHeadSelfAttention. Returns the input's dtype.

    Raises:
        ValueError: a layer rejects an argument; `norm`, `attention` or `ffn` returns a shape other than its input's.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        d_ff: int | None = None,
        *,
        rope: Rope | None = None,
        ffn: Callable[..., nn.Module] = SwiGLU,
        norm: Callable[..., nn.Module] = RMSNorm,
        attention: Callable[..., nn.Module] = CausalMultiHeadSelfAttention,
        num_kv_heads: int | None = None,
        d_head: int | None = None,
        qk_norm: bool = False,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.d_model = d_model
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        heads: dict[str, Any] = {
            "num_kv_heads": num_kv_heads,
            "d_head": d_head,
            "qk_norm": qk_norm,
        }
        self.ln1 = norm(d_model, eps=eps, **factory)
        self.attn = attention(
            d_model, num_heads, rope=rope, eps=eps, **heads, **factory
        )
        self.ln2 = norm(d_model, eps=eps, **factory)
        self.ffn = ffn(d_model, d_ff, **factory)

    def reset_parameters(self) -> None:
        """Draw new weights for every layer that has `reset_parameters`; the owner of a rope resets it."""
        for layer in self.children():
            reset_parameters(layer)

    def forward(
        self,
        x: Float[Tensor, "*batch seq {self.d_model}"],
        token_positions: Shaped[Tensor, "*#batch seq"] | None = None,
        mask: Any = None,
    ) -> Float[Tensor, "*batch seq {self.d_model}"]:
        """Apply the block. `mask` is bool, (..., seq, seq) or (..., 1, seq); for padding pass `keep[:, None, :]`."""
        x = x + _like(
            x,
            self.attn(_like(x, self.ln1(x), "norm"), token_positions, mask),
            "attention",
        )
        return x + _like(x, self.ffn(_like(x, self.ln2(x), "norm")), "ffn")


def _like(x: Tensor, out: Tensor, part: str) -> Tensor:
    if getattr(out, "shape", None) != x.shape:  # the sum might broadcast it
        got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise ValueError(
            f"{part} must return a tensor of shape {tuple(x.shape)}, as its input, got {got}"
        )
    return out


def reset_parameters(module: nn.Module) -> None:
    """Reset the parameters of `module`; if it has no such method, those of its children."""
    if callable(reset := getattr(module, "reset_parameters", None)):
        reset()
    else:
        for child in module.children():
            reset_parameters(child)
