"""Rotary position embedding (RoPE): rotate each pair of components by an angle proportional to the token's position.

    angle(i, k) = i * theta^(-2k / d_k),  k = 0 ... d_k/2 - 1
    (x[2k], x[2k+1])  ->  (x[2k] cos - x[2k+1] sin,  x[2k] sin + x[2k+1] cos)

Source: Su et al., "RoFormer" (arXiv 2104.09864), equations 13 to 15; CS336 section 3.4.3, equation 8.
Convention: pairs are consecutive, (x0, x1), (x2, x3), ..., as in the paper and in Meta's Llama. Hugging Face pairs x[k]
with x[k + d_k/2]: the same rotation for permuted rows of the query and key weights.
Numerics: the table is float32 in a model of any dtype, computed in float64 (float32 is off by 3e-3 at position 131071).
A call with float64 inputs copies float64 frequencies from the host, synchronizes CUDA, and cannot be in a CUDA graph.
"""

import math

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from jaxtyping import Float, Shaped
from torch import Tensor, nn

__all__ = ["RotaryPositionalEmbedding", "apply_rope"]


def apply_rope(
    x: Float[Tensor, "*batch seq d_k"], angles: Float[Tensor, "*#batch seq d_k//2"]
) -> Float[Tensor, "*batch seq d_k"]:
    """Rotate each consecutive pair of `x` by its angle in radians: the 2x2 matrices of equation 8.

    `angles` broadcasts to the leading axes of `x`. Pass float64: float32 cannot hold the angles of far positions.
    Computes in float32 or wider and returns the dtype of `x`.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    rotation = rearrange(
        [cos, -sin, sin, cos], "(row column) ... -> ... row column", row=2
    )
    pairs = rearrange(x.to(dtype), "... (half pair) -> ... half pair", pair=2)
    rotated = einsum(
        rotation, pairs, "... half row column, ... half column -> ... half row"
    )
    return rearrange(rotated, "... half pair -> ... (half pair)").to(x.dtype)


class RotaryPositionalEmbedding(nn.Module):
    """Rotate queries or keys by their positions. All layers of a model share one instance.

    theta is the base of the wavelengths, d_k the head size, max_seq_len the number of positions in the table.
    `token_positions` counts tokens from 0 and broadcasts to the leading axes of `x`; None means 0 ... seq-1.
    Computes in float32 or wider and returns the dtype of `x`.

    Raises:
        ValueError: d_k is odd, a size below 1, or theta not positive and finite; a sequence is longer than the table;
            positions are not integers, or out of range (compiled: torch's own error; on CUDA: a device-side assert).
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
        if d_k < 2 or d_k % 2 or max_seq_len < 1:
            raise ValueError(
                f"d_k must be even and max_seq_len at least 1, got {d_k=}, {max_seq_len=}"
            )
        self.theta, self.d_k, self.max_seq_len = theta, d_k, max_seq_len
        shape = (max_seq_len, d_k // 2, 2)
        self.register_buffer(
            "cos_sin",
            torch.empty(shape, device=device, dtype=torch.float32),
            persistent=False,
        )
        self.reset_parameters()

    def frequencies(self) -> Float[Tensor, " half"]:
        """Return the angle in radians by which each pair turns per token, in float64. `super().__init__` calls this."""
        return self.theta ** (
            -torch.arange(0, self.d_k, 2, device="cpu", dtype=torch.float64) / self.d_k
        )

    def reset_parameters(self) -> None:
        """Compute the table."""
        if not self.cos_sin.is_meta:
            self.cos_sin.copy_(self._cos_sin(self._positions("cpu")))

    def forward(
        self,
        x: Float[Tensor, "*batch seq {self.d_k}"],
        token_positions: Shaped[Tensor, "*#batch seq"] | None = None,
    ) -> Float[Tensor, "*batch seq {self.d_k}"]:
        table, in_float64 = self.cos_sin, x.dtype == torch.float64
        if table.is_meta:  # as after load_state_dict(assign=True) into a model on meta
            table = self.to_empty(device=x.device).cos_sin
        if in_float64:  # select rows of positions, whose angles follow below
            table = self._positions(x.device)
        if token_positions is None:
            if x.shape[-2] > self.max_seq_len:
                raise ValueError(
                    f"a sequence of {x.shape[-2]} tokens is longer than max_seq_len={self.max_seq_len}"
                )
            rows = table[: x.shape[-2]]
        elif token_positions.dtype == torch.bool or token_positions.is_floating_point():
            raise ValueError(
                f"token_positions must be integers, got {token_positions.dtype}: use .long(), or mask="
            )
        else:
            try:  # an embedding checks the bounds on every device, also in compiled code, without synchronization
                rows = F.embedding(token_positions.long(), table.flatten(1)).unflatten(
                    -1, table.shape[1:]
                )
            except IndexError as error:
                raise ValueError(
                    f"token_positions must be 0 ... {self.max_seq_len - 1} (max_seq_len - 1)"
                ) from error
        cos_sin = self._cos_sin(rows) if in_float64 else rows
        pairs = (x if x.dtype == cos_sin.dtype else x.to(cos_sin.dtype)).unflatten(
            -1, (-1, 2)
        )  # faster than rearrange
        if (
            torch.compiler.is_compiling()
        ):  # inductor generates no code for complex numbers
            (even, odd), (cos, sin) = pairs.unbind(-1), cos_sin.unbind(-1)
            rotated = torch.stack(
                (even * cos - odd * sin, even * sin + odd * cos), dim=-1
            )
        else:
            try:
                numbers = torch.view_as_complex(pairs)
            except RuntimeError:  # the strides of x forbid a view, such as those of a slice at an odd offset
                numbers = torch.complex(*pairs.unbind(-1))
            rotated = torch.view_as_real(numbers * torch.view_as_complex(cos_sin))
        return (
            rotated.flatten(-2)
            if rotated.dtype == x.dtype
            else rotated.flatten(-2).to(x.dtype)
        )

    def extra_repr(self) -> str:
        return f"theta={self.theta}, d_k={self.d_k}, max_seq_len={self.max_seq_len}"

    def _positions(self, device: torch.device | str) -> Float[Tensor, "max_seq_len 1"]:
        return torch.arange(self.max_seq_len, device=device, dtype=torch.float64)[
            :, None
        ]

    def _cos_sin(
        self, positions: Float[Tensor, "*batch seq 1"]
    ) -> Float[Tensor, "*batch seq half pair"]:
        angles = positions * self.frequencies().view(self.d_k // 2).to(
            positions.device
        )  # view: one for each pair
        return torch.stack((angles.cos(), angles.sin()), dim=-1)

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        """Move the table to another device: never cast it to another dtype, nor leave it empty after `to_empty`."""
        table = self.cos_sin
        device = fn(table[:0]).device
        del self._buffers["cos_sin"]  # fn must not reach it
        super()._apply(fn, recurse)
        self._buffers["cos_sin"] = (
            torch.empty_like(table, device=device)
            if table.is_meta
            else table.to(device)
        )
        if table.is_meta:
            self.reset_parameters()
        return self
