"""Rotary position embedding (RoPE): rotate pairs of components by the token's position.

    angle(i, k) = i * theta^(-2k / d_k),  k = 0 ... d_k/2 - 1
    (x[2k], x[2k+1])  ->  (x[2k] cos - x[2k+1] sin,  x[2k] sin + x[2k+1] cos)

Source: Su et al., "RoFormer" (arXiv 2104.09864), equations 13 to 15; CS336 2026,
section 3.4.3, equation 8.
Convention: pairs are consecutive, (x0, x1), (x2, x3), ..., as in the paper and in
Meta's Llama. Hugging Face pairs x[k] with x[k + d_k/2], the same rotation for permuted
rows of the query and key weights.
Numerics: the table of cosines and sines is computed in float64 and stored in float32,
in a model of any dtype. Angles computed in float32 are off by thousandths of a radian
at position 131071. float64 inputs use `apply_rope` instead of the table.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from jaxtyping import Float, Integer
from torch import Tensor, nn

__all__ = ["RotaryPositionalEmbedding", "apply_rope"]


def apply_rope(
    x: Float[Tensor, "*batch seq d_k"], angles: Float[Tensor, "*#batch seq d_k//2"]
) -> Float[Tensor, "*batch seq d_k"]:
    """Rotate each consecutive pair of `x` by its angle (CS336 2026, equation 8).

    `angles` are in radians and broadcast to the leading axes of `x`. Pass float64,
    because float32 cannot hold the angles of far positions. Computes in float32 or
    wider, and returns the dtype of `x`.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    cos = angles.cos().to(dtype)
    sin = angles.sin().to(dtype)
    # einops stacks the list along a first axis, which becomes rows and columns.
    rotation = rearrange(
        [cos, -sin, sin, cos], "(row column) ... -> ... row column", row=2
    )
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
      axes of `x` from the right. For `x` of shape (..., heads, seq, d_k), pass
      positions of shape (..., seq) as `positions[..., None, :]`. Without this axis, the
      last batch axis is read as the heads, without an error if their sizes are equal.
      None means 0 ... seq-1.

    Computes in float32 or wider, and returns the dtype of `x`. The table keeps its
    values when torch casts, moves, copies or empties the module, and stays where it was
    while the model is on meta. But transformers' `from_pretrained` overwrites it, so
    call `reset_parameters` in the model's `_init_weights`.

    Raises:
        ValueError: d_k is odd, a size is below 1, or theta is not positive and finite;
            a sequence is longer than the table; a position is out of range (compiled:
            torch's own error; on CUDA: a device-side assert).
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
            raise ValueError(f"theta must be positive and finite, got {theta}")
        if d_k < 2 or d_k % 2:
            raise ValueError(
                f"d_k, the head size, must be even and positive, got {d_k}"
            )
        if max_seq_len < 1:
            raise ValueError(f"max_seq_len must be at least 1, got {max_seq_len}")
        self.theta = theta
        self.d_k = d_k
        self.max_seq_len = max_seq_len
        # Each position has a row: the cosine and the sine of the angle of each pair.
        table = self._compute_table()
        device = torch.empty(0, device=device).device  # None is torch's default device
        self.register_buffer("cos_sin", _move(table, device), persistent=False)

    def frequencies(self) -> Float[Tensor, " half"]:
        """Return the angle in radians by which each pair turns per token, in float64.

        A subclass may override this. The constructor calls it.
        """
        even = torch.arange(0, self.d_k, 2, device="cpu", dtype=torch.float64)
        return self.theta ** (-even / self.d_k)

    def reset_parameters(self) -> None:
        """Compute the table again, as after a change of theta."""
        self.cos_sin.copy_(self._compute_table())

    def forward(
        self,
        x: Float[Tensor, "*batch seq {self.d_k}"],
        token_positions: Integer[Tensor, "*#batch seq"] | None = None,
    ) -> Float[Tensor, "*batch seq {self.d_k}"]:
        # In float64, this only rejects wrong positions.
        cos_sin = self._rows(x, token_positions)
        if x.dtype != torch.float64:
            return _rotate(x, cos_sin)
        # The table, in float32, is too coarse for float64.
        if token_positions is None:
            token_positions = torch.arange(x.shape[-2], device=x.device)
        frequencies = self.frequencies().to(x.device)
        return apply_rope(x, token_positions.unsqueeze(-1) * frequencies)

    def extra_repr(self) -> str:
        return f"theta={self.theta}, d_k={self.d_k}, max_seq_len={self.max_seq_len}"

    def _compute_table(self) -> Float[Tensor, "max_seq_len half pair"]:
        positions = torch.arange(self.max_seq_len, device="cpu", dtype=torch.float64)
        # The view raises an error if an override returns a wrong number of frequencies.
        angles = torch.outer(positions, self.frequencies().view(self.d_k // 2))
        return torch.stack((angles.cos(), angles.sin()), dim=-1).float()

    def _rows(
        self, x: Tensor, token_positions: Tensor | None
    ) -> Float[Tensor, "*batch seq half pair"]:
        """Return the row of the table for each token."""
        # While the model is on meta, the table is not.
        table = self.cos_sin.to("meta") if x.is_meta else self.cos_sin
        if token_positions is None:
            seq = x.shape[-2]
            if seq > self.max_seq_len:
                raise ValueError(
                    f"x must have at most max_seq_len={self.max_seq_len} tokens, "
                    f"got {seq}: build RoPE with a larger max_seq_len"
                )
            return table[:seq]
        # An embedding rejects negative positions, masks and floats, unlike
        # table[token_positions].
        try:
            rows = F.embedding(token_positions, table.flatten(1))
        except IndexError as error:  # compiled code and CUDA raise another error
            raise ValueError(
                f"token_positions must be 0 ... {self.max_seq_len - 1}, got "
                f"{token_positions.min()} ... {token_positions.max()}"
            ) from error
        return rows.unflatten(-1, table.shape[1:])

    def _apply(
        self, fn: Callable[[Tensor], Tensor], recurse: bool = True
    ) -> "RotaryPositionalEmbedding":
        """Move the table with the module, but do not cast or empty it."""
        # All of .to(), .half(), .cuda(), .to_empty() and so on call this method. That
        # of torch would round the table, or replace it by uninitialized memory.
        table = self.cos_sin
        super()._apply(fn, recurse)
        self.cos_sin = _move(table, self.cos_sin.device)
        return self


def _move(table: Tensor, device: torch.device) -> Tensor:
    """Return the table on a device. On meta it would have no values, so it stays."""
    return table if device.type == "meta" else table.to(device)


def _rotate(
    x: Float[Tensor, "*batch seq d_k"], cos_sin: Float[Tensor, "*#batch seq half pair"]
) -> Float[Tensor, "*batch seq d_k"]:
    """Return (even + i odd)(cos + i sin) of each pair, computed in float32."""
    pairs = x.float().unflatten(-1, (-1, 2))
    if torch.compiler.is_compiling():  # inductor generates no code for complex numbers
        even, odd = pairs.unbind(-1)
        cos, sin = cos_sin.unbind(-1)
        rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    else:  # one complex product is much faster than these seven operations
        try:
            numbers = torch.view_as_complex(pairs)
        except RuntimeError:  # the strides forbid it, as for a slice at an odd offset
            numbers = torch.complex(*pairs.unbind(-1))
        rotated = torch.view_as_real(numbers * torch.view_as_complex(cos_sin))
    return rotated.flatten(-2).type_as(x)
