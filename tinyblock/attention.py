"""Causal multi-head self-attention: each token attends to itself and to earlier tokens.

    softmax(Q K^T / sqrt(d_k)) V

Sources: Vaswani et al., "Attention Is All You Need" (arXiv 1706.03762), equation 1 and
3.2.2; Ainslie et al., "GQA" (arXiv 2305.13245) for shared key and value heads; Henry et
al., "Query-Key Normalization for Transformers" (arXiv 2010.04245), here as in Qwen3: an
RMSNorm over the components of each head, before the rotation; CS336 2026, sections
3.4.4 and 3.4.5, equations 11 to 14.
Convention: a mask is True where a query may attend to a key, and is combined with the
causal mask by AND. A query without any key yields zeros. Head h owns the rows h d_head
to (h + 1) d_head - 1 of the weights of q, k and v, and these columns of the output
weight; query head h reads key head h // group.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from einops import einsum, rearrange, repeat
from jaxtyping import Bool, Float, Integer
from torch import Tensor, nn

__all__ = [
    "CausalMultiHeadSelfAttention",
    "causal_multi_head_self_attention",
    "scaled_dot_product_attention",
]

# rope(x, token_positions) rotates x of shape (..., seq, d_head)
Rope = Callable[[Tensor, Tensor | None], Tensor]


def scaled_dot_product_attention(
    q: Float[Tensor, "*batch query d_k"],
    k: Float[Tensor, "*batch key d_k"],
    v: Float[Tensor, "*batch key d_v"],
    mask: Bool[Tensor, "*#batch #query #key"] | None = None,
) -> Float[Tensor, "*batch query d_v"]:
    """Return softmax(Q K^T / sqrt(d_k)) V over the keys whose mask is True.

    Computes in float32 or wider, and rounds once to the dtype of `q`.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    wide_q = q.to(dtype)
    wide_k = k.to(dtype)
    dots = einsum(wide_q, wide_k, "... query d_k, ... key d_k -> ... query key")
    scores = dots / math.sqrt(q.shape[-1])
    if mask is None:
        weights = scores.softmax(dim=-1)
    else:
        weights = scores.masked_fill(~mask, -math.inf).softmax(dim=-1)
        weights = weights.masked_fill(~mask, 0)  # softmax gives NaN without any key
    out = einsum(weights, v.to(dtype), "... query key, ... key d_v -> ... query d_v")
    return out.to(q.dtype)


def causal_multi_head_self_attention(
    x: Float[Tensor, "*batch seq d_model"],
    wq: Float[Tensor, "q_width d_model"],
    wk: Float[Tensor, "kv_width d_model"],
    wv: Float[Tensor, "kv_width d_model"],
    wo: Float[Tensor, "d_model q_width"],
    num_heads: int,
    rope: Rope | None = None,
) -> Float[Tensor, "*batch seq d_model"]:
    """Project to heads, attend causally in each, and project back.

    The rows of `wq`, `wk` and `wv`, and the columns of `wo`, are ordered (heads
    d_head). If `wk` has fewer heads than `wq`, consecutive query heads share a KV head.
    """
    project = "... seq d_model, width d_model -> ... seq width"
    split = "... seq (heads d_head) -> ... heads seq d_head"
    q = rearrange(einsum(x, wq, project), split, heads=num_heads)
    d_head = q.shape[-1]
    k = rearrange(einsum(x, wk, project), split, d_head=d_head)
    v = rearrange(einsum(x, wv, project), split, d_head=d_head)
    if rope is not None:
        q = rope(q, None)
        k = rope(k, None)
    share = "... kv_heads seq d_head -> ... (kv_heads group) seq d_head"
    group = len(wq) // len(wk)
    k = repeat(k, share, group=group)
    v = repeat(v, share, group=group)
    seq = x.shape[-2]
    causal = torch.ones(seq, seq, dtype=torch.bool, device=x.device).tril()
    out = scaled_dot_product_attention(q, k, v, causal)
    merged = rearrange(out, "... heads seq d_head -> ... seq (heads d_head)")
    return einsum(merged, wo, "... seq width, d_model width -> ... seq d_model")


