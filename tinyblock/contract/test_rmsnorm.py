"""RMSNorm: y = x / sqrt(mean(x^2) + eps) * weight.

It computes in float32 or wider, and rounds once to the dtype of x.
"""

import math

import pytest
import torch

from .checks import EPS, Case, check_close
from .every_layer import (  # noqa: F401  with the tables of this page
    test_any_strides,
    test_built_on_meta,
    test_built_on_the_default_device,
    test_calls_change_nothing,
    test_compiles_to_one_graph,
    test_equation,
    test_equation_under_autocast,
    test_initial_weights,
    test_later_tokens_change_nothing,
    test_layer_is_defined,
    test_rejects_option,
    test_reset_parameters,
    test_rounds_once,
)


def rms_norm(x, weight, eps=EPS):
    mean_square = (x * x).sum(-1, keepdim=True) / x.shape[-1]
    return x / (mean_square + eps) ** 0.5 * weight


def of_weights(x, weights, d_model, eps):
    return rms_norm(x, weights["weight"], eps)


def with_eps_outside(x, weights, d_model, eps):
    root = (x * x).mean(-1, keepdim=True).sqrt()
    return x / (root + eps) * weights["weight"]


def with_a_sum(x, weights, d_model, eps):
    root = d_model**0.5
    return rms_norm(root * x, weights["weight"] / root, eps)


def with_a_mean_over_tokens(x, weights, d_model, eps):
    axis = -2 if x.ndim > 1 else -1  # a vector has no axis of tokens
    mean_square = (x * x).mean(axis, keepdim=True)
    return x / (mean_square + eps).sqrt() * weights["weight"]


def with_a_mean_over_all_axes(x, weights, d_model, eps):
    mean_square = (x * x).mean()
    return x / (mean_square + eps).sqrt() * weights["weight"]


def without_a_root(x, weights, d_model, eps):
    normed = rms_norm(x, 1, eps)
    return normed * (normed / x) * weights["weight"]


MISTAKES = {
    "eps is missing": lambda x, weights, d_model, eps: of_weights(
        x, weights, d_model, eps=0
    ),
    "eps is not the one that is passed": lambda x, weights, d_model, eps: of_weights(
        x, weights, d_model, eps=EPS
    ),
    "eps is added to the root, not below it": with_eps_outside,
    "the gains are missing": lambda x, weights, d_model, eps: rms_norm(x, 1, eps),
    "the mean is subtracted, as in LayerNorm": lambda x, weights, d_model, eps: (
        of_weights(x - x.mean(-1, keepdim=True), weights, d_model, eps)
    ),
    "the sum is not divided by d_model": with_a_sum,
    "the root is missing": without_a_root,
    "the mean is over the tokens in place of d_model": with_a_mean_over_tokens,
    "the mean is over all axes in place of d_model": with_a_mean_over_all_axes,
}


def case(*shape, eps=EPS, scale=1.0, is_common=True):
    return Case(
        "rmsnorm",
        "RMSNorm",
        of_weights,
        shape,
        options={"d_model": shape[-1], "eps": eps},
        scale=scale,
        rounds_once=True,
        is_common=is_common,
        mistakes=MISTAKES,
    )


CASES = {
    "two batch axes": case(2, 7, 6),
    "no batch axis": case(6, is_common=False),
    "empty batch": case(0, 6, is_common=False),
    "where eps matters": case(1, 5, 33, eps=3e-6, scale=1e-3),
    "squares beyond float16": case(2, 32, 257, scale=12000.0),
    "function": Case(
        "rmsnorm",
        "rms_norm",
        rms_norm,
        shape=(2, 3, 7),
        options={"eps": 0.5},
        weights=[(7,)],
        rounds_once=True,
    ),
}
TYPICAL = ["two batch axes"]
REJECTED = {"eps": (0.0, math.nan, math.inf), "d_model": (0,)}


@pytest.mark.parametrize(
    ("dtype", "of_gains"),
    [
        (torch.float16, torch.float32),  # as under autocast
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float16),
        (torch.float32, torch.float64),
        (torch.float64, torch.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["where eps matters", "squares beyond float16"])
def test_gains_of_another_dtype(name, dtype, of_gains, device):
    """The dtype of the result is the dtype of x, and there is one rounding."""
    case = CASES[name]
    norm = case.build(device, of_gains)
    x, _ = case.arguments(device, dtype)
    result = norm(x)
    assert result.dtype == dtype
    exact = case.exact(norm, x)
    one_rounding = 0.25 * torch.finfo(dtype).eps
    wide = torch.promote_types(dtype, torch.float32)
    roundings_in_wide = 8 * torch.finfo(wide).eps
    allowed = (one_rounding + roundings_in_wide) * exact.norm()
    check_close("result", result, exact, allowed)
