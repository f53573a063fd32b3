"""The FLOPs of torch's operations, by formulas that can be checked by hand.

FLOPs are those of matrix products, convolutions, attention and recurrent layers: two
for each product of two numbers that is added to a sum. Everything else has none.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .tensors import tensors_in

Given = dict[str, Any]  # the arguments of an operation, by name


@dataclass(frozen=True)
class Flops:
    """How many FLOPs an operation takes, and in which dtype."""

    count: int
    dtype: torch.dtype


def flops_of(operation: str, given: Given, result: Any) -> Flops | None:
    """Return the FLOPs of a call of an operation, such as aten.mm; None if unknown."""
    namespace, _, name = operation.partition(".")
    formula = _FORMULAS.get(name)
    if namespace not in _TORCHS:
        return None
    tensors = tensors_in(given)
    if formula is None:
        known = not _MULTIPLIES.search(name)
        return Flops(0, torch.float32) if known else None
    dtype = tensors[0].dtype.to_real()
    if dtype not in FLOATS or not all(map(_is_dense, tensors)):
        return None
    # A product of complex numbers takes four of real ones.
    parts = 4 if tensors[0].is_complex() else 1
    return Flops(parts * formula(given, result), dtype)


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested


def _matmul(left: str, right: str) -> Callable[[Given, Any], int]:
    def flops(given: Given, result: Any) -> int:
        """Each number of the left matrix meets each column of the right one."""
        other = given[right]
        columns = other.shape[-1] if other.ndim > 1 else 1
        return 2 * given[left].numel() * columns

    return flops


def _dot(given: Given, result: Any) -> int:
    return 2 * given["self"].numel()


def _grouped_matmul(given: Given, result: Any) -> int:
    """A product for each group. The groups share out one axis, up to the last offset.

    (rows, d) @ (groups, d, n) splits the rows, (m, rows) @ (rows, n) what is summed, and
    (groups, m, d) @ (d, columns) the columns.
    """
    left, right, ends = given["self"], given["mat2"], given.get("offs")
    if ends is None:
        return 2 * left.numel() * right.shape[-1]
    split = int(ends[-1])
    if left.ndim == 3:
        return 2 * left[0].numel() * split
    rows = left.shape[0] if right.ndim == 2 else split
    summed = split if right.ndim == 2 else left.shape[1]
    return 2 * rows * summed * right.shape[-1]


def _convolution(given: Given, result: Any) -> int:
    """Each weight is used once for each position; groups share out the weights.

    Positions are those of the output or, if it is transposed, of the input. Backward
    takes as much again for each of two gradients.
    """
    output = given.get("grad_output", result)
    counted = given["input"] if given["transposed"] else output
    positions = counted.shape[0] * counted.shape[2:].numel()
    gradients = sum(given["output_mask"][:2]) if "output_mask" in given else 1
    return gradients * 2 * positions * given["weight"].numel()


def _attention(given: Given, result: Any) -> int:
    """Two products for each score that is needed.

    Backward has twice as many, and what a kernel computes again is not counted.
    """
    q, k, v = (given[name].shape for name in ("query", "key", "value"))
    pairs = q[-2] * k[-2]
    if given.get("is_causal"):
        pairs = sum(min(query + 1, k[-2]) for query in range(q[-2]))
    passes = 2 if "logsumexp" in given else 1
    return passes * 2 * q[:-2].numel() * pairs * (q[-1] + v[-1])


def _recurrent_layer(given: Given, result: Any) -> int:
    """Each token meets each weight; in backward, for two gradients."""
    weights = [value for name, value in given.items() if name.startswith("weight")]
    matrices = [each for each in tensors_in(weights) if each.ndim == 2]
    passes = 2 if "grad_output" in given else 1
    tokens = given["input"].shape[:-1].numel()
    return passes * 2 * tokens * sum(each.numel() for each in matrices)


def _encoder_layer(given: Given, result: Any) -> int:
    """Each token meets each weight, and attention meets all tokens of its sequence."""
    x = tensors_in(given)[0]
    weights = [value for name, value in given.items() if "weight" in name]
    matrices = [each for each in tensors_in(weights) if each.ndim == 2]
    scores_and_values = 2 * x.shape[-2] * given["embed_dim"]
    per_token = sum(each.numel() for each in matrices) + scores_and_values
    return 2 * x.shape[:-1].numel() * per_token


_FORMULAS: dict[str, Callable[[Given, Any], int]] = {
    "mm": _matmul("self", "mat2"),
    "bmm": _matmul("self", "mat2"),
    "mv": _matmul("self", "vec"),
    "addmm": _matmul("mat1", "mat2"),
    "_addmm_activation": _matmul("mat1", "mat2"),
    "addmv": _matmul("mat", "vec"),
    "baddbmm": _matmul("batch1", "batch2"),
    "addbmm": _matmul("batch1", "batch2"),
    "dot": _dot,
    "vdot": _dot,
    "_grouped_mm": _grouped_matmul,
    "convolution": _convolution,
    "convolution_backward": _convolution,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention,
    "_scaled_dot_product_flash_attention": _attention,
    "_scaled_dot_product_flash_attention_backward": _attention,
    "_scaled_dot_product_efficient_attention": _attention,
    "_scaled_dot_product_efficient_attention_backward": _attention,
    "_scaled_dot_product_cudnn_attention": _attention,
    "_scaled_dot_product_cudnn_attention_backward": _attention,
    "mkldnn_rnn_layer": _recurrent_layer,
    "mkldnn_rnn_layer_backward": _recurrent_layer,
    "_cudnn_rnn": _recurrent_layer,
    "_cudnn_rnn_backward": _recurrent_layer,
    "_transformer_encoder_layer_fwd": _encoder_layer,
    "_native_multi_head_attention": _encoder_layer,
}
for _name in ("mm", "bmm", "addmm", "addmv", "baddbmm", "addbmm"):  # in place
    _FORMULAS[f"{_name}_"] = _FORMULAS[_name]
# The dtypes whose matmul rate can be measured.
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_TORCHS = ("aten", "prims", "profiler")  # other operations may do anything
# Operations of torch that multiply matrices, or do what FLOPs are no measure of.
_MULTIPLIES = re.compile(
    r"^(?!_thnn).*("  # a recurrent cell between its matrix products
    r"m[mv](_|$)|matmul|gemm|dot|linear(?!\dd)|conv(?!ert)|attention|encoder|addr"
    r"|lstm|gru|rnn|[cp]dist|fft"
    r"|linalg(?!_check_errors|_vector_norm|__powsum|_cross|_diagonal)"
    r"|solve|cholesky|(^|_)lu_|qr(?!t)|svd|eig(?!ht)|matrix_exp)"
)
