"""What is profiled: this project's block or stack, or a block of the user's own."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from lab.sizes import Size
from torch import nn

from .modules import load


@dataclass(frozen=True)
class Subject:
    """A model and its input.

    shape: that of the input, (batch, seq, d_model).
    is_own: whether the model is a Block or a Transformer of this project.
    """

    name: str
    shape: tuple[int, int, int]
    build: Callable[[torch.device, torch.dtype], nn.Module]
    is_own: bool

    @property
    def title(self) -> str:
        batch, seq, d_model = self.shape
        return f"{self.name}: {batch} x {seq} tokens, d_model {d_model}"


def smallest(size: Size) -> Size:
    """Return the same model with next to no arithmetic.

    Fused attention kernels need widths of at least 8.
    """
    d_head = size.d_head or size.d_model // size.num_heads
    return replace(size, batch_size=1, seq_len=1, d_model=8, d_head=d_head, d_ff=8)


def own_subject(size: Size) -> Subject:
    model = f"Transformer of {size.num_layers}" if size.num_layers else "Block"
    heads = f"{size.num_heads} heads"
    if size.num_kv_heads:
        heads += f" ({size.num_kv_heads} of keys)"
    if size.d_ff:
        heads += f", d_ff {size.d_ff}"
    return Subject(f"{model}, {heads}", _shape(size), size.build, is_own=True)


def users_subject(name: str, size: Size) -> Subject:
    """Return the block that the function `package.module:function` builds."""
    build = load(name)
    return Subject(name, _shape(size), lambda *to: build().to(*to), is_own=False)


def _shape(size: Size) -> tuple[int, int, int]:
    return size.batch_size, size.seq_len, size.d_model
