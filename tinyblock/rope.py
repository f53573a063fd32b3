"""Rotary position embedding (RoPE): rotate pairs of components by the token's position.

    angle(i, k) = i * theta^(-2k / d_k),  k = 0 ... d_k/2 - 1
    (x[2k], x[2k+1])  ->  (x[2k] cos - x[2k+1] sin,  x[2k] sin + x[2k+1] cos)

Source: Su et al., "RoFormer" (arXiv 2104.09864), equations 13 to 15; CS336 section
3.4.3, equation 8.
Convention: pairs are consecutive, (x0, x1), (x2, x3), ..., as in the paper and in
Meta's Llama. Hugging Face pairs x[k] with x[k + d_k/2]: the same rotation for permuted
rows of the query and key weights.
Numerics: the table of cosines and sines is computed in float64 and stored in float32,
in a model of any dtype. Angles computed in float32 are off by up to 3e-3 radians at
position 131071. For float64 inputs, each call computes its cosines and sines in
float64; on CUDA, such a call synchronizes, so a CUDA graph cannot capture it.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from jaxtyping import Float, Shaped
from torch import Tensor, nn

__all__ = ["RotaryPositionalEmbedding", "apply_rope"]


def apply_rope(
    x: Float[Tensor, "*batch seq d_k"], angles: Float[Tensor, "*#batch seq d_k//2"]
) -> Float[Tensor, "*batch seq d_k"]:
    """Rotate each consecutive pair of `x` by its angle (CS336 3.4.3, equation 8).

    `angles` are in radians and broadcast to the leading axes of `x`. Pass float64,
    because float32 cannot hold the angles of far positions. Computes in float32 or
    wider, and returns the dtype of `x`.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    # Only cosines and sines are cast: float32 would round the angles of far positions.
    cos = angles.cos().to(dtype)
    sin = angles.sin().to(dtype)
    # einops stacks the list along a first axis, which becomes rows and columns.
    rotation = rearrange(
        [cos, -sin, sin, cos], "(row column) ... -> ... row column", row=2
    )
    # A pair is two neighbors: (x0, x1), (x2, x3), ...; `half` of d_k is their number.
    pairs = rearrange(x.to(dtype), "... (half pair) -> ... half pair", pair=2)
    rotated = einsum(
        rotation, pairs, "... half row column, ... half column -> ... half row"
    )
    return rearrange(rotated, "... half pair -> ... (half pair)").to(x.dtype)


