"""Scale RoPE for contexts longer than in training: Llama 3.1 and YaRN.

    python examples/scaled_rope.py

This command prints how many frequencies each method keeps, and how many it divides by
8. Both methods interpolate the frequencies in between.

A pair of components that turns many times within the original context keeps its
frequency, because it distinguishes near tokens. Pairs that turn less than once
turn slower by `factor`, so that far positions stay within the angles of training.
Sources: `apply_scaling` in Meta's llama-models; Peng et al., "YaRN" (arXiv 2309.00071).
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tinyblock import RotaryPositionalEmbedding


class Llama31Rope(RotaryPositionalEmbedding):
    """Interpolate the pairs that turn `low` to `high` times in `original` tokens."""

    def __init__(
        self,
        *sizes: Any,
        factor: float,
        original: int,
        low: float = 1.0,
        high: float = 4.0,
        **options: Any,
    ) -> None:
        # Before super().__init__, which calls frequencies().
        self.factor = factor
        self.original = original
        self.low = low
        self.high = high
        super().__init__(*sizes, **options)

    def frequencies(self) -> Tensor:
        frequencies = super().frequencies()
        kept = self.kept_share(frequencies)
        return frequencies * (kept + (1 - kept) / self.factor)

    def kept_share(self, frequencies: Tensor) -> Tensor:
        """Return 1 for each pair that keeps its frequency, and 0 for each slower pair."""
        turns = self.original * frequencies / (2 * math.pi)
        return ((turns - self.low) / (self.high - self.low)).clamp(0, 1)


class DividedRope(RotaryPositionalEmbedding):
    """Divide the frequency of each pair by its own factor.

    GGUF files list such factors for Llama 3.1, in place of the rule above.
    """

    def __init__(
        self,
        theta: float,
        d_k: int,
        max_seq_len: int,
        *,
        factors: Sequence[float],
        **options: Any,
    ) -> None:
        if len(factors) != d_k // 2:
            raise ValueError(
                f"factors must be one for each of {d_k // 2} pairs, got {len(factors)}"
            )
        self.factors = factors  # before super().__init__, which calls frequencies()
        super().__init__(theta, d_k, max_seq_len, **options)

    def frequencies(self) -> Tensor:
        factors = torch.tensor(self.factors, device="cpu", dtype=torch.float64)
        return super().frequencies() / factors


class YarnRope(Llama31Rope):
    """Interpolate between whole pairs, and sharpen attention.

    The result, a rotated query or key, is multiplied by `attention_factor`, as in the
    configs of transformers. The default is the paper's formula, 0.1 ln(factor) + 1.
    """

    def __init__(
        self,
        *sizes: Any,
        factor: float,
        high: float = 32.0,
        attention_factor: float | None = None,
        **options: Any,
    ) -> None:
        if attention_factor is None:
            attention_factor = 0.1 * math.log(max(factor, 1)) + 1
        self.attention_factor = attention_factor
        super().__init__(*sizes, factor=factor, high=high, **options)

    def kept_share(self, frequencies: Tensor) -> Tensor:
        pair = torch.arange(len(frequencies), device="cpu", dtype=torch.float64)
        first = max(math.floor(self.pair_that_turns(self.high)), 0)
        last = min(math.ceil(self.pair_that_turns(self.low)), self.d_k - 1)
        return 1 - ((pair - first) / (last - first or 0.001)).clamp(0, 1)

    def pair_that_turns(self, times: float) -> float:
        """Return which pair, as a fraction, turns this often in `original` tokens."""
        tokens_per_radian = self.original / (2 * math.pi * times)
        return self.d_k * math.log(tokens_per_radian) / (2 * math.log(self.theta))

    def forward(self, x: Tensor, token_positions: Tensor | None = None) -> Tensor:
        return super().forward(x, token_positions) * self.attention_factor


def main() -> None:
    for kind in (Llama31Rope, YarnRope):
        rope = kind(500000.0, 128, 16384, factor=8.0, original=8192)
        kept = rope.kept_share(RotaryPositionalEmbedding.frequencies(rope))
        whole = (kept == 1).sum()
        none = (kept == 0).sum()
        print(f"{kind.__name__}: {whole} kept, {none} divided, of {len(kept)}")


if __name__ == "__main__":
    main()
