"""A stack of pre-norm blocks that share one RoPE, and the final norm: a language model without embedding and head.

Source: CS336 section 3.5, whose reference has the same keys in its state dict, and those of embedding and head.
Convention: the blocks share one table of rotations, which is no part of the state dict.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from .block import Block
from .ffn import SwiGLU
from .rmsnorm import RMSNorm
from .rope import RotaryPositionalEmbedding

__all__ = ["Transformer"]


class Transformer(nn.Module):
    """Apply num_layers blocks one after another, then an RMSNorm.

    All blocks rotate by one table, of max_seq_len positions and base theta; theta=None leaves positions out, for the
    model of CS336 2024, which adds them to the embeddings. The remaining arguments are those of Block. Returns the
    dtype of the input.

    Raises:
        ValueError: num_layers or max_seq_len is below 1; an argument that one of the layers refuses; a sequence longer
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
        ffn: Callable[..., nn.Module] = SwiGLU,
        num_kv_heads: int | None = None,
        d_head: int | None = None,
        qk_norm: bool = False,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_layers < 1 or max_seq_len < 1:
            raise ValueError(f"need num_layers and max_seq_len of at least 1, got {num_layers=}, {max_seq_len=}")
        self.d_model = d_model
        self.max_seq_len = max_seq_len
        blocks = [
            Block(
                d_model,
                num_heads,
                d_ff,
                ffn=ffn,
                num_kv_heads=num_kv_heads,
                d_head=d_head,
                qk_norm=qk_norm,
                eps=eps,
                device=device,
                dtype=dtype,
            )
            for _ in range(num_layers)
        ]
        self.layers = nn.ModuleList(blocks)
        self.ln_final = RMSNorm(d_model, eps, device=device, dtype=dtype)
        self.rope = None
        if theta is not None:  # the blocks, which have checked the sizes, know the head size
            self.rope = RotaryPositionalEmbedding(theta, blocks[0].attn.d_head, max_seq_len, device=device)
            for block in blocks:
                block.attn.rope = self.rope

    def reset_parameters(self) -> None:
        """Draw the weights of every block anew and set every gain to 1."""
        for layer in (*self.layers, self.ln_final):
            layer.reset_parameters()

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