class Linear(nn.Linear):
    """A projection whose initial weights are normal, of variance 2 / (d_in + d_out).

    They are cut at 3 sigma. A bias starts at 0.
    """

    def reset_parameters(self) -> None:
        """Draw new weights."""
        # With nn.init, because from_pretrained of transformers makes its functions skip
        # the weights that it has loaded.
        std = math.sqrt(2 / (self.in_features + self.out_features))
        nn.init.trunc_normal_(self.weight, std=std, a=-3 * std, b=3 * std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class HeadNorm(nn.RMSNorm):
    """An RMSNorm of each head that returns the dtype of `x`."""

    def forward(self, x: Tensor) -> Tensor:
        # Under autocast, weights stay in float32. Given two dtypes, F.rms_norm warns.
        wide = torch.promote_types(x.dtype, self.weight.dtype)
        weight = self.weight.to(wide)
        out = F.rms_norm(x.to(wide), self.normalized_shape, weight, self.eps)
        return out.to(x.dtype)


class CausalMultiHeadSelfAttention(nn.Module):
    """Attend from every token to itself and to earlier tokens, in num_heads heads.

    - `num_kv_heads` is the number of KV heads (default: num_heads). Each of them is
      shared by a group of query heads, as in grouped-query attention.
    - `d_head` is the head size (default: d_model / num_heads): d_k in the equation and
      in RoPE.
    - `rope(x, token_positions)` is any callable that rotates queries and keys of shape
      (..., heads, seq, d_head) by positions of shape (..., 1, seq). With rope=None,
      there is no positional encoding.
    - `qk_norm` normalizes queries and keys over the components of each head.
    - `mask` is bool, of shape (..., seq, seq) or (..., 1, seq). For a padding mask
      `keep` of shape (..., seq), True at real tokens, pass `keep[..., None, :]`. If
      batch equals seq, (seq, seq) could be either and raises: pass `mask[None]`.

    Returns the dtype of `x` or, under autocast, the dtype of autocast.

    Raises:
        ValueError: an argument is out of range or inconsistent; token_positions are
            passed without a rope; a mask is not bool, does not broadcast, or could be
            padding without its axis of queries; the result of `rope` has a shape
            different from its input.
        EinopsError, or TypeError from shape checks: not one position for each token.
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
        if num_kv_heads is None:
            num_kv_heads = num_heads
        if min(d_model, num_heads, num_kv_heads) < 1 or num_heads % num_kv_heads:
            raise ValueError(
                "d_model, num_heads and num_kv_heads must be positive, and num_heads a "
                f"multiple of num_kv_heads, got d_model={d_model}, "
                f"num_heads={num_heads}, num_kv_heads={num_kv_heads}"
            )
        if d_head is None:
            if d_model % num_heads:
                raise ValueError(
                    f"d_model must be a multiple of num_heads={num_heads}, got "
                    f"d_model={d_model}: change one of them, or pass d_head"
                )
            d_head = d_model // num_heads
        if not 0 < eps < math.inf:
            raise ValueError(
                f"eps must be positive and finite, such as 1e-5, got {eps}"
            )
        if getattr(rope, "d_k", d_head) != d_head:
            raise ValueError(f"rope must have d_k={d_head}, the head size, got {rope}")
        self.d_model = d_model
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.d_head = d_head
        self.rope = rope
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        q_width = num_heads * d_head
        kv_width = num_kv_heads * d_head
        self.q_proj = Linear(d_model, q_width, bias=False, **factory)
        self.k_proj = Linear(d_model, kv_width, bias=False, **factory)
        self.v_proj = Linear(d_model, kv_width, bias=False, **factory)
        self.output_proj = Linear(q_width, d_model, bias=False, **factory)
        self.q_norm = HeadNorm(d_head, eps, **factory) if qk_norm else nn.Identity()
        self.k_norm = HeadNorm(d_head, eps, **factory) if qk_norm else nn.Identity()

    def forward(
        self,
        x: Float[Tensor, "*batch seq {self.d_model}"],
        token_positions: Integer[Tensor, "*#batch seq"] | None = None,
        mask: Any = None,
    ) -> Float[Tensor, "*batch seq {self.d_model}"]:
        # Names for q, k and v would keep them in memory during the last projection.
        out = self.attend(*self.project(x, token_positions), mask)
        merged = rearrange(out, "... heads seq d_head -> ... seq (heads d_head)")
        return self.output_proj(merged)

    def project(
        self, x: Tensor, token_positions: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v. q and k are normalized (qk_norm) and rotated (rope).

        q is (..., heads, seq, d_head), and k and v are (..., kv_heads, seq, d_head).
        """
        split = "... seq (heads d_head) -> ... heads seq d_head"
        q = self.q_norm(rearrange(self.q_proj(x), split, d_head=self.d_head))
        k = self.k_norm(rearrange(self.k_proj(x), split, d_head=self.d_head))
        v = rearrange(self.v_proj(x), split, d_head=self.d_head)
        rope = self.rope  # read once: nn.Module looks up a child slowly
        if rope is None:
            if token_positions is not None:
                raise ValueError("token_positions require a layer built with rope=")
            return q, k, v
        if token_positions is not None:  # the heads of a token share its position
            token_positions = rearrange(
                token_positions, "... seq -> ... 1 seq", seq=x.shape[-2]
            )
        q_shape, k_shape = q.shape, k.shape
        q = rope(q, token_positions)
        k = rope(k, token_positions)
        if q.shape != q_shape or k.shape != k_shape:  # torch might broadcast them
            raise ValueError(
                f"rope must return the shapes {tuple(q_shape)} and {tuple(k_shape)}, "
                f"got {tuple(q.shape)} and {tuple(k.shape)}"
            )
        return q, k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        """Return causal attention, (..., heads, query, d_head), before the heads merge.

        q is (..., heads, query, d_head), and k and v are (..., kv_heads, key, d_head).
        The queries belong to the last of the tokens of k and v, so that a subclass with
        a cache may pass k and v that begin with cached tokens. `mask` is (..., query,
        key) or (..., 1, key).
        """
        *batch, _, query, _ = q.shape
        key = k.shape[-2]
        if len(batch) != 1:  # the fast kernels take one batch axis
            one_batch_axis = "... heads seq d_head -> (...) heads seq d_head"
            q = rearrange(q, one_batch_axis)
            k = rearrange(k, one_batch_axis)
            v = rearrange(v, one_batch_axis)
        is_causal = False
        shown: Any = None  # True where a query attends to a key
        if mask is None and query == key:
            # Not `is_causal = query == key`: in compiled code, the comparison is
            # symbolic, and torch takes only a bool.
            is_causal = True
        elif mask is not None or query > 1:
            shown = _and_causal(mask, (*batch, query, key), q.device)
            shown = shown.reshape(q.shape[0], 1, query, key)  # for all heads
        # Else, the one query is the last token, which attends to every key: no mask.
        enable_gqa = self.num_kv_heads < self.num_heads
        if enable_gqa and q.is_cuda:
            # A fast kernel takes groups in half precision, without a mask, up to d_head
            # 256 (pytorch issue 154363). Otherwise, torch would store all scores,
            # unless keys and values are repeated.
            is_half = q.dtype.itemsize == 2
            enable_gqa = is_half and shown is None and q.shape[-1] <= 256
            if not enable_gqa:
                group = self.num_heads // self.num_kv_heads
                k = k.repeat_interleave(group, dim=1)
                v = v.repeat_interleave(group, dim=1)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=shown, is_causal=is_causal, enable_gqa=enable_gqa
        )
        if mask is not None:
            # A query whose keys are all masked yields zeros on a CPU and, since torch
            # 2.12, on CUDA. Before, cuDNN attends to all keys (pytorch issue 177842). A
            # TorchVersion compares as a version, not as text.
            has_zeros = q.is_cpu or (q.is_cuda and torch.__version__ >= "2.12")
            if not has_zeros:  # only then, because this copies `out`
                out = out.masked_fill(~shown.any(dim=-1, keepdim=True), 0)
        return out if len(batch) == 1 else out.view(*batch, *out.shape[1:])

    def extra_repr(self) -> str:
        heads = f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"
        return f"{self.d_model}, {heads}, d_head={self.d_head}"


