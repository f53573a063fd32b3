"""Llama 3.1's RoPE, which stretches a context of 8,192 tokens: override `frequencies`.

    python examples/llama31_rope.py

This command prints "64 frequencies: 29 kept, 6 interpolated, 29 divided by 8".

A pair that completes several turns within the original context keeps its frequency,
because it distinguishes near tokens. A pair that completes less than one turn is slowed
down by the factor 8, so that longer contexts stay within the trained angles. In
between, frequencies are interpolated.
Source: `apply_scaling` in Meta's repository llama-models.
"""

import math

import torch
from torch import Tensor

from tinyblock import RotaryPositionalEmbedding, Transformer


class Llama31Rope(RotaryPositionalEmbedding):
    """Keep high frequencies, divide low ones by `factor`, and interpolate in between.

    A frequency is high if its pair completes at least `high_freq_factor` turns within
    `original_max_seq_len` tokens, and low if its pair completes at most
    `low_freq_factor`. The other arguments are those of RotaryPositionalEmbedding.

    Raises:
        ValueError: factor is below 1, or low_freq_factor is not positive and below
            high_freq_factor.
    """

    def __init__(
        self,
        theta: float,
        d_k: int,
        max_seq_len: int,
        device: str | None = None,
        *,
        factor: float = 8.0,
        low_freq_factor: float = 1.0,
        high_freq_factor: float = 4.0,
        original_max_seq_len: int = 8192,
    ) -> None:
        if factor < 1:
            raise ValueError(f"factor must be at least 1, such as 8, got {factor}")
        if not 0 < low_freq_factor < high_freq_factor:
            raise ValueError(
                "low_freq_factor must be positive and below high_freq_factor, "
                f"got {low_freq_factor} and {high_freq_factor}"
            )
        # Before super().__init__, which calls frequencies().
        self.factor = factor
        self.low_freq_factor = low_freq_factor
        self.high_freq_factor = high_freq_factor
        self.original_max_seq_len = original_max_seq_len
        super().__init__(theta, d_k, max_seq_len, device=device)

    def frequencies(self) -> Tensor:
        frequencies = super().frequencies()
        kept = self.kept_share(frequencies)
        return frequencies * (kept + (1 - kept) / self.factor)

    def kept_share(self, frequencies: Tensor) -> Tensor:
        """Return 1 where a frequency is kept, 0 where it is divided.

        In between, the share is a linear ramp.
        """
        turns = self.original_max_seq_len * frequencies / (2 * math.pi)
        width = self.high_freq_factor - self.low_freq_factor
        return ((turns - self.low_freq_factor) / width).clamp(0, 1)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, factor={self.factor}"


def main() -> None:
    rope = Llama31Rope(theta=500000.0, d_k=128, max_seq_len=131072)
    model = Transformer(2, d_model=512, num_heads=4, max_seq_len=131072, rope=rope)
    model(torch.randn(1, 16, 512))  # all layers share one rope
    plain = RotaryPositionalEmbedding(theta=500000.0, d_k=128, max_seq_len=131072)
    kept = rope.kept_share(plain.frequencies())
    high = int((kept == 1).sum())
    low = int((kept == 0).sum())
    print(
        f"{len(kept)} frequencies: {high} kept, {len(kept) - high - low} interpolated, "
        f"{low} divided by {rope.factor:g}"
    )


if __name__ == "__main__":
    main()
