"""Sparse attention (DSA): an indexer chooses the top_k keys to which a query attends.

    score(query, key) = sum over heads h of
                        weight_h / sqrt(heads) * relu(q_h k / sqrt(d))
    attend to the top_k keys with the largest scores

    python examples/blocks/indexer.py

This command prints to how many keys each query attends.

All index heads share one key, and are few and small, so a long text is cheap to score.
The indexer gets no gradient from here, because its own loss trains it towards the weights
of attention. This is the equation: a fast kernel would read only the chosen keys.
Source: DeepSeek-AI, "DeepSeek-V3.2" (arXiv 2512.02556), equations 1 and 2. GLM-5 and
A.X K2 have it, too.
"""

from typing import Any

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from jaxtyping import Bool, Float, Integer
from latent_attention import LatentAttention
from torch import Tensor, nn

from tinyblock import RotaryPositionalEmbedding
from tinyblock.attention import Linear


class Indexer(nn.Module):
    """Score how well each key fits each query, in float32 or wider."""

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        rope: RotaryPositionalEmbedding,
        d_head: int,
        q_rank: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.d_model = d_model
        self.q_rank = q_rank
        self.num_heads = num_heads
        self.rope = rope
        self.q_proj = Linear(q_rank, num_heads * d_head, bias=False, **factory)
        self.k_proj = Linear(d_model, d_head, bias=False, **factory)
        self.k_norm = nn.LayerNorm(d_head, eps=1e-6, **factory)
        self.weights_proj = Linear(d_model, num_heads, bias=False, **factory)

    @torch.no_grad()
    def forward(
        self,
        x: Float[Tensor, "*batch seq {self.d_model}"],
        q_latent: Float[Tensor, "*batch seq {self.q_rank}"],
        token_positions: Integer[Tensor, "*#batch seq"] | None,
    ) -> Float[Tensor, "*batch seq seq"]:
        if token_positions is not None:  # the heads of a token share its position
            token_positions = token_positions.unsqueeze(-2)
        split = "... seq (heads d_head) -> ... heads seq d_head"
        q = rearrange(self.q_proj(q_latent), split, heads=self.num_heads)
        q = self.rotate(q, token_positions)
        k = self.k_norm(self.k_proj(x)).unsqueeze(-3)  # one head
        k = self.rotate(k, token_positions)
        weights = self.weights_proj(x) / self.num_heads**0.5

        wide = torch.promote_types(x.dtype, torch.float32)
        pattern = "... query heads, ... heads query key -> ... query key"
        with torch.autocast(x.device.type, enabled=False):
            dots = q.to(wide) @ k.to(wide).mT / q.shape[-1] ** 0.5
            return einsum(weights.to(wide), F.relu(dots), pattern)

    def rotate(
        self,
        x: Float[Tensor, "*batch seq d_head"],
        token_positions: Integer[Tensor, "*#batch seq"] | None,
    ) -> Float[Tensor, "*batch seq d_head"]:
        """Rotate the first components, and keep the others."""
        first, others = x.tensor_split([self.rope.d_k], dim=-1)
        return torch.cat((self.rope(first, token_positions), others), dim=-1)


class SparseAttention(LatentAttention):
    """Latent attention to the keys that an Indexer chooses.

    Raises:
        ValueError: the mask does not have the axes of x.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        rope: RotaryPositionalEmbedding,
        top_k: int = 2048,
        index_heads: int = 64,
        index_d_head: int = 128,
        q_rank: int = 1536,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(
            d_model, num_heads, rope=rope, q_rank=q_rank, **factory, **options
        )
        self.top_k = top_k
        self.indexer = Indexer(
            d_model,
            index_heads,
            rope=rope,
            d_head=index_d_head,
            q_rank=q_rank,
            **factory,
        )

    def forward(
        self,
        x: Float[Tensor, "*batch seq {self.d_model}"],
        token_positions: Integer[Tensor, "*#batch seq"] | None = None,
        mask: Any = None,
    ) -> Float[Tensor, "*batch seq {self.d_model}"]:
        return super().forward(
            x, token_positions, self.choose(x, token_positions, mask)
        )

    def choose(
        self,
        x: Float[Tensor, "*batch seq {self.d_model}"],
        token_positions: Integer[Tensor, "*#batch seq"] | None,
        mask: Any,
    ) -> Bool[Tensor, "*batch seq seq"]:
        """Return the mask of the chosen keys."""
        *batch, seq, _ = x.shape
        shown = torch.ones(seq, seq, dtype=torch.bool, device=x.device).tril()
        shown = shown.expand(*batch, seq, seq)
        if mask is not None:
            if mask.ndim != x.ndim:  # torch might broadcast another one
                raise ValueError(
                    "mask must be (..., seq, seq) or (..., 1, seq) with the leading "
                    f"axes of x, got {tuple(mask.shape)}"
                )
            shown = shown & mask
        scores = self.indexer(x, self.q_down(x), token_positions)
        scores = scores.masked_fill(~shown, -torch.inf)
        best = scores.topk(min(self.top_k, seq), dim=-1).indices
        chosen = torch.zeros_like(shown).scatter(-1, best, value=True)
        return shown & chosen


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    rope = RotaryPositionalEmbedding(10000.0, 8, max_seq_len=20)
    attention = SparseAttention(
        64, 4, rope=rope, d_head=16, q_rank=32, kv_rank=24, index_d_head=16, top_k=5
    )
    chosen = attention.choose(torch.randn(10, 64), None, None)
    print("keys per query:", *chosen.sum(-1).tolist())
    for query in chosen.int().tolist():
        print("".join("x" if each else "-" for each in query))


if __name__ == "__main__":
    main()