def _and_causal(
    mask: Any, shape: tuple[int, ...], device: torch.device
) -> Bool[Tensor, "*batch query key"]:
    """Return `mask` AND the causal mask of the last queries, expanded to `shape`."""
    query, key = shape[-2:]
    if query > key:
        raise ValueError(
            f"k must have at least as many tokens as q, {query}, got {key}"
        )
    causal = torch.ones(query, key, dtype=torch.bool, device=device).tril(key - query)
    if mask is None:
        return causal.expand(shape)
    _require_mask(mask, shape)
    return (mask & causal).expand(shape)


def _require_mask(mask: Any, shape: tuple[int, ...]) -> None:
    """Raise an error unless `mask` is bool and broadcasts to `shape` in one way."""
    axes = tuple(mask.shape) if isinstance(mask, Tensor) else ()
    if 2 <= len(axes) <= len(shape) and mask.dtype == torch.bool:
        pairs = zip(reversed(axes), reversed(shape), strict=False)
        fits = all(size in (1, whole) for size, whole in pairs)
        has_all_keys = axes[-1] == shape[-1]
        # (7, 7) for 7 sequences of 7 tokens may be padding without its axis of queries.
        queries = axes[-2]
        may_be_padding = len(axes) < len(shape) and queries == shape[-3] and queries > 1
        if fits and has_all_keys and not may_be_padding:
            return
    kind = f"{mask.dtype} {axes}" if isinstance(mask, Tensor) else type(mask).__name__
    raise ValueError(
        "mask must be bool, True where a query may attend to a key, and broadcast to "
        f"{shape} in one way only, got {kind}\n"
        "For padding, pass keep[..., None, :], where keep is True at real tokens; give "
        "any other mask all axes"
    )
