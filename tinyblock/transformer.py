"""A stack of pre-norm blocks that share one RoPE, and the final norm.

This is a language model without its embedding and head.

Source: CS336 2026, section 3.5. The course's reference model has the same keys in its
state dict, plus the keys of its embedding and head.
Convention: the blocks share one table of rotations, which is not part of the state
dict.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn

from .block import Block
from .rmsnorm import RMSNorm
from .rope import RotaryPositionalEmbedding

__all__ = ["Transformer"]


class Transformer(nn.Module):
    """Apply num_layers blocks one after another, then a norm.

    All blocks share one RoPE with max_seq_len positions and base theta, or the `rope`
    that is passed instead. Pass theta=None for no positional encoding, as in CS336
    2024, whose model adds positions to its embeddings. rope=None keeps RoPE here,
    unlike in Block.

    `block(d_model, num_heads, d_ff, rope=..., norm=..., eps=..., device=..., dtype=...,
    **block_options)` builds a block. The default takes the options of Block, such as
    ffn, num_kv_heads and qk_norm. Returns the dtype of the input.

    Raises:
        ValueError: num_layers, num_heads or max_seq_len is below 1; no rope is passed,
            and the head size is odd or d_model / num_heads is not an integer; a layer
            rejects an argument; in a call without token_positions, x has more than
            max_seq_len tokens.
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
        rope: Callable[..., Tensor] | None = None,
        block: Callable[..., nn.Module] = Block,
        norm: Callable[..., nn.Module] = RMSNorm,
        d_head: int | None = None,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **block_options: Any,
    ) -> None:
        super().__init__()
        if min(num_layers, num_heads, max_seq_len) < 1:
            raise ValueError(
                "num_layers, num_heads and max_seq_len must be at least 1, got "
                f"{num_layers}, {num_heads} and {max_seq_len}"
            )
        self.d_model = d_model
        self.max_seq_len = max_seq_len
        if rope is None and theta is not None:
            if d_head is None and d_model % num_heads:
                raise ValueError(
                    f"d_model must be a multiple of num_heads={num_heads}, got "
                    f"d_model={d_model}: change one of them, or pass d_head"
                )
            d_k = d_model // num_heads if d_head is None else d_head
            rope = RotaryPositionalEmbedding(theta, d_k, max_seq_len, device=device)
        self.rope = rope
        if d_head is not None:  # a custom block may not have this option
            block_options["d_head"] = d_head
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        options = {"rope": rope, "norm": norm, "eps": eps, **factory, **block_options}
        self.layers = nn.ModuleList(
            block(d_model, num_heads, d_ff, **options) for _ in range(num_layers)
        )
        self.ln_final = norm(d_model, eps=eps, **factory)

    def forward(
        self,
        x: Float[Tensor, "*batch seq {self.d_model}"],
        token_positions: Integer[Tensor, "*#batch seq"] | None = None,
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
