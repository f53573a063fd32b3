"""The pre-norm Transformer block: y = x + attention(norm(x)), then y + ffn(norm(y)).

Sources: Xiong et al., "On Layer Normalization in the Transformer Architecture" (arXiv
2002.04745) for the norm before each sub-layer; Touvron et al., "LLaMA" (arXiv
2302.13971) for RMSNorm, SwiGLU and RoPE; CS336 section 3.5.
Convention: each norm is before its sub-layer, and the residual stream is not
normalized; a stack ends with a norm.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Shaped, TypeCheckError
from torch import Tensor, nn

from .attention import CausalMultiHeadSelfAttention, Rope, require_shape_of
from .ffn import SwiGLU
from .rmsnorm import RMSNorm

__all__ = ["Block"]


class Block(nn.Module):
    """Compute y = x + attn(ln1(x)) by causal self-attention, then y + ffn(ln2(y)).

    - `norm(d_model, eps=..., device=..., dtype=...)` builds a norm, such as
      `nn.LayerNorm`.
    - `ffn(d_model, d_ff, device=..., dtype=...)` builds a feed-forward layer:
      `FeedForward` (CS336 2024), or `functools.partial(FeedForward, activation=silu)`.
      With d_ff=None, `ffn` chooses the width.
    - `attention(d_model, num_heads, *, num_kv_heads, d_head, rope, qk_norm, eps,
      device, dtype)` builds a layer that is called as `attn(x, token_positions, mask)`.
    - There is no positional encoding unless you pass `rope`. Pass the same instance to
      all blocks. Its head size, `d_k`, is `d_head` here.

    The other arguments of the constructor and of `forward` are those of
    CausalMultiHeadSelfAttention. Returns the dtype of the input.

    Raises:
        ValueError: a layer rejects an argument; `norm`, `attention` or `ffn` cannot be
            called as above; the result of a layer has another shape than its input.
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
        self.ln1 = _build("norm", norm, d_model, eps=eps, **factory)
        self.attn = _build(
            "attention",
            attention,
            d_model,
            num_heads,
            num_kv_heads=num_kv_heads,
            d_head=d_head,
            rope=rope,
            qk_norm=qk_norm,
            eps=eps,
            **factory,
        )
        self.ln2 = _build("norm", norm, d_model, eps=eps, **factory)
        self.ffn = _build("ffn", ffn, d_model, d_ff, **factory)

    def reset_parameters(self) -> None:
        """Draw new weights for every layer that has `reset_parameters`.

        A shared rope is reset by the module that created it.
        """
        for layer in self.children():
            reset_parameters(layer)

    def forward(
        self,
        x: Float[Tensor, "*batch seq {self.d_model}"],
        token_positions: Shaped[Tensor, "*#batch seq"] | None = None,
        mask: Any = None,
    ) -> Float[Tensor, "*batch seq {self.d_model}"]:
        """Apply the block. `mask` is bool, (..., seq, seq) or (..., 1, seq)."""
        normalized = require_shape_of(x, self.ln1(x), "norm")
        attended = self.attn(normalized, token_positions, mask)
        x = x + require_shape_of(x, attended, "attention")
        normalized = require_shape_of(x, self.ln2(x), "norm")
        return x + require_shape_of(x, self.ffn(normalized), "ffn")


def reset_parameters(module: nn.Module) -> None:
    """Call `reset_parameters` of `module` or, if it has none, of its children."""
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        reset()
    else:
        for child in module.children():
            reset_parameters(child)


def _build(
    part: str, builder: Callable[..., nn.Module], *sizes: Any, **options: Any
) -> nn.Module:
    """Call the builder of a replaceable part. An error shows the call."""
    arguments = [repr(size) for size in sizes]
    arguments += [f"{name}={value!r}" for name, value in options.items()]
    call = f"{part}({', '.join(arguments)})"
    if isinstance(builder, nn.Module):
        raise ValueError(
            f"{part} must be a class or a function that builds a layer, called as "
            f"{call}, got a layer: pass the class {type(builder).__name__}"
        )
    try:
        layer = builder(*sizes, **options)
    except TypeCheckError:  # a TypeError that already names the wrong argument
        raise
    except TypeError as error:
        name = getattr(builder, "__qualname__", builder)
        one_line = " ".join(str(error).split())
        message = f"{part} is called as {call}, but {name} raised: {one_line}"
        raise ValueError(message) from error
    if not callable(layer):
        raise ValueError(f"{call} must return a layer, got {layer!r}")
    return layer
