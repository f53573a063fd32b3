"""A stack of pre-norm blocks that share one RoPE, and the final norm.

This is a language model without its embedding and head.

Source: CS336 section 3.5. The course's reference model has the same keys in its state
dict, plus those of its embedding and head.
Convention: the blocks share one table of rotations, which is not part of the state
dict.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from .attention import CausalMultiHeadSelfAttention, Rope
from .block import Block, reset_parameters
from .ffn import SwiGLU
from .rmsnorm import RMSNorm
from .rope import RotaryPositionalEmbedding

__all__ = ["Transformer"]


class Transformer(nn.Module):
    """Apply num_layers blocks one after another, then a norm.

    All blocks share one RoPE with max_seq_len positions and base theta, or the `rope`
    that is passed instead. With theta=None and no rope, there is no positional encoding:
    the model of CS336 2024 adds positions to its embeddings. The other arguments are
    those of Block. Returns the dtype of the input.

    Raises:
        ValueError: a size is below 1; the head size is odd and the RoPE is not passed;
            a layer rejects an argument; without token_positions, a sequence is longer
            than max_seq_len.
    """

    def __init__(
        self,
        num_layers: int,
        d_model: int,
        num_heads: int,
        d_ff: int | None = None,
        *,
        max_seq_len: int,
        theta: float | None = 10000.0,
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
        _require_sizes(num_layers, d_model, num_heads, max_seq_len)
        self.d_model = d_model
        self.max_seq_len = max_seq_len
        if rope is None and theta is not None:
            d_k = _rotated_head_size(d_model, num_heads, d_head)
            rope = RotaryPositionalEmbedding(theta, d_k, max_seq_len, device=device)
        self.rope = rope
        blocks = (
            Block(
                d_model,
                num_heads,
                d_ff,
                rope=rope,
                ffn=ffn,
                norm=norm,
                attention=attention,
                num_kv_heads=num_kv_heads,
                d_head=d_head,
                qk_norm=qk_norm,
                eps=eps,
                device=device,
                dtype=dtype,
            )
            for _ in range(num_layers)
        )
        self.layers = nn.ModuleList(blocks)
        self.ln_final = norm(d_model, eps=eps, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Draw new weights for every layer that has `reset_parameters`."""
        for layer in self.children():
            reset_parameters(layer)

    def forward(
        self,
        x: Float[Tensor, "*batch seq {self.d_model}"],
        token_positions: Shaped[Tensor, "*#batch seq"] | None = None,
        mask: Any = None,
    ) -> Float[Tensor, "*batch seq {self.d_model}"]:
        if token_positions is None and x.shape[-2] > self.max_seq_len:
            raise ValueError(
                f"x must have at most max_seq_len={self.max_seq_len} tokens, got "
                f"{x.shape[-2]}: build the Transformer with a larger max_seq_len"
            )
        for layer in self.layers:
            x = layer(x, token_positions, mask)
        return self.ln_final(x)


def _require_sizes(
    num_layers: int, d_model: int, num_heads: int, max_seq_len: int
) -> None:
    sizes = {
        "num_layers": num_layers,
        "d_model": d_model,
        "num_heads": num_heads,
        "max_seq_len": max_seq_len,
    }
    if min(sizes.values()) < 1:
        raise ValueError(f"sizes of a Transformer must be at least 1, got {sizes}")


def _rotated_head_size(d_model: int, num_heads: int, d_head: int | None) -> int:
    """Return the head size, which RoPE requires to be even."""
    if d_head is not None:
        if d_head < 1 or d_head % 2:
            raise ValueError(
                "d_head, the head size, must be positive and even for RoPE, "
                f"got {d_head}: change d_head, or pass theta=None"
            )
        return d_head
    if d_model % num_heads:
        raise ValueError(
            f"d_model={d_model} must be a multiple of num_heads={num_heads}: "
            "change one of them, or pass d_head"
        )
    head_size = d_model // num_heads
    if head_size % 2:
        raise ValueError(
            "d_model / num_heads, the head size, must be even for RoPE, "
            f"got {d_model} / {num_heads} = {head_size}: "
            "change one of them, or pass d_head or theta=None"
        )
    return head_size
