"""A stack of pre-norm blocks that share one RoPE, and the final norm: a language model without embedding and head.

Source: CS336 section 3.5, whose reference has the same keys in its state dict, and those of embedding and head.
Convention: the blocks share one table of rotations, which is no part of the state dict.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from .attention import Rope
from .block import Block, reset_parameters
from .ffn import SwiGLU
from .rmsnorm import RMSNorm
from .rope import RotaryPositionalEmbedding

__all__ = ["Transformer"]


class Transformer(nn.Module):
    """Apply num_layers blocks one after another, then a norm.

    All blocks rotate by one table, of max_seq_len positions and base theta, or by the `rope` that is given instead;
    theta=None leaves positions out, for the model of CS336 2024, which adds them to the embeddings. The remaining
    arguments are those of Block. Returns the dtype of the input.

    Raises:
        ValueError: num_layers or max_seq_len is below 1; an argument that one of the layers refuses; a sequence longer
            than max_seq_len, unless positions are given.
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
        num_kv_heads: int | None = None,
        d_head: int | None = None,
        qk_norm: bool = False,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = {"num_layers": num_layers, "d_model": d_model, "num_heads": num_heads, "max_seq_len": max_seq_len}
        if min(sizes.values()) < 1:
            raise ValueError(f"a Transformer needs sizes of at least 1, got {sizes}")
        self.d_model = d_model
        self.max_seq_len = max_seq_len
        if d_head is None and d_model % num_heads:
            raise ValueError(f"d_model={d_model} is not a multiple of num_heads={num_heads}: change it or give d_head")
        if rope is None and theta is not None:
            d_k = d_model // num_heads if d_head is None else d_head
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
        """Draw the weights of every layer anew, where the layer knows how to."""
        for layer in self.children():
            reset_parameters(layer)

    def forward(
        self,
        x: Float[Tensor, "*batch seq {self.d_model}"],
        token_positions: Int[Tensor, "*#batch seq"] | None = None,
        mask: Bool[Tensor, "*#batch #seq seq"] | None = None,
    ) -> Float[Tensor, "*batch seq {self.d_model}"]:
        if token_positions is None and x.shape[-2] > self.max_seq_len:
            raise ValueError(f"a sequence of {x.shape[-2]} tokens is longer than max_seq_len={self.max_seq_len}")
        for layer in self.layers:
            x = layer(x, token_positions, mask)
        return self.ln_final(x)
