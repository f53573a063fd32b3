"""Rotary position embedding (RoPE): turn each pair of components by an angle proportional to the token's position.

    angle(i, k) = i * theta^(-2k / d_k),  k = 0 ... d_k/2 - 1
    (x[2k], x[2k+1])  ->  (x[2k] cos - x[2k+1] sin,  x[2k] sin + x[2k+1] cos)

Source: Su et al., "RoFormer" (arXiv 2104.09864), equations 13 to 15; CS336 section 3.4.3, equation 8.
Convention: pairs are consecutive, (x0, x1), (x2, x3), ..., as in the paper and in Meta's Llama. Hugging Face pairs x[k]
with x[k + d_k/2]: the same rotation for permuted rows of the query and key weights.
Numerics: the table is built in float64 and stays float32 whatever dtype the module is moved to, because one computed in
float32 is wrong by 3e-3 at position 131071. float64 input gets its angles in float64.
"""

import math
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from einops import einsum, rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

__all__ = ["RotaryPositionalEmbedding", "apply_rope"]


def apply_rope(
    x: Float[Tensor, "*batch seq d_k"], angles: Float[Tensor, "*#batch seq d_k//2"]
) -> Float[Tensor, "*batch seq d_k"]:
    """Rotate each consecutive pair of `x` by its angle, in radians: the 2x2 matrices of equation 8.

    `angles` holds one angle per pair, half = d_k/2, and broadcasts to the leading axes of `x`; give it in float64,
    where float32 cannot hold a position's radians. Computed in float32 or wider, returned in the dtype of `x`.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = angles.cos().to(wide), angles.sin().to(wide)
    rotation = rearrange([cos, -sin, sin, cos], "(row column) ... -> ... row column", row=2)
    pairs = rearrange(x.to(wide), "... (half pair) -> ... half pair", pair=2)
    rotated = einsum(rotation, pairs, "... half row column, ... half column -> ... half row")
    return rearrange(rotated, "... half pair -> ... (half pair)").to(x.dtype)


class RotaryPositionalEmbedding(nn.Module):
    """Rotate queries or keys by their positions; one instance serves every layer of a model.

    theta is the base of the wavelengths, d_k the head size, max_seq_len the number of positions in the table. Computed
    in float32 or wider, returned in the dtype of the input.

    `token_positions` counts tokens from 0 and broadcasts to the leading axes of `x`; None stands for 0 ... seq-1. To
    refuse a position outside the table is to read it, and on an accelerator reading waits for the device: once per
    tensor, however many layers share it, never for None or for positions kept on the CPU. Where nothing can be read
    (torch.compile, torch.export, CUDA graph capture, vmap), a token outside the table becomes NaN: an index past the
    table would trip an assertion on the device, after which the process can no longer use it.

    Raises:
        ValueError: d_k is odd, a size below 1, theta not positive and finite; a sequence or position off the table.
    """

    cos_sin: Tensor

    def __init__(self, theta: float, d_k: int, max_seq_len: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        if not 0 < theta < math.inf:
            raise ValueError(f"RoPE needs a positive finite theta, such as 10000, got {theta}")
        if d_k < 2 or d_k % 2:
            raise ValueError(f"RoPE rotates pairs: d_k must be even and at least 2, got {d_k}")
        if max_seq_len < 1:
            raise ValueError(f"RoPE needs max_seq_len of at least 1, got {max_seq_len}")
        self.theta, self.d_k, self.max_seq_len = theta, d_k, max_seq_len
        table = torch.empty(max_seq_len, d_k // 2, 2, device=device, dtype=torch.float32)
        self.register_buffer("cos_sin", table, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Compute the table."""
        if not self.cos_sin.is_meta:
            self.cos_sin.copy_(self._cos_sin(torch.arange(self.max_seq_len, device="cpu")))

    def forward(
        self, x: Float[Tensor, "*batch seq {self.d_k}"], token_positions: Int[Tensor, "*#batch seq"] | None = None
    ) -> Float[Tensor, "*batch seq {self.d_k}"]:
        cos_sin = self._rows(x, token_positions)
        pairs = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, 2))
        if torch.compiler.is_compiling():  # inductor generates no code for complex numbers
            (even, odd), (cos, sin) = pairs.unbind(-1), cos_sin.unbind(-1)
            rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
        else:  # one complex product takes half the time of the real ones, or less
            rotated = torch.view_as_real(_as_complex(pairs) * torch.view_as_complex(cos_sin))
        return rotated.flatten(-2).to(x.dtype)

    def extra_repr(self) -> str:
        return f"theta={self.theta}, d_k={self.d_k}, max_seq_len={self.max_seq_len}"

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        """Take the table along to another device whole: not rounded to another dtype, nor left empty by `to_empty`."""
        table = self.cos_sin
        super()._apply(fn, recurse)
        if table.is_meta and not self.cos_sin.is_meta:
            self.reset_parameters()
        else:
            self.cos_sin = table.to(self.cos_sin.device)
        return self

    def _cos_sin(self, positions: Int[Tensor, "*batch seq"]) -> Float[Tensor, "*batch seq half pair"]:
        exponents = torch.arange(0, self.d_k, 2, device=positions.device, dtype=torch.float64) / self.d_k
        angles = positions[..., None] * self.theta**-exponents
        return torch.stack((angles.cos(), angles.sin()), dim=-1)

    def _rows(self, x: Tensor, token_positions: Tensor | None) -> Float[Tensor, "*#batch seq half pair"]:
        exact = x.dtype == torch.float64
        if token_positions is None:
            seq = x.shape[-2]
            if seq > self.max_seq_len:
                raise ValueError(f"a sequence of {seq} tokens is longer than RoPE's max_seq_len={self.max_seq_len}")
            return self._cos_sin(torch.arange(seq, device=x.device)) if exact else self.cos_sin[:seq]
        known = self._inside_table(token_positions)
        positions = token_positions.to(x.device, non_blocking=token_positions.is_cpu)
        index = positions if known else positions.clamp(0, self.max_seq_len - 1)
        rows = self._cos_sin(index) if exact else self.cos_sin[index]
        return rows if known else rows.where((index == positions)[..., None, None], math.nan)

    def _inside_table(self, positions: Tensor) -> bool:
        """Raise if a position is outside the table; return False where the positions cannot be read."""
        if torch.compiler.is_compiling() or (positions.is_cuda and torch.cuda.is_current_stream_capturing()):
            return False
        source = positions if positions._base is None else positions._base
        view = (positions.storage_offset(), positions.shape, positions.stride())
        last_source, *last = _last_read.get(self, (lambda: None,))
        if not source.is_inference() and last_source() is source and last == [source._version, *view]:
            return True
        try:
            low, high = torch.stack(torch.aminmax(positions)).tolist()
        except RuntimeError:  # no values: none at all, a meta or fake tensor, a batch of vmap
            return False
        if low < 0 or high >= self.max_seq_len:
            raise ValueError(f"token_positions must be 0 ... {self.max_seq_len - 1}, got {low} ... {high}")
        if not source.is_inference():  # inference tensors keep no version, so a later write would go unseen
            _last_read[self] = (ref(source), source._version, *view)
        return True


# The positions that each instance read last; outside the module, because a weak reference cannot be pickled.
_last_read: WeakKeyDictionary[nn.Module, tuple[Any, ...]] = WeakKeyDictionary()


def _as_complex(pairs: Float[Tensor, "*batch seq half pair"]) -> Tensor:
    """View pairs as complex numbers, from a copy where the strides forbid a view (a slice at an odd offset, say)."""
    *outer, last = pairs.stride()
    if last != 1 or pairs.storage_offset() % 2 or any(stride % 2 for stride in outer):
        pairs = pairs.clone(memory_format=torch.contiguous_format)
    return torch.view_as_complex(pairs)
