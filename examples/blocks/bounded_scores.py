"""Bounded scores, also called soft-capped: no score exceeds `cap`.

    score = cap * tanh(q k / sqrt(d_head) / cap)

    python examples/blocks/bounded_scores.py

This command prints scores before and after.

Bounded scores make training more stable. All scores are stored: on a GPU, torch's
`flex_attention` with a `score_mod` would not store them.
Source: Gemma Team, "Gemma 2" (arXiv 2408.00118), section 2.
To copy this file, import CausalMultiHeadSelfAttention from your copy of attention.py. To
combine it with windows.py, derive from (WindowAttention, BoundedAttention), in this
order.
"""

import math
from typing import Any

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from tinyblock import CausalMultiHeadSelfAttention


class BoundedAttention(CausalMultiHeadSelfAttention):
    """Attention with scores between -cap and cap.

    Raises:
        ValueError: the mask does not have the axes of x.
        TypeError: a subclass has another base after this one.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        next_class = cls.__mro__[cls.__mro__.index(BoundedAttention) + 1]
        if next_class is not CausalMultiHeadSelfAttention:  # its `attend` would not run
            raise TypeError(
                f"BoundedAttention must be the last base of {cls.__name__}, "
                f"got {next_class.__name__} after it"
            )

    def __init__(
        self, d_model: int, num_heads: int, *, cap: float = 50.0, **options: Any
    ) -> None:
        super().__init__(d_model, num_heads, **options)
        self.cap = cap

    def attend(
        self,
        q: Float[Tensor, "*batch heads query d_head"],
        k: Float[Tensor, "*batch kv_heads key d_head"],
        v: Float[Tensor, "*batch kv_heads key d_value"],
        mask: Any,
    ) -> Float[Tensor, "*batch heads query d_value"]:
        group = self.num_heads // self.num_kv_heads
        k = k.repeat_interleave(group, dim=-3)
        v = v.repeat_interleave(group, dim=-3)
        wide = torch.promote_types(q.dtype, torch.float32)
        pattern = "... query d_head, ... key d_head -> ... query key"
        dots = einsum(q.to(wide), k.to(wide), pattern)
        scores = bound(dots / math.sqrt(q.shape[-1]), self.cap)
        query, key = scores.shape[-2:]
        shown = torch.ones(query, key, dtype=torch.bool, device=q.device)
        shown = shown.tril(key - query)
        if mask is not None:
            if mask.ndim != q.ndim - 1:  # torch might broadcast another one
                raise ValueError(
                    "mask must be (..., query, key) or (..., 1, key) with the leading "
                    f"axes of x, got {tuple(mask.shape)}"
                )
            shown = shown & mask.unsqueeze(-3)
        weights = scores.masked_fill(~shown, -math.inf).softmax(-1)
        weights = weights.masked_fill(~shown, 0)  # NaN for a query without keys
        pattern = "... query key, ... key d_value -> ... query d_value"
        return einsum(weights, v.to(wide), pattern).to(q.dtype)


def bound(scores: Float[Tensor, "*shape"], cap: float) -> Float[Tensor, "*shape"]:
    return cap * torch.tanh(scores / cap)


def main() -> None:
    for score in (1.0, 10.0, 50.0, 500.0):
        print(f"score {score:5}: {bound(torch.tensor(score), cap=50.0):.2f}")


if __name__ == "__main__":
    main()
