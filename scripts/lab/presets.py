"""The shapes of well-known models."""

from dataclasses import dataclass

from .sizes import Size


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The arguments of a model's blocks, and how many blocks the model has."""

    d_model: int
    num_heads: int
    num_kv_heads: int
    d_head: int
    d_ff: int
    num_layers: int
    qk_norm: bool = False
    theta: float = 10000.0
    eps: float = 1e-5

    def block(self, *, batch_size: int, seq_len: int) -> Size:
        """Return one of the model's blocks for this batch."""
        return self._size(batch_size, seq_len, num_layers=None)

    def stack(self, *, batch_size: int, seq_len: int) -> Size:
        """Return all of the model's blocks and its final norm for this batch."""
        return self._size(batch_size, seq_len, self.num_layers)

    def _size(self, batch_size: int, seq_len: int, num_layers: int | None) -> Size:
        return Size(
            batch_size=batch_size,
            seq_len=seq_len,
            d_model=self.d_model,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            d_head=self.d_head,
            d_ff=self.d_ff,
            qk_norm=self.qk_norm,
            theta=self.theta,
            eps=self.eps,
            num_layers=num_layers,
        )


def _like_gpt2(*, d_model: int, num_heads: int, num_layers: int) -> Shape:
    """Return a shape of CS336's assignment 2, whose d_ff is 4 d_model."""
    return Shape(
        d_model=d_model,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        d_head=d_model // num_heads,
        d_ff=4 * d_model,
        num_layers=num_layers,
    )


PRESETS = {
    # CS336: the table of model sizes in assignment 2.
    "small": _like_gpt2(d_model=768, num_heads=12, num_layers=12),
    "medium": _like_gpt2(d_model=1024, num_heads=16, num_layers=24),
    "large": _like_gpt2(d_model=1280, num_heads=20, num_layers=36),
    "xl": _like_gpt2(d_model=1600, num_heads=25, num_layers=48),
    "2.7b": _like_gpt2(d_model=2560, num_heads=32, num_layers=32),
    # The others: the config.json that each model was published with.
    "llama-3.2-1b": Shape(
        d_model=2048,
        num_heads=32,
        num_kv_heads=8,
        d_head=64,
        d_ff=8192,
        num_layers=16,
        theta=500000.0,
    ),
    "llama-3.1-8b": Shape(
        d_model=4096,
        num_heads=32,
        num_kv_heads=8,
        d_head=128,
        d_ff=14336,
        num_layers=32,
        theta=500000.0,
    ),
    "llama-3.1-70b": Shape(
        d_model=8192,
        num_heads=64,
        num_kv_heads=8,
        d_head=128,
        d_ff=28672,
        num_layers=80,
        theta=500000.0,
    ),
    "qwen3-8b": Shape(
        d_model=4096,
        num_heads=32,
        num_kv_heads=8,
        d_head=128,
        d_ff=12288,
        num_layers=36,
        qk_norm=True,
        theta=1000000.0,
        eps=1e-6,
    ),
    # Version 0.3, which attends to the whole sequence; 0.1 slides a window over it, with theta 10000.
    "mistral-7b": Shape(
        d_model=4096,
        num_heads=32,
        num_kv_heads=8,
        d_head=128,
        d_ff=14336,
        num_layers=32,
        theta=1000000.0,
    ),
}
