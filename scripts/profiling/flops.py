"""The FLOPs of torch's operations, by formulas that can be checked by hand.

FLOPs are those of matrix products, convolutions, attention and recurrent layers: two
for each product of two numbers that is added to a sum. Everything else has none.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

Given = dict[str, Any]  # the arguments of an operation, by name


@dataclass(frozen=True)
class Flops:
    """How many FLOPs an operation takes, and in which dtype."""

    count: int
    dtype: torch.dtype


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of nested lists, tuples and dicts."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def flops_of(operation: str, given: Given, result: Any) -> Flops | None:
    """Return the FLOPs of a call of an operation, such as aten.mm; None if unknown."""
    namespace, _, name = operation.partition(".")
    if namespace == "profiler":  # labels
        return Flops(0, torch.float32)
    if namespace != "aten":
        return None
    formula = _FORMULAS.get(name)
    if formula is None:
        return Flops(0, torch.float32) if multiplies_nothing(name) else None
    tensors = tensors_in(given)
    dtype = tensors[0].dtype.to_real()
    if dtype not in FLOATS or not all(map(_is_dense, tensors)):
        return None
    # A product of complex numbers takes four of real ones.
    parts = 4 if tensors[0].is_complex() else 1
    return Flops(parts * formula(given, result), dtype)


@cache
def multiplies_nothing(name: str) -> bool:
    """Say if an operation of torch is known to have no FLOPs.

    These are views, what torch tags as pointwise or as a reduction, and what
    `_WITHOUT_PRODUCTS` lists. An operation that is in neither is unknown.
    """
    form = _form(name)
    if form in _WITHOUT_PRODUCTS:
        return True
    overloads = [
        getattr(packet, overload)
        for packet in (getattr(torch.ops.aten, each, None) for each in (name, form))
        if packet is not None
        for overload in packet.overloads()
    ]
    return any(_is_view(each) or _NO_FLOPS & set(each.tags) for each in overloads)


def _form(name: str) -> str:
    """Return what an operation is called in all dimensions, also in place and backward."""
    for dimensions in ("1d", "2d", "3d"):
        name = name.replace(dimensions, "")
    name = name.strip("_").removeprefix("foreach_").removesuffix("_backward")
    return name.rstrip("_")


def _is_view(overload: OpOverload) -> bool:
    aliases = [each.alias_info for each in overload._schema.returns]
    return any(alias and not alias.is_write for alias in aliases)


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
_NO_FLOPS = {torch.Tag.pointwise, torch.Tag.reduction}
# A list, because no rule of torch says it: its `core` operations contain _cdist_forward and
# _foreach_mm, those that it decomposes _trilinear, and those that draw numbers flash attention.
_WITHOUT_PRODUCTS = {
    # They copy, and put together.
    *["copy", "to_copy", "lift_fresh_copy", "clone", "cat", "stack", "repeat"],
    *["repeat_interleave", "block_diag", "unsafe_view", "unsafe_split"],
    *["unsafe_split_with_sizes", "chunk_cat", "set", "resize", "pin_memory"],
    *["copy_from_and_resize", "to_dense", "to_sparse", "coalesce"],
    *["sparse_coo_tensor_with_dims_and_tensors", "sparse_mask", "transpose", "squeeze"],
    *["unsqueeze", "t", "detach", "roll", "flip", "rot90", "pixel_shuffle"],
    *["pixel_unshuffle", "channel_shuffle", "im2col", "col2im", "constant_pad_nd"],
    *["reflection_pad", "replication_pad", "unfold", "select", "slice", "diagonal"],
    *["diagonal_scatter", "select_scatter", "slice_scatter", "as_strided_scatter"],
    *["pack_padded_sequence", "pad_packed_sequence", "complex", "polar"],
    *["cudnn_rnn_flatten_weight"],
    # They choose.
    *["index", "unsafe_index", "index_select", "index_put", "index_put_impl"],
    *["unsafe_index_put", "index_add", "index_copy", "index_fill", "index_reduce"],
    *["gather", "scatter", "scatter_add", "scatter_reduce", "take", "put"],
    *["masked_select", "masked_scatter", "masked_fill", "embedding", "embedding_dense"],
    *["embedding_renorm", "embedding_bag", "embedding_bag_forward_only"],
    *["embedding_bag_dense", "embedding_bag_per_sample_weights", "nonzero"],
    *["nonzero_static", "isin", "where", "tril", "triu", "trace", "diag_embed", "sort"],
    *["topk", "kthvalue", "median", "nanmedian", "mode", "unique2", "unique_dim"],
    *["unique_consecutive", "cummax", "cummin", "cummax_helper", "cummin_helper"],
    *["aminmax", "searchsorted", "bucketize", "bincount", "histc", "histogram"],
    # They make.
    *["arange", "range", "linspace", "logspace", "eye", "empty", "empty_like"],
    *["empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "full"],
    *["full_like", "new_full", "fill", "ones", "ones_like", "new_ones", "zeros"],
    *["zeros_like", "new_zeros", "zero", "efficientzerotensor", "scalar_tensor"],
    *["tril_indices", "triu_indices", "hann_window", "hamming_window", "rand"],
    *["rand_like", "randn", "randn_like", "randint", "randint_like", "randperm"],
    *["random", "normal", "normal_functional", "uniform", "bernoulli", "exponential"],
    *["geometric", "cauchy", "log_normal", "poisson", "binomial", "multinomial"],
    *["standard_gamma", "standard_gamma_grad", "sample_dirichlet", "dirichlet_grad"],
    *["native_dropout", "fused_dropout", "masked_scale"],
    # They sum along axes, and normalize.
    *["cumsum", "cumprod", "logcumsumexp", "segment_reduce", "softmax", "log_softmax"],
    *["safe_softmax", "masked_softmax", "softmax_backward_data"],
    *["log_softmax_backward_data", "native_batch_norm", "native_batch_norm_legit"],
    *["native_batch_norm_legit_no_training", "native_batch_norm_legit_functional"],
    *["batch_norm_no_update", "batch_norm_with_update", "batch_norm"],
    *["cudnn_batch_norm", "miopen_batch_norm", "batch_norm_stats", "batch_norm_elemt"],
    *["batch_norm_gather_stats_with_counts", "batch_norm_backward_reduce"],
    *["batch_norm_backward_elemt", "native_group_norm", "native_layer_norm"],
    *["fused_rms_norm", "weight_norm_interface", "renorm", "dist", "linalg_cross"],
    *["transform_bias_rescale_qkv"],
    # They pool, and interpolate between neighbors.
    *["avg_pool", "adaptive_avg_pool", "max_pool_with_indices", "adaptive_max_pool"],
    *["fractional_max_pool", "max_unpool", "mkldnn_max_pool", "upsample_nearest"],
    *["upsample_nearest_exact", "upsample_linear", "upsample_bilinear"],
    *["upsample_bicubic", "upsample_trilinear", "upsample_bilinear_aa"],
    *["upsample_bicubic_aa", "grid_sampler", "cudnn_grid_sampler"],
    # They are pointwise, without the tag.
    *["glu", "prelu_kernel", "rrelu_with_noise", "log_sigmoid", "log_sigmoid_forward"],
    *["hardswish", "floor_divide", "thnn_fused_lstm_cell"],
    *["thnn_fused_lstm_cell_backward_impl", "thnn_fused_gru_cell"],
    *["fake_quantize_per_tensor_affine_cachemask"],
    *["fake_quantize_per_channel_affine_cachemask", "quantize_per_tensor"],
    *["quantize_per_channel", "dequantize", "int_repr"],
    # They are losses.
    *["binary_cross_entropy", "binary_cross_entropy_with_logits", "ctc_loss"],
    *["cudnn_ctc_loss", "huber_loss", "mse_loss", "smooth_l1_loss", "soft_margin_loss"],
    *["multi_margin_loss", "multilabel_margin_loss", "multilabel_margin_loss_forward"],
    *["nll_loss", "nll_loss_forward"],
    # They step an optimizer.
    *["fused_adagrad", "fused_adam", "fused_adamw", "fused_sgd"],
    *["amp_foreach_non_finite_check_and_unscale", "amp_update_scale"],
    # They ask, and compute no number.
    *["local_scalar_dense", "allclose", "is_all_true", "is_any_true", "assert_async"],
    *["assert_tensor_metadata", "linalg_check_errors", "is_same_size", "record_stream"],
    *["fused_sdp_choice", "use_cudnn_ctc_loss", "cudnn_init_dropout_state"],
    *["has_same_storage_numel", "nested_tensor_size", "is_pinned", "is_coalesced"],
}
