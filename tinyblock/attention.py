"""Causal multi-head self-attention: each token attends to itself and to earlier tokens.

    softmax(Q K^T / sqrt(d_k)) V

Sources: Vaswani et al., "Attention Is All You Need" (arXiv 1706.03762), equation 1 and
3.2.2; Ainslie et al., "GQA" (arXiv 2305.13245) for shared key and value heads; Henry et
al., "Query-Key Normalization for Transformers" (arXiv 2010.04245), here as in Qwen3: an
RMSNorm over the components of each head, before the rotation; CS336 section 3.4.4.
Convention: a mask is True where a query may attend to a key, and is combined with the
causal mask by AND. A query without any key yields zeros. The rows of each projection
weight are ordered (heads d_head); query head h reads key head h // group.
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
        # The weights of a query whose keys are all masked are NaN.
        weights = weights.masked_fill(~mask, 0)
    out = einsum(weights, v.to(dtype), "... query key, ... key d_v -> ... query d_v")
    return out.to(q.dtype)


class CausalMultiHeadSelfAttention(nn.Module):
    """Attend from every token to itself and to earlier tokens, in num_heads heads.

    - `num_kv_heads` is the number of key and value heads (default: num_heads). Each is
      shared by a group of query heads.
    - `d_head` is the head size (default: d_model / num_heads): d_k in the equation and
      in RoPE.
    - `rope(x, token_positions)` is any callable that rotates queries and keys of shape
      (..., heads, seq, d_head) by positions of shape (..., 1, seq). With None, there is
      no positional encoding.
    - `qk_norm` normalizes queries and keys over the components of each head.
    - `mask` is bool, of shape (..., seq, seq) or (..., 1, seq). For a padding mask
      `keep` of shape (batch, seq), True at real tokens, pass `keep[:, None, :]`: where
      batch equals seq, `keep` itself is read as (seq, seq).

    Returns the dtype of `x`.

    Raises:
        ValueError: an argument is out of range or inconsistent; token_positions are
            passed without a rope; the result of `rope` or `attend` has another shape
            than its input.
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
        _require_sizes(d_model, num_heads, num_kv_heads, d_head)
        if not 0 < eps < math.inf:
            raise ValueError(
                f"eps must be positive and finite, such as 1e-5, got {eps}"
            )
        self.d_model = d_model
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.d_head = d_model // num_heads if d_head is None else d_head
        _require_rope(rope, self.d_head)
        self.rope = rope
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        q_width = self.num_heads * self.d_head
        kv_width = self.num_kv_heads * self.d_head
        self.q_proj = nn.Linear(d_model, q_width, bias=False, **factory)
        self.k_proj = nn.Linear(d_model, kv_width, bias=False, **factory)
        self.v_proj = nn.Linear(d_model, kv_width, bias=False, **factory)
        self.output_proj = nn.Linear(q_width, d_model, bias=False, **factory)
        self.q_norm = nn.RMSNorm(self.d_head, eps, **factory) if qk_norm else None
        self.k_norm = nn.RMSNorm(self.d_head, eps, **factory) if qk_norm else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights from a normal of variance 2 / (d_in + d_out), cut at 3 sigma.

        Gains are set to 1.
        """
        for linear in (self.q_proj, self.k_proj, self.v_proj, self.output_proj):
            std = math.sqrt(2 / (linear.in_features + linear.out_features))
            nn.init.trunc_normal_(linear.weight, std=std, a=-3 * std, b=3 * std)
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                norm.reset_parameters()

    def forward(
        self,
        x: Float[Tensor, "*batch seq {self.d_model}"],
        token_positions: Shaped[Tensor, "*#batch seq"] | None = None,
        mask: Any = None,
    ) -> Float[Tensor, "*batch seq {self.d_model}"]:
        split = "... seq (heads d_head) -> ... heads seq d_head"
        q = rearrange(self.q_proj(x), split, d_head=self.d_head)
        k = rearrange(self.k_proj(x), split, d_head=self.d_head)
        v = rearrange(self.v_proj(x), split, d_head=self.d_head)
        if self.q_norm is not None and self.k_norm is not None:
            q = _normalize(q, self.q_norm)
            k = _normalize(k, self.k_norm)
        rope = self.rope  # read once: looking up a child takes as long as a shape check
        if token_positions is not None:
            if rope is None:
                raise ValueError(
                    "rope must be set to use token_positions, got None: pass rope= "
                    "to the constructor, or leave token_positions out"
                )
            # All heads of a token have its position.
            token_positions = rearrange(token_positions, "... seq -> ... 1 seq")
        if rope is not None:
            q = require_shape_of(q, rope(q, token_positions), "rope")
            k = require_shape_of(k, rope(k, token_positions), "rope")
        out = require_shape_of(q, self.attend(q, k, v, mask), "attend")
        merged = rearrange(out, "... heads seq d_head -> ... seq (heads d_head)")
        return self.output_proj(merged)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        """Return causal attention in the shape of q, (..., heads, seq, d_head).

        k and v are (..., kv_heads, seq, d_head). q and k are already normalized (with
        qk_norm) and rotated (with rope). This method requires as many keys as queries.
        An override may add keys, and accept any `mask`.
        """
        *batch, _, seq, _ = q.shape
        if k.shape[-2] != seq:
            raise ValueError(
                f"attend requires as many keys as queries, {seq}, got {k.shape[-2]}: "
                "for a cache of keys, override attend in a subclass"
            )
        if len(batch) != 1:
            # The fast kernels take one batch axis. "(...)" merges several axes into one,
            # and adds one where there is none.
            one_batch_axis = "... heads seq d_head -> (...) heads seq d_head"
            q = rearrange(q, one_batch_axis)
            k = rearrange(k, one_batch_axis)
            v = rearrange(v, one_batch_axis)
        visible = None
        if mask is not None:
            _require_mask(mask, batch, seq)
            causal = torch.ones(seq, seq, dtype=torch.bool, device=q.device).tril()
            visible = (mask & causal).expand(*batch, seq, seq)
            visible = visible.reshape(q.shape[0], 1, seq, seq)
        options = {}
        if self.num_kv_heads < self.num_heads:
            if _has_kernel_for_shared_heads(q, visible):
                options["enable_gqa"] = True
            else:
                group = self.num_heads // self.num_kv_heads
                k = k.repeat_interleave(group, dim=1)
                v = v.repeat_interleave(group, dim=1)
        # torch returns zeros for a query whose keys are all masked.
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, is_causal=visible is None, **options
        )
        return out if len(batch) == 1 else out.view(*batch, *out.shape[1:])

    def extra_repr(self) -> str:
        heads = f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"
        return f"{self.d_model}, {heads}, d_head={self.d_head}"


def require_shape_of(x: Tensor, out: Tensor, part: str) -> Tensor:
    """Return `out`, the result of a replaceable part; it must have the shape of `x`."""
    if not isinstance(out, Tensor) or out.shape != x.shape:  # torch might broadcast it
        got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise ValueError(
            f"{part} must return a tensor of shape {tuple(x.shape)}, the shape of its "
            f"input, got {got}"
        )
    return out


def _normalize(x: Tensor, norm: nn.RMSNorm) -> Tensor:
    # Under autocast, gains stay in float32, and torch warns if x has another dtype.
    return norm(x.to(norm.weight.dtype)).to(x.dtype)


def _has_kernel_for_shared_heads(q: Tensor, mask: Tensor | None) -> bool:
    """Return whether a fast kernel supports enable_gqa=, an option since torch 2.5."""
    if not q.is_cuda:
        return True  # the CPU has a fast kernel; other devices are assumed to have one
    # On CUDA, flash attention and cuDNN share key heads within these limits (pytorch issue
    # 154363). Beyond them, torch would store all scores.
    is_half_precision = q.dtype.itemsize == 2
    d_head = q.shape[-1]
    return mask is None and is_half_precision and d_head <= 256


def _require_sizes(
    d_model: int, num_heads: int, num_kv_heads: int | None, d_head: int | None
) -> None:
    sizes = {
        "d_model": d_model,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "d_head": d_head,
    }
    if any(size is not None and size < 1 for size in sizes.values()):
        raise ValueError(f"sizes of attention must be at least 1, got {sizes}")
    if d_head is None and d_model % num_heads:
        raise ValueError(
            f"d_model={d_model} must be a multiple of num_heads={num_heads}: "
            "change one of them, or pass d_head"
        )
    if num_kv_heads is not None and num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads={num_heads} must be a multiple of num_kv_heads={num_kv_heads}"
        )


def _require_rope(rope: Any, d_head: int) -> None:
    if isinstance(rope, type):
        raise ValueError(
            "rope must be an instance or a function, called as "
            f"rope(x, token_positions), got the class {rope.__name__}: "
            f"pass {rope.__name__}(...)"
        )
    if getattr(rope, "d_k", d_head) != d_head:
        raise ValueError(f"rope must have d_k={d_head}, the head size, got {rope}")


def _require_mask(mask: Any, batch: list[int], seq: int) -> None:
    """Raise a ValueError unless `mask` is bool and broadcasts to (*batch, seq, seq)."""
    if not isinstance(mask, Tensor):
        raise ValueError(f"mask must be a bool tensor, got {_describe(mask)}")
    if mask.layout != torch.strided:
        raise ValueError(f"mask must be dense, got {mask.layout}: pass mask.to_dense()")
    required = []
    got = []
    fixes = []
    if mask.dtype != torch.bool:
        required.append("be bool")
        got.append(str(mask.dtype))
        fixes.append(_how_to_convert(mask))
    if not _is_shape_of_mask(mask.shape, batch, seq):
        required.append(f"have the shape {(*batch, seq, seq)} or {(*batch, 1, seq)}")
        got.append(str(tuple(mask.shape)))
        if batch and mask.shape == (*batch, seq):
            fixes.append("pass a padding mask as mask[..., None, :]")
    if required:
        advice = f": {'; then '.join(fixes)}" if fixes else ""
        raise ValueError(
            f"mask must {' and '.join(required)}, got {' and '.join(got)}{advice}"
        )


def _how_to_convert(mask: Tensor) -> str:
    if mask.is_floating_point():
        return (
            "convert it by mask == 0 if it is additive (0 and -inf), "
            "or by mask.bool() if it has 1 and 0"
        )
    return "convert it by mask.bool() if it has 1 and 0"


def _is_shape_of_mask(shape: torch.Size, batch: list[int], seq: int) -> bool:
    """Return whether a shape, which ends with seq, broadcasts to (*batch, seq, seq)."""
    for_each_query = (seq, seq)
    for_all_queries = (1, seq)
    if shape[-2:] not in (for_each_query, for_all_queries):
        return False
    leading = shape[:-2]
    if len(leading) > len(batch):
        return False
    last_sizes = batch[len(batch) - len(leading) :]
    pairs = zip(leading, last_sizes, strict=True)
    return all(mask_size in (1, size) for mask_size, size in pairs)


def _describe(mask: Any) -> str:
    kind = type(mask)
    # Compared by name, because numpy need not be installed.
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        return "numpy.ndarray: pass torch.from_numpy(mask)"
    if isinstance(mask, (bool, int, float, str)):
        return f"{mask!r}"
    return kind.__name__
