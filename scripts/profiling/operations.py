"""Torch's operations: what they multiply, and what they read and change in part.

FLOPs are those of matrix products, convolutions, attention and recurrent layers: two
for each product of two numbers that is added to a sum. Everything else has none.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

Given = dict[str, Any]  # the arguments of an operation, by name
Count = Callable[[Given, Any], int]  # of the arguments and the result


@dataclass(frozen=True)
class Facts:
    """What is known of an operation.

    flops: None if nobody knows.
    touches: how many numbers of an argument are read or changed; others are touched whole.
    overwrites: it does not read what it changes.
    """

    flops: Count | None = None
    touches: dict[str, Count] = field(default_factory=dict)
    overwrites: bool = False


@dataclass(frozen=True)
class Flops:
    """How many FLOPs an operation takes, and in which dtype."""

    count: int
    dtype: torch.dtype


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of nested lists, tuples and dicts."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def flops_of(operation: str, given: Given, result: Any) -> Flops | None:
    """Return the FLOPs of a call of an operation, such as aten.mm; None if unknown."""
    count = facts_of(operation).flops
    if count is None:
        return None
    if count is nothing:
        return Flops(0, torch.float32)
    tensors = tensors_in(given)
    dtype = tensors[0].dtype.to_real()
    if dtype not in FLOATS or not all(map(_is_dense, tensors)):
        return None
    # A product of complex numbers takes four of real ones.
    parts = 4 if tensors[0].is_complex() else 1
    return Flops(parts * count(given, result), dtype)


@cache
def facts_of(operation: str) -> Facts:
    """Return what is known of an operation, such as aten.mm."""
    namespace, _, name = operation.partition(".")
    if namespace == "profiler":  # labels
        return Facts(nothing)
    if namespace != "aten":
        return Facts()
    if name in OPERATIONS:
        return OPERATIONS[name]
    if name.removesuffix("_") in OPERATIONS:  # the same, in place
        return OPERATIONS[name.removesuffix("_")]
    if TAKES_SHAPE.fullmatch(name):
        return without("self")
    return Facts(nothing) if multiplies_nothing(name) else Facts()


@cache
def multiplies_nothing(name: str) -> bool:
    """Say if an operation of torch is known to have no FLOPs.

    These are views, what torch tags as pointwise or as a reduction, and what is listed
    below as free; also in place, over lists, backward, and without checks.
    """
    form = name.strip("_").removeprefix("foreach_").removeprefix("unsafe_")
    forms = {name, form, name.removesuffix("_backward"), form.removesuffix("_backward")}
    for each in forms:
        listed = OPERATIONS.get(each) or OPERATIONS.get(f"{each}_")
        if each in FREE or FREE_FAMILIES.match(each):
            return True
        if listed and listed.flops is nothing:
            return True
        packet = getattr(torch.ops.aten, each, None)
        overloads = packet.overloads() if packet else []
        if any(_is_free(getattr(packet, overload)) for overload in overloads):
            return True
    return False


def _is_free(overload: OpOverload) -> bool:
    aliases = [each.alias_info for each in overload._schema.returns]
    is_view = any(alias and not alias.is_write for alias in aliases)
    tags = {torch.Tag.pointwise, torch.Tag.reduction}
    return is_view or bool(tags & set(overload.tags))


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested


def _matmul(left: str, right: str) -> Facts:
    def flops(given: Given, result: Any) -> int:
        """Each number of the left matrix meets each column of the right one."""
        other = given[right]
        columns = other.shape[-1] if other.ndim > 1 else 1
        return 2 * given[left].numel() * columns

    return Facts(flops, {"self": unless_beta_is_0} if left != "self" else {})


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


def nothing(given: Given, result: Any) -> int:
    return 0


def unless_beta_is_0(given: Given, result: Any) -> int:
    return given["self"].numel() if given.get("beta", 1) else 0


def for_gradient(argument: str, number: int) -> Count:
    """Read an argument of backward only for the gradient that stands at this place."""

    def numbers(given: Given, result: Any) -> int:
        return given[argument].numel() if given["output_mask"][number] else 0

    return numbers


def without(*names: str) -> Facts:
    """Take these arguments for their shapes, and read none of their numbers."""
    return Facts(nothing, dict.fromkeys(names, nothing))


def chosen(table: str) -> Facts:
    """Read a number of the table for each number of the result."""

    def numbers(given: Given, result: Any) -> int:
        return result.numel()

    return Facts(nothing, {table: numbers})


def as_many_as(other: str, *tables: str) -> Facts:
    """Touch as many numbers as another argument has."""

    def numbers(given: Given, result: Any) -> int:
        return given[other].numel()

    return Facts(nothing, dict.fromkeys(tables, numbers))


def _put(given: Given, result: Any) -> int:
    """Count what indices of axes select, or all that a mask may select."""
    table = given["self"]
    indices = [(axis, x) for axis, x in enumerate(given["indices"]) if x is not None]
    if any(index.dtype in (torch.bool, torch.uint8) for _, index in indices):
        return table.numel()
    selected = torch.broadcast_shapes(*[index.shape for _, index in indices]).numel()
    others = set(range(table.ndim)) - {axis for axis, _ in indices}
    return selected * prod(table.shape[axis] for axis in others)


def rows(table: str) -> Facts:
    """Touch a row of the table for each index."""

    def numbers(given: Given, result: Any) -> int:
        return given["indices"].numel() * given[table].shape[1:].numel()

    return Facts(nothing, {table: numbers})


ATTENTION = Facts(_attention)
OVERWRITES = Facts(nothing, overwrites=True)

OPERATIONS: dict[str, Facts] = {
    # They multiply.
    "mm": _matmul("self", "mat2"),
    "bmm": _matmul("self", "mat2"),
    "mv": _matmul("self", "vec"),
    "addmm": _matmul("mat1", "mat2"),
    "_addmm_activation": _matmul("mat1", "mat2"),
    "addmv": _matmul("mat", "vec"),
    "baddbmm": _matmul("batch1", "batch2"),
    "addbmm": _matmul("batch1", "batch2"),
    "dot": Facts(_dot),
    "vdot": Facts(_dot),
    "_grouped_mm": Facts(_grouped_matmul),
    "convolution": Facts(_convolution),
    "convolution_backward": Facts(
        _convolution,
        {"weight": for_gradient("weight", 0), "input": for_gradient("input", 1)},
    ),
    "_scaled_dot_product_flash_attention_for_cpu": ATTENTION,
    "_scaled_dot_product_flash_attention_for_cpu_backward": ATTENTION,
    "_scaled_dot_product_flash_attention": ATTENTION,
    "_scaled_dot_product_flash_attention_backward": ATTENTION,
    "_scaled_dot_product_efficient_attention": ATTENTION,
    "_scaled_dot_product_efficient_attention_backward": ATTENTION,
    "_scaled_dot_product_cudnn_attention": ATTENTION,
    "_scaled_dot_product_cudnn_attention_backward": ATTENTION,
    "mkldnn_rnn_layer": Facts(_recurrent_layer),
    "mkldnn_rnn_layer_backward": Facts(  # 3 and 4 are biases
        _recurrent_layer, {"weight3": nothing, "weight4": nothing, "hy_": nothing}
    ),
    "_cudnn_rnn": Facts(_recurrent_layer),
    "_cudnn_rnn_backward": Facts(_recurrent_layer),
    "_transformer_encoder_layer_fwd": Facts(_encoder_layer),
    "_native_multi_head_attention": Facts(_encoder_layer),
    # They choose from a table.
    "embedding": chosen("weight"),
    "gather": chosen("self"),
    "index": chosen("self"),
    "_unsafe_index": chosen("self"),
    "index_select": chosen("self"),
    "take": chosen("self"),
    "_embedding_bag": rows("weight"),
    "_embedding_bag_forward_only": rows("weight"),
    "_embedding_bag_per_sample_weights_backward": rows("weight"),
    # They change a table in part. Out of place, they copy all of it.
    "embedding_renorm_": rows("self"),
    "index_add_": as_many_as("source", "self"),
    "index_copy_": replace(as_many_as("source", "self"), overwrites=True),
    "index_put_": Facts(nothing, {"self": _put}),
    "_index_put_impl_": Facts(nothing, {"self": _put}),
    "index_reduce_": as_many_as("source", "self"),
    "put_": as_many_as("index", "self"),
    "scatter_": as_many_as("index", "self", "src"),
    "scatter_add_": as_many_as("index", "self", "src"),
    "scatter_reduce_": as_many_as("index", "self", "src"),
    # They take arguments for their shapes.
    "fill": without("self"),
    "nll_loss_backward": without("self"),
    "nll_loss2d_backward": without("self"),
    "native_layer_norm_backward": without("bias"),
    # They overwrite what they change.
    "copy_": OVERWRITES,
    "fill_": OVERWRITES,
    "masked_fill_": OVERWRITES,
    "zero_": OVERWRITES,
    "bernoulli_": OVERWRITES,
    "exponential_": OVERWRITES,
    "normal_": OVERWRITES,
    "random_": OVERWRITES,
    "uniform_": OVERWRITES,
}
# They take an argument `self` for its shape, too.
TAKES_SHAPE = re.compile(r"new_.*|.*_like|.*(pool|pad)\dd.*_backward")
# Pools, pads, and what samples images multiply nothing.
FREE_FAMILIES = re.compile(r".*(pool|pad)\dd|upsample_|grid_sampler_\dd")
# They multiply nothing, and no rule of torch says so.
FREE = {
    # They copy, and put together.
    *["to_copy", "cat", "stack", "repeat", "repeat_interleave", "roll", "flip"],
    *["constant_pad_nd", "im2col", "col2im", "pixel_shuffle", "pixel_unshuffle"],
    *["pack_padded_sequence", "to_dense", "to_sparse"],
    # They choose.
    *["embedding_dense", "embedding_bag_dense", "masked_select", "masked_scatter"],
    *["tril", "triu", "sort", "topk", "nonzero", "unique2", "histc"],
    *["bucketize", "searchsorted", "index_fill"],
    # They make.
    *["empty", "empty_strided", "full", "arange", "zeros", "ones", "eye", "linspace"],
    *["scalar_tensor", "rand", "randn", "randint", "randperm", "multinomial"],
    *["native_dropout"],
    # They sum along axes, and normalize.
    *["cumsum", "cumprod", "softmax", "log_softmax", "safe_softmax", "masked_softmax"],
    *["softmax_backward_data", "log_softmax_backward_data", "native_layer_norm"],
    *["native_group_norm", "native_batch_norm", "cudnn_batch_norm", "fused_rms_norm"],
    *["weight_norm_interface"],
    # They are pointwise without the tag.
    *["glu", "prelu_kernel", "hardswish", "log_sigmoid", "log_sigmoid_forward"],
    *["floor_divide"],
    *["thnn_fused_lstm_cell", "thnn_fused_lstm_cell_backward_impl"],
    *["thnn_fused_gru_cell"],
    # They are losses, and steps of optimizers.
    *["nll_loss", "nll_loss_forward", "nll_loss2d", "nll_loss2d_forward", "mse_loss"],
    *["smooth_l1_loss", "huber_loss", "binary_cross_entropy", "ctc_loss"],
    *["binary_cross_entropy_with_logits", "fused_adamw", "fused_adam", "fused_sgd"],
    # They return a number to Python.
    *["local_scalar_dense"],
}
# The dtypes whose matmul rate can be measured.
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
