"""Causal multi-head self-attention: softmax(Q K^T / sqrt(d_k)) V, over each token and the tokens before it.

Sources: Vaswani et al., "Attention Is All You Need" (arXiv 1706.03762), equation 1 and 3.2.2; Ainslie et al., "GQA"
(arXiv 2305.13245) for shared key and value heads; Henry et al., "Query-Key Normalization for Transformers" (arXiv
2010.04245), here as in Qwen3: an RMSNorm over the head size, before the rotation; CS336 section 3.4.4.
Convention: a mask is True where a query may attend to a key, and is combined with the causal mask by AND. A query
without any key yields zeros. Rows of projections are ordered (heads d_head); query head h reads key head h // group.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from jaxtyping import Bool, Float, Shaped
from torch import Tensor, nn

__all__ = ["CausalMultiHeadSelfAttention", "scaled_dot_product_attention"]

Rope = Callable[
    [Tensor, Tensor | None], Tensor
]  # rope(x, token_positions) rotates x of shape (..., seq, d_head)


def scaled_dot_product_attention(
    q: Float[Tensor, "*batch query d_k"],
    k: Float[Tensor, "*batch key d_k"],
    v: Float[Tensor, "*batch key d_v"],
    mask: Bool[Tensor, "*#batch #query #key"] | None = None,
) -> Float[Tensor, "*batch query d_v"]:
    """Return softmax(Q K^T / sqrt(d_k)) V over the keys whose mask is True, rounded once to the dtype of `q`."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = einsum(
        q.to(dtype), k.to(dtype), "... query d_k, ... key d_k -> ... query key"
    ) / math.sqrt(q.shape[-1])
    if mask is None:
        weights = scores.softmax(dim=-1)
    else:  # the second fill turns the NaN of a row without any key into 0
        weights = (
            scores.masked_fill(~mask, -math.inf).softmax(dim=-1).masked_fill(~mask, 0)
        )
    return einsum(
        weights, v.to(dtype), "... query key, ... key d_v -> ... query d_v"
    ).to(q.dtype)