class RotaryPositionalEmbedding(nn.Module):
    """Rotate queries or keys by their positions. One instance can serve all layers.

    - `theta` is the base of the frequencies theta^(-2k/d_k).
    - `d_k`, as in the papers, is the head size: `d_head` of attention and Block.
    - `max_seq_len` is the number of positions in the table.
    - `token_positions` are 0-based, counted in tokens, and broadcast to the leading
      axes of `x`. None means 0 ... seq-1.

    Computes in float32 or wider, and returns the dtype of `x`.

    Raises:
        ValueError: d_k is odd, a size is below 1, or theta is not positive and finite;
            a sequence is longer than the table; positions are not integers, or are out
            of range (compiled: torch's own error; on CUDA: a device-side assert).
    """

    cos_sin: Tensor

    def __init__(
        self,
        theta: float,
        d_k: int,
        max_seq_len: int,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if not 0 < theta < math.inf:
            raise ValueError(
                f"theta must be positive and finite, such as 10000, got {theta}"
            )
        if d_k < 2 or d_k % 2:
            raise ValueError(
                f"d_k, the head size, must be even and positive, got {d_k}"
            )
        if max_seq_len < 1:
            raise ValueError(f"max_seq_len must be at least 1, got {max_seq_len}")
        self.theta = theta
        self.d_k = d_k
        self.max_seq_len = max_seq_len
        # One row per position: the cosine and the sine of the angle of each pair.
        shape = (max_seq_len, d_k // 2, 2)
        table = torch.empty(shape, device=device, dtype=torch.float32)
        self.register_buffer("cos_sin", table, persistent=False)
        self.reset_parameters()

    def frequencies(self) -> Float[Tensor, " half"]:
        """Return the angle in radians by which each pair turns per token, in float64.

        A subclass may override this. The constructor calls it.
        """
        even = torch.arange(0, self.d_k, 2, device="cpu", dtype=torch.float64)
        return self.theta ** (-even / self.d_k)

    def reset_parameters(self) -> None:
        """Compute the table. If it is on the meta device, the first call elsewhere does so."""
        if not self.cos_sin.is_meta:
            self.cos_sin.copy_(self._compute_table())

    def forward(
        self,
        x: Float[Tensor, "*batch seq {self.d_k}"],
        token_positions: Shaped[Tensor, "*#batch seq"] | None = None,
    ) -> Float[Tensor, "*batch seq {self.d_k}"]:
        if x.dtype == torch.float64:  # the table is too coarse
            every_position = self._every_position(x.device)
            positions = self._select(every_position, x.shape[-2], token_positions)
            cos_sin = self._cos_sin_of(positions)
        else:
            table = self._computed_table(x.device)
            cos_sin = self._select(table, x.shape[-2], token_positions)
        return _rotate(x, cos_sin)

    def extra_repr(self) -> str:
        return f"theta={self.theta}, d_k={self.d_k}, max_seq_len={self.max_seq_len}"

    def _select(
        self,
        table: Float[Tensor, "max_seq_len ..."],
        seq: int,
        token_positions: Tensor | None,
    ) -> Tensor:
        """Select from `table`, which has one row per position, the rows of the tokens.

        Without token_positions, these are its first `seq` rows. The result has the axes of
        token_positions, and those of a row.
        """
        if token_positions is None:
            if seq > self.max_seq_len:
                raise ValueError(
                    f"x must have at most max_seq_len={self.max_seq_len} tokens, "
                    f"got {seq}: build RoPE with a larger max_seq_len"
                )
            return table[:seq]
        _require_integers(token_positions)
        # An embedding takes a table of two axes. Unlike table[token_positions], it
        # rejects negative positions.
        flat_table = table.flatten(1)
        try:
            selected = F.embedding(token_positions.long(), flat_table)
        except IndexError as error:  # compiled code and CUDA raise another error
            raise _out_of_range(token_positions, self.max_seq_len) from error
        return selected.unflatten(-1, table.shape[1:])

    def _every_position(
        self, device: torch.device | str
    ) -> Float[Tensor, "max_seq_len 1"]:
        positions = torch.arange(self.max_seq_len, device=device, dtype=torch.float64)
        return positions.unsqueeze(-1)

    def _cos_sin_of(
        self, positions: Float[Tensor, "*batch seq 1"]
    ) -> Float[Tensor, "*batch seq half pair"]:
        # The view raises an error if an override returns another number of frequencies.
        frequencies = self.frequencies().view(self.d_k // 2).to(positions.device)
        angles = positions * frequencies
        return torch.stack((angles.cos(), angles.sin()), dim=-1)

    def _compute_table(self) -> Float[Tensor, "max_seq_len half pair"]:
        return self._cos_sin_of(self._every_position("cpu")).to(torch.float32)

    def _computed_table(
        self, device: torch.device
    ) -> Float[Tensor, "max_seq_len half pair"]:
        """Return the table; one that is still on meta is first computed for `device`.

        It is on meta after `load_state_dict(assign=True)` into a model built on meta.
        """
        if not self.cos_sin.is_meta:
            return self.cos_sin  # on the device to which the module was moved
        if device.type == "meta":
            return self.cos_sin  # a call on meta needs no values
        # Autograd cannot use a tensor from inference mode in later calls. (A first call
        # that is compiled under inference mode still makes one: torch drops the switch.)
        with torch.inference_mode(False), torch.no_grad():
            table = self._compute_table().to(device)
        if type(table) is Tensor:  # not a fake tensor, which has no values
            self.cos_sin = table  # a race is harmless: all threads compute equal tables
        return table

    def _apply(
        self, fn: Callable[[Tensor], Tensor], recurse: bool = True
    ) -> "RotaryPositionalEmbedding":
        """Move the table, as `.to` does, but never cast it or leave it empty.

        Casting to bfloat16 would lose the far positions. `to_empty` moves a table from
        meta without values.
        """
        table = self.cos_sin
        device = fn(table[:0]).device  # an empty slice shows where fn moves tensors
        del self._buffers["cos_sin"]  # hidden from fn, which would cast it
        try:
            super()._apply(fn, recurse)
        finally:
            self._buffers["cos_sin"] = table
        if table.is_meta:
            self.cos_sin = torch.empty_like(table, device=device)
            self.reset_parameters()  # fills the table, unless it stays on meta
        else:
            self.cos_sin = table.to(device)
        return self


def _require_integers(token_positions: Tensor) -> None:
    dtype = token_positions.dtype
    if dtype == torch.bool or dtype.is_floating_point or dtype.is_complex:
        raise ValueError(
            f"token_positions must be integers, got {dtype}: "
            "call .long(), or if this is a mask, pass it as mask="
        )


def _out_of_range(token_positions: Tensor, max_seq_len: int) -> ValueError:
    limits = f"token_positions must be 0 ... {max_seq_len - 1} (max_seq_len - 1)"
    try:
        lowest, highest = token_positions.long().aminmax()
        return ValueError(f"{limits}, got values from {lowest} to {highest}")
    except RuntimeError:  # torch.func.vmap hides the values
        return ValueError(limits)


def _rotate(
    x: Float[Tensor, "*batch seq d_k"], cos_sin: Float[Tensor, "*#batch seq half pair"]
) -> Float[Tensor, "*batch seq d_k"]:
    """Rotate each consecutive pair of `x`, in the dtype of `cos_sin`."""
    # `.to` takes time even if the dtype is the same.
    wide = x if x.dtype == cos_sin.dtype else x.to(cos_sin.dtype)
    pairs = wide.unflatten(-1, (-1, 2))  # einops takes 3 us longer
    if not torch.compiler.is_compiling():
        rotated = _rotate_as_complex(pairs, cos_sin)
    else:  # inductor generates no code for complex numbers
        rotated = _rotate_by_parts(pairs, cos_sin)
    out = rotated.flatten(-2)
    return out if out.dtype == x.dtype else out.to(x.dtype)


def _rotate_as_complex(pairs: Tensor, cos_sin: Tensor) -> Tensor:
    """Multiply (even + i odd)(cos + i sin): one complex product for seven operations."""
    try:
        numbers = torch.view_as_complex(pairs)
    except RuntimeError:  # the strides forbid a view, as for a slice at an odd offset
        even, odd = pairs.unbind(-1)
        numbers = torch.complex(even, odd)
    return torch.view_as_real(numbers * torch.view_as_complex(cos_sin))


def _rotate_by_parts(pairs: Tensor, cos_sin: Tensor) -> Tensor:
    even, odd = pairs.unbind(-1)
    cos, sin = cos_sin.unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
