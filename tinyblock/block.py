"""The pre-norm Transformer block: y = x + attention(norm(x)), then y + ffn(norm(y)).

Sources: Xiong et al., "On Layer Normalization in the Transformer Architecture" (arXiv
2002.04745) for the norm before each sub-layer; Touvron et al., "LLaMA" (arXiv
2302.13971) for RMSNorm, SwiGLU and RoPE; CS336 2026, section 3.4, equation 15.
Convention: each norm is before its sub-layer, and the residual stream is not
normalized; a stack ends with a norm.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn

from .attention import CausalMultiHeadSelfAttention
from .ffn import SwiGLU
from .rmsnorm import RMSNorm

__all__ = ["Block"]


class Block(nn.Module):
    """Compute y = x + attn(ln1(x)), then y + ffn(ln2(y)). Self-attention is causal.

    - `norm(d_model, eps=..., device=..., dtype=...)` builds a norm, such as
      `nn.LayerNorm`.
    - `ffn(d_model, d_ff, device=..., dtype=...)` builds a feed-forward layer:
      `FeedForward` (CS336 2024), or `functools.partial(FeedForward, activation=silu)`.
      With d_ff=None, `ffn` chooses the width.
    - `attention(d_model, num_heads, rope=..., eps=..., device=..., dtype=...,
      **attention_options)` builds a layer that is called as
      `attn(x, token_positions, mask)`. The default takes the options num_kv_heads,
      d_head and qk_norm.
    - `rope=RotaryPositionalEmbedding(theta, d_k, max_seq_len)`, with the head size as
      `d_k`, rotates by positions. Pass the same instance to all blocks. With None,
      there is no positional encoding. Block takes no `theta` and no `max_seq_len`.

    `forward` takes the arguments of CausalMultiHeadSelfAttention. It returns the dtype
    of the input.

    Raises:
        ValueError: a layer rejects an argument; the result of `attention` or `ffn` has
            a shape different from its input.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        d_ff: int | None = None,
        *,
        rope: Callable[..., Tensor] | None = None,
        ffn: Callable[..., nn.Module] = SwiGLU,
        norm: Callable[..., nn.Module] = RMSNorm,
        attention: Callable[..., nn.Module] = CausalMultiHeadSelfAttention,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **attention_options: Any,
    ) -> None:
        super().__init__()
        self.d_model = d_model
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.ln1 = norm(d_model, eps=eps, **factory)
        self.attn = attention(
            d_model, num_heads, rope=rope, eps=eps, **factory, **attention_options
        )
        self.ln2 = norm(d_model, eps=eps, **factory)
        self.ffn = ffn(d_model, d_ff, **factory)

    def reset_parameters(self) -> None:
        """Let each layer below initialize itself, also what a subclass adds.

        This leaves out a rope, which other blocks may share. A subclass must reset an
        nn.Parameter of its own.
        """
        for layer in self.children():
            _reset(layer)

    def forward(
        self,
        x: Float[Tensor, "*batch seq {self.d_model}"],
        token_positions: Integer[Tensor, "*#batch seq"] | None = None,
        mask: Any = None,
    ) -> Float[Tensor, "*batch seq {self.d_model}"]:
        """Apply the block. `mask` is bool, (..., seq, seq) or (..., 1, seq)."""
        # A name for a result would keep it in memory while the next layer runs.
        x = x + _require_shape_of(
            x, self.attn(self.ln1(x), token_positions, mask), "attention"
        )
        return x + _require_shape_of(x, self.ffn(self.ln2(x)), "ffn")


def _require_shape_of(x: Tensor, out: Tensor, part: str) -> Tensor:
    if out.shape != x.shape:  # torch might broadcast it
        raise ValueError(
            f"{part} must return the shape {tuple(x.shape)}, got {tuple(out.shape)}"
        )
    return out


# The same function as in ffn.py, so that each file works alone.
def _reset(layer: nn.Module) -> None:
    """Let a layer initialize itself. If it has no method for this, go into it."""
    reset = getattr(layer, "reset_parameters", None)
    if reset is not None:
        reset()
    else:  # such as nn.Sequential
        for inner in layer.children():
            _reset(inner)