class CausalMultiHeadSelfAttention(nn.Module):
    """Attend from every token to itself and to the tokens before it, in num_heads heads of size d_head.

    Groups of query heads share num_kv_heads (default: num_heads) key and value heads. d_head defaults to
    d_model / num_heads. `rope(x, token_positions)` is any callable that rotates queries and keys of shape (..., heads,
    seq, d_head) by positions of shape (..., 1, seq); None adds no positions. qk_norm normalizes queries and keys over
    d_head. `mask` is bool, (..., seq, seq) or (..., 1, seq): `keep[:, None, :]` for padding. Returns the dtype of `x`.

    Raises:
        ValueError: a size, eps, rope or mask is out of range or does not fit; token_positions without a rope.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        d_head: int | None = None,
        rope: Rope | None = None,
        qk_norm: bool = False,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = {
            "d_model": d_model,
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "d_head": d_head,
        }
        if any(size is not None and size < 1 for size in sizes.values()):
            raise ValueError(f"sizes of attention must be at least 1, got {sizes}")
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if d_head is None and d_model % num_heads:
            raise ValueError(
                f"d_model={d_model} must be a multiple of num_heads={num_heads}: change it or pass d_head"
            )
        if num_heads % num_kv_heads:
            raise ValueError(
                f"num_heads={num_heads} must be a multiple of num_kv_heads={num_kv_heads}"
            )
        if not 0 < eps < math.inf:
            raise ValueError(
                f"eps must be positive and finite, such as 1e-5, got {eps}"
            )
        self.d_model, self.num_heads, self.num_kv_heads = (
            d_model,
            num_heads,
            num_kv_heads,
        )
        self.d_head = d_model // num_heads if d_head is None else d_head
        if getattr(rope, "d_k", self.d_head) != self.d_head:
            raise ValueError(
                f"rope must have d_k={self.d_head}, the size of a head, got {rope}"
            )
        self.rope = rope
        self.q_proj = nn.Linear(
            d_model, num_heads * self.d_head, bias=False, device=device, dtype=dtype
        )
        self.k_proj = nn.Linear(
            d_model, num_kv_heads * self.d_head, bias=False, device=device, dtype=dtype
        )
        self.v_proj = nn.Linear(
            d_model, num_kv_heads * self.d_head, bias=False, device=device, dtype=dtype
        )
        self.output_proj = nn.Linear(
            num_heads * self.d_head, d_model, bias=False, device=device, dtype=dtype
        )
        self.q_norm = (
            nn.RMSNorm(self.d_head, eps, device=device, dtype=dtype)
            if qk_norm
            else None
        )
        self.k_norm = (
            nn.RMSNorm(self.d_head, eps, device=device, dtype=dtype)
            if qk_norm
            else None
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights from a normal of variance 2 / (d_in + d_out), cut at three standard deviations; gains are 1."""
        for linear in (self.q_proj, self.k_proj, self.v_proj, self.output_proj):
            std = math.sqrt(2 / (linear.in_features + linear.out_features))
            nn.init.trunc_normal_(linear.weight, std=std, a=-3 * std, b=3 * std)
        for norm in filter(None, (self.q_norm, self.k_norm)):
            norm.reset_parameters()

    def forward(
        self,
        x: Float[Tensor, "*batch seq {self.d_model}"],
        token_positions: Shaped[Tensor, "*#batch seq"] | None = None,
        mask: Any = None,
    ) -> Float[Tensor, "*batch seq {self.d_model}"]:
        split = "... seq (heads d_head) -> ... heads seq d_head"
        q, k, v = (
            rearrange(proj(x), split, d_head=self.d_head)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm(q.to(self.q_norm.weight.dtype)).to(
                v.dtype
            )  # under autocast, torch warns of two dtypes
            k = self.k_norm(k.to(self.k_norm.weight.dtype)).to(v.dtype)
        if (rope := self.rope) is not None:
            if token_positions is not None:
                token_positions = rearrange(
                    token_positions, "... seq -> ... 1 seq"
                )  # the same for all heads
            q, k = rope(q, token_positions), rope(k, token_positions)
        elif token_positions is not None:
            raise ValueError(
                "token_positions need a rope: pass rope= to the constructor, or leave them out"
            )
        return self.output_proj(
            rearrange(
                self.attend(q, k, v, mask),
                "... heads seq d_head -> ... seq (heads d_head)",
            )
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        """Attend causally: q and the result are (..., heads, seq, d_head), k and v (..., kv_heads, key, d_head).

        q and k are normalized and rotated. Here key = seq; an override may add keys, and take any `mask`.
        """
        batch, seq, group = (
            q.shape[:-3],
            q.shape[-2],
            self.num_heads // self.num_kv_heads,
        )
        if k.shape[-2] != seq:
            raise ValueError(
                f"attend needs as many keys as queries, {seq}, got {k.shape[-2]}: override it for a cache"
            )
        if len(batch) != 1:  # the fast kernels take exactly one batch axis
            q, k, v = (
                rearrange(t, "... heads seq d_head -> (...) heads seq d_head")
                for t in (q, k, v)
            )
        if mask is not None:
            if (
                mask.dtype != torch.bool
                or mask.dim() > len(batch) + 2
                or mask.shape[-2:] not in ((seq, seq), (1, seq))
            ):
                got = f"{mask.dtype} of {tuple(mask.shape)}: pass keep[:, None, :] for padding, mask == 0 if additive"
                raise ValueError(
                    f"mask must be bool of shape {(*batch, seq, seq)} or {(*batch, 1, seq)}, got {got}"
                )
            causal = torch.ones(seq, seq, dtype=torch.bool, device=q.device).tril()
            mask = (
                (mask & causal)
                .expand(*batch, seq, seq)
                .reshape(q.shape[0], 1, seq, seq)
            )
        # On CUDA flash and cuDNN share key heads (pytorch issue 154363): in half precision, no mask, heads up to 256.
        if (
            group > 1
            and q.is_cuda
            and (mask is not None or q.dtype.itemsize > 2 or self.d_head > 256)
        ):
            k, v, group = (
                k.repeat_interleave(group, dim=1),
                v.repeat_interleave(group, dim=1),
                1,
            )
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=group > 1
        )
        return out if len(batch) == 1 else out.view(*batch, *out.shape[1:])

    def extra_repr(self) -> str:
        return f"{self.d_model}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, d_head={self.d_head}"
