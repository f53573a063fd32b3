"""RMSNorm: y = x / sqrt(mean(x^2) + eps) * weight, in float32 or wider, rounded once to the dtype of x.

Each test is a property of the layer. Its cases have names.
"""

import math

import pytest
import torch

from .checks import (
    DTYPES,
    EPS,
    HALVES,
    Cases,
    build,
    check_autocast,
    check_checkpointing,
    check_close,
    check_compiles,
    check_equation,
    check_function,
    check_function_rounds_once,
    check_initial_weights,
    check_on_cuda,
    check_placement,
    check_rejects_option,
    check_rounds_once,
    check_weight_names,
    construct,
    find,
    half_a_unit,
    randn,
)


def rms_norm(x, weight, eps=EPS):
    mean_square = (x * x).sum(-1, keepdim=True) / x.shape[-1]
    return x / (mean_square + eps) ** 0.5 * weight


CASES: Cases = {
    "two batch axes": {"shape": (2, 3, 7)},
    "more batch axes": {"shape": (2, 1, 4, 6)},
    "no batch axis": {"shape": (6,)},
    "one vector": {"shape": (1, 6)},
    "one component": {"shape": (3, 1)},
    "empty batch": {"shape": (0, 6)},
    "where eps counts": {"shape": (5, 33), "eps": 3e-6, "scale": 1e-3},
    "zeros": {"shape": (2, 8), "scale": 0.0},
    "squares beyond float16": {"shape": (64, 257), "scale": 12000.0},
}


def prepare(rmsnorm, shape, eps=EPS, scale=1.0):
    """Return a norm, its formula, and x."""
    norm = build(rmsnorm, "RMSNorm", shape[-1], eps=eps)

    def formula(x, weights):
        return rms_norm(x, weights["weight"], eps)

    return norm, formula, randn(*shape) * scale


def test_is_defined(rmsnorm):
    assert hasattr(rmsnorm, "RMSNorm"), "the file has no RMSNorm"


def test_weight_names(rmsnorm):
    check_weight_names(build(rmsnorm, "RMSNorm", 7), "weight")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_equation(rmsnorm, case, dtype):
    check_equation(*prepare(rmsnorm, **CASES[case]), dtype)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_equation_on_cuda(rmsnorm, case, dtype):
    check_on_cuda(*prepare(rmsnorm, **CASES[case]), dtype)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_rounds_once(rmsnorm, case, dtype):
    check_rounds_once(*prepare(rmsnorm, **CASES[case]), dtype)


SCALES = [1e-3, 1.0, 12000.0]


def with_gains_of(dtype, rmsnorm, x):
    """Return the result for gains of a dtype, in the dtype of x, and the exact result."""
    norm, _, _ = prepare(rmsnorm, x.shape)
    norm = norm.to(dtype)
    result = norm(x)
    assert result.dtype == x.dtype, f"result: got {result.dtype}, expected {x.dtype}"
    gains = norm.weight.detach().double()
    exact = rms_norm(x.double(), gains)
    return result, exact


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_gains_in_float32(rmsnorm, dtype, scale):
    """Under autocast, gains stay in float32. The result is rounded once."""
    x = (randn(64, 257) * scale).to(dtype)
    result, exact = with_gains_of(torch.float32, rmsnorm, x)
    check_close("result", result, exact, half_a_unit(exact, dtype))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_gains_in_a_half_for_x_in_float32(rmsnorm, dtype, scale):
    x = (randn(64, 257) * scale).float()
    result, exact = with_gains_of(dtype, rmsnorm, x)
    allowed = 16 * torch.finfo(torch.float32).eps * exact.abs()
    check_close("result", result, exact, allowed)


@pytest.mark.parametrize("case", CASES)
def test_autocast(rmsnorm, case):
    check_autocast(*prepare(rmsnorm, **CASES[case]))


def test_checkpointing(rmsnorm):
    check_checkpointing(*prepare(rmsnorm, (2, 3, 7)))


def test_compiles_to_one_graph(rmsnorm):
    norm = build(rmsnorm, "RMSNorm", 7)
    check_compiles(norm, lambda length: {"x": randn(2, length, 7)})


def test_device_and_dtype(rmsnorm):
    check_placement(rmsnorm, "RMSNorm", 7)


def test_initial_weights(rmsnorm):
    check_initial_weights(construct(rmsnorm, "RMSNorm", 7))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("d_model", 0),
        ("d_model", -3),
        ("eps", 0.0),
        ("eps", -1e-5),
        ("eps", math.nan),
        ("eps", math.inf),
    ],
)
def test_rejects_hyperparameters(rmsnorm, option, value):
    check_rejects_option(rmsnorm, "RMSNorm", {"d_model": 4}, option, value)


FUNCTION_CASES: Cases = {
    "two batch axes": {"shapes": [(2, 3, 7), (7,)], "eps": EPS},
    "no batch axis": {"shapes": [(7,), (7,)], "eps": 0.5},
    "more batch axes": {"shapes": [(2, 1, 3, 7), (7,)], "eps": 1e-3},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", FUNCTION_CASES)
def test_rms_norm(rmsnorm, case, dtype):
    function = find(rmsnorm, "rms_norm")
    check_function(function, rms_norm, dtype=dtype, **FUNCTION_CASES[case])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("case", FUNCTION_CASES)
def test_rms_norm_rounds_once(rmsnorm, case, dtype):
    function = find(rmsnorm, "rms_norm")
    options = FUNCTION_CASES[case]
    check_function_rounds_once(function, rms_norm, dtype=dtype, **options)
