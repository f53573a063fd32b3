"""Rotary position embedding (RoPE): turn each pair of components by an angle proportional to the token's position.

    angle(i, k) = i * theta^(-2k / d_k),  k = 0 ... d_k/2 - 1
    (x[2k], x[2k+1])  ->  (x[2k] cos - x[2k+1] sin,  x[2k] sin + x[2k+1] cos)

Source: Su et al., "RoFormer" (arXiv 2104.09864), equations 13 to 15; CS336 section 3.4.3, equation 8.
Convention: pairs are consecutive, (x0, x1), (x2, x3), ..., as in the paper and in Meta's Llama. Hugging Face pairs x[k]
with x[k + d_k/2]: the same rotation for permuted rows of the query and key weights.
Numerics: the table is built in float64, and float32 in a module of any dtype; built in float32 it is off by 3e-3 at
position 131071. float64 input gets float64 angles.
"""

import math
from typing import Any, ClassVar
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

    `angles` broadcasts to the leading axes of `x`; give float64, as float32 cannot hold the radians of far positions.
    Computed in float32 or wider, returned in the dtype of `x`.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = angles.cos().to(wide), angles.sin().to(wide)
    rotation = rearrange([cos, -sin, sin, cos], "(row column) ... -> ... row column", row=2)
    pairs = rearrange(x.to(wide), "... (half pair) -> ... half pair", pair=2)
    rotated = einsum(rotation, pairs, "... half row column, ... half column -> ... half row")
    return rearrange(rotated, "... half pair -> ... (half pair)").to(x.dtype)


class RotaryPositionalEmbedding(nn.Module):
    """Rotate queries or keys by their positions; one instance serves every layer of a model.

    theta is the base of the wavelengths, d_k the head size, max_seq_len the number of positions in the table.
    Computed in float32 or wider, returned in the dtype of the input.

    `token_positions` counts tokens from 0 and broadcasts to the leading axes of `x`; None stands for 0 ... seq-1. To
    refuse one that is off the table is to read it, and that waits for an accelerator: once per tensor, however many
    layers share it, and not for None or for positions kept on the CPU. Where none can be read (torch.compile, export,
    CUDA graphs, vmap), the token becomes NaN: an index past the table would end the process's use of the device.

    Raises:
        ValueError: d_k is odd, a size below 1, theta not positive and finite; a sequence or position off the table.
    """

    cos_sin: Tensor
    _last_read: ClassVar[WeakKeyDictionary[nn.Module, tuple[Any, Any]]] = WeakKeyDictionary()  # not to be pickled

    def __init__(self, theta: float, d_k: int, max_seq_len: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        if not 0 < theta < math.inf:
            raise ValueError(f"RoPE needs a positive finite theta, such as 10000, got {theta}")
        if d_k < 2 or d_k % 2 or max_seq_len < 1:
            raise ValueError(f"RoPE needs an even d_k and max_seq_len of at least 1, got {d_k=}, {max_seq_len=}")
        self.theta, self.d_k, self.max_seq_len = theta, d_k, max_seq_len
        shape = (max_seq_len, d_k // 2, 2)
        self.register_buffer("cos_sin", torch.empty(shape, device=device, dtype=torch.float32), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Compute the table."""
        if not self.cos_sin.is_meta:
            self.cos_sin.copy_(self._cos_sin(torch.arange(self.max_seq_len, device="cpu")))

    def forward(
        self, x: Float[Tensor, "*batch seq {self.d_k}"], token_positions: Int[Tensor, "*#batch seq"] | None = None
    ) -> Float[Tensor, "*batch seq {self.d_k}"]:
        cos_sin, outside = self.look_up(x, token_positions)
        return self.rotate(x, cos_sin) if outside is None else self.rotate(x, cos_sin).masked_fill(outside, math.nan)

    def look_up(self, x: Tensor, token_positions: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return cos + i sin of each token (pairs for inductor: it lacks complex code), and which are off the table."""
        table = self.cos_sin
        if table.is_meta and not x.is_meta:  # as after load_state_dict(assign=True) into a model on meta
            table = self.to_empty(device=x.device).cos_sin
        seq, exact = x.shape[-2], x.dtype == torch.float64
        if token_positions is None:
            if seq > self.max_seq_len:
                raise ValueError(f"a sequence of {seq} tokens is longer than RoPE's max_seq_len={self.max_seq_len}")
            rows, outside = self._cos_sin(torch.arange(seq, device=x.device)) if exact else table[:seq], None
        else:
            positions, just_read = token_positions, self._read(token_positions)
            if positions.device != x.device:  # without waiting, but for pinned memory: it may change before the copy
                positions = positions.to(x.device, non_blocking=not positions.is_pinned())
            index = positions.long().clamp(0, self.max_seq_len - 1)
            rows = self._cos_sin(index) if exact else table[index]
            outside = None if just_read else (index != positions).unsqueeze(-1)
        return rows if torch.compiler.is_compiling() else torch.view_as_complex(rows), outside

    @staticmethod
    def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
        """Turn each pair of `x` by an angle that is given as `look_up` returns it."""
        pairs = (x if x.dtype == torch.float64 else x.float()).unflatten(-1, (-1, 2))
        if not cos_sin.is_complex():
            (even, odd), (cos, sin) = pairs.unbind(-1), cos_sin.unbind(-1)
            return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x.dtype)
        try:
            numbers = torch.view_as_complex(pairs)
        except RuntimeError:  # the strides of x forbid a view: a slice at an odd offset, say
            numbers = torch.view_as_complex(pairs.clone(memory_format=torch.contiguous_format))
        return torch.view_as_real(numbers * cos_sin).flatten(-2).to(x.dtype)

    def extra_repr(self) -> str:
        return f"theta={self.theta}, d_k={self.d_k}, max_seq_len={self.max_seq_len}"

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        """Take the table along to another device whole: not rounded to another dtype, nor left empty by `to_empty`."""
        table = self.cos_sin
        device = fn(table[:0]).device
        del self._buffers["cos_sin"]
        super()._apply(fn, recurse)
        self._buffers["cos_sin"] = torch.empty_like(table, device=device) if table.is_meta else table.to(device)
        if table.is_meta:
            self.reset_parameters()
        return self

    def _cos_sin(self, positions: Int[Tensor, "*batch seq"]) -> Float[Tensor, "*batch seq half pair"]:
        exponents = torch.arange(0, self.d_k, 2, device=positions.device, dtype=torch.float64) / self.d_k
        angles = positions[..., None] * self.theta**-exponents
        return torch.stack((angles.cos(), angles.sin()), dim=-1)

    def _read(self, positions: Tensor) -> bool:
        """Raise if a position is off the table; return whether the positions could be, and now were, read."""
        if torch.compiler.is_compiling() or (positions.is_cuda and torch.cuda.is_current_stream_capturing()):
            return False
        source = positions if positions._base is None else positions._base
        version = None if source.is_inference() else source._version
        view = (version, positions.storage_offset(), positions.shape, positions.stride())
        last_source, last_view = self._last_read.get(self, (lambda: None, None))
        if last_source() is source and last_view == view:
            return False  # read before, though a write that torch does not see may have changed it since
        try:
            low, high = torch.stack(torch.aminmax(positions)).tolist()
        except RuntimeError:  # there are no values: none at all, a meta or fake tensor, a batch of vmap
            return False
        if low < 0 or high >= self.max_seq_len:
            raise ValueError(f"token_positions must be 0 ... {self.max_seq_len - 1}, got {low} ... {high}")
        self._last_read[self] = ref(source), view
        return True
