"""The sizes of a block, and those of well-known models."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Size:
    """What is measured: batch and sequence in sequences and tokens, the block's arguments, and how many blocks.

    num_layers=None is a Block alone; a number is a Transformer of so many, which share one RoPE and end in a norm.
    """

    batch_size: int
    seq_len: int
    d_model: int
    num_heads: int
    num_kv_heads: int
    d_head: int
    d_ff: int
    qk_norm: bool = False
    theta: float = 10000.0
    eps: float = 1e-5
    num_layers: int | None = None

    @property
    def tokens(self) -> int:
        return self.batch_size * self.seq_len

    @property
    def layers(self) -> int:
        return 1 if self.num_layers is None else self.num_layers

    @property
    def block_gains(self) -> int:
        return 2 * self.d_model + (2 * self.d_head if self.qk_norm else 0)

    @property
    def block_parameters(self) -> int:
        heads = self.num_heads + self.num_kv_heads
        return 2 * self.d_model * heads * self.d_head + 3 * self.d_model * self.d_ff + self.block_gains

    @property
    def parameters(self) -> int:
        return self.layers * self.block_parameters + (0 if self.num_layers is None else self.d_model)

    def smallest(self) -> "Size":
        """Return the same block with next to no arithmetic: what is left of its time is overhead.

        Its heads keep their size, and the widths are 8, because the fused attention backends want no less.
        """
        return replace(self, batch_size=1, seq_len=1, d_model=8, d_ff=8)


@dataclass(frozen=True)
class Preset:
    """The block of a published model, and the number of blocks in it."""

    d_model: int
    d_ff: int
    model_layers: int
    num_heads: int
    num_kv_heads: int
    d_head: int
    theta: float = 10000.0
    eps: float = 1e-5
    qk_norm: bool = False


# CS336: the table of model sizes in assignment 2.
# The others: the config.json that each model was published with.
PRESETS = {
    "small": Preset(768, 3072, 12, 12, 12, 64),
    "medium": Preset(1024, 4096, 24, 16, 16, 64),
    "large": Preset(1280, 5120, 36, 20, 20, 64),
    "xl": Preset(1600, 6400, 48, 25, 25, 64),
    "2.7b": Preset(2560, 10240, 32, 32, 32, 80),
    "llama-3.2-1b": Preset(2048, 8192, 16, 32, 8, 64, theta=500000.0),
    "llama-3.1-8b": Preset(4096, 14336, 32, 32, 8, 128, theta=500000.0),
    "llama-3.1-70b": Preset(8192, 28672, 80, 64, 8, 128, theta=500000.0),
    "qwen3-8b": Preset(4096, 12288, 36, 32, 8, 128, theta=1000000.0, eps=1e-6, qk_norm=True),
    # Version 0.3, which attends to the whole sequence; 0.1 slides a window over it, with theta 10000.
    "mistral-7b": Preset(4096, 14336, 32, 32, 8, 128, theta=1000000.0),
}
