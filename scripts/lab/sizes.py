"""The size of a block or a stack, and the sizes of published models."""

from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True)
class Size:
    """A batch of tokens, and the arguments of a Block.

    With num_layers, these are the arguments of a Transformer with num_layers blocks.
    """

    batch_size: int = 1
    seq_len: int = 128
    d_model: int = 512
    num_heads: int = 8
    num_kv_heads: int | None = None
    d_head: int | None = None
    d_ff: int | None = None
    num_layers: int | None = None
    qk_norm: bool = False

    @property
    def tokens(self) -> int:
        return self.batch_size * self.seq_len

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.batch_size, self.seq_len, self.d_model

    @property
    def title(self) -> str:
        batch, seq, d_model = self.shape
        return f"{self.model}: {batch} x {seq} tokens, d_model {d_model}"

    @property
    def model(self) -> str:
        model = f"Transformer of {self.num_layers}" if self.num_layers else "Block"
        heads = f"{self.num_heads} heads"
        if self.num_kv_heads:
            heads += f" ({self.num_kv_heads} KV heads)"
        if self.d_ff:
            heads += f", d_ff {self.d_ff}"
        return f"{model}, {heads}"

    def build(self, device: torch.device, dtype: torch.dtype) -> Any:
        """Build the model; raise a ValueError if a layer rejects the size."""
        # Here, because profile_block.py sets JAXTYPING_DISABLE before.
        from tinyblock import Transformer

        stack = Transformer(
            self.num_layers or 1,
            self.d_model,
            self.num_heads,
            self.d_ff,
            max_seq_len=self.seq_len,
            num_kv_heads=self.num_kv_heads,
            d_head=self.d_head,
            qk_norm=self.qk_norm,
            device=device,
            dtype=dtype,
        )
        # A block has the stack's RoPE.
        return stack if self.num_layers else stack.layers[0]


def _gpt2(d_model: int, num_heads: int) -> Size:
    return Size(d_model=d_model, num_heads=num_heads, d_ff=4 * d_model)


def _llama(d_model: int, num_heads: int, d_head: int, d_ff: int) -> Size:
    return Size(1, 128, d_model, num_heads, 8, d_head, d_ff)


# One block of each model. CS336, assignment 2, lists small to 2.7b. The others are from
# the config.json that each model was published with.
PRESETS = {
    "small": _gpt2(768, 12),
    "medium": _gpt2(1024, 16),
    "large": _gpt2(1280, 20),
    "xl": _gpt2(1600, 25),
    "2.7b": _gpt2(2560, 32),
    "llama-3.2-1b": _llama(2048, 32, 64, 8192),
    "llama-3.1-8b": _llama(4096, 32, 128, 14336),
    "llama-3.1-70b": _llama(8192, 64, 128, 28672),
    "qwen3-8b": replace(_llama(4096, 32, 128, 12288), qk_norm=True),
}
