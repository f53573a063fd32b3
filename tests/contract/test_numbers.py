"""The contract notices an error above rounding, and shows where it is."""

import re

import pytest
import torch
from torch import nn

from tinyblock.contract import checks, test_ffn

# Relative errors a little above the contract's tolerance.
SMALL = {
    torch.float64: 3e-12,
    torch.float32: 6e-6,
    torch.bfloat16: 0.05,
    torch.float16: 0.01,
}


def with_error(result, relative, wrong):
    """Return a result that is wrong by a share of itself, or whose gradient is."""
    error = relative * result
    if wrong == "gradient":
        error = error - error.detach()  # is 0, but has a gradient
    return result + error


@pytest.mark.parametrize("dtype", SMALL, ids=str)
@pytest.mark.parametrize("wrong", ["result", "gradient"])
def test_a_small_error_is_noticed(wrong, dtype):
    """A tenth of it is rounding."""
    case = test_ffn.TestFeedForward.cases["SwiGLU"]
    module = case.build(dtype=dtype)
    x, _ = case.arguments(dtype=dtype)
    case.check(with_error(module(x), SMALL[dtype] / 10, wrong), module, x, dtype)
    with pytest.raises(pytest.fail.Exception, match=rf"^{wrong} "):
        case.check(with_error(module(x), SMALL[dtype], wrong), module, x, dtype)


@pytest.mark.parametrize("wrong", ["result", "gradient"])
def test_a_failure_shows_the_wrong_number_and_the_right_one(wrong):
    case = test_ffn.TestFeedForward.cases["SwiGLU"]
    module = case.build(dtype=torch.float32)
    x, _ = case.arguments(dtype=torch.float32)
    twice = with_error(module(x), 1.0, wrong)
    with pytest.raises(pytest.fail.Exception) as failure:
        case.check(twice, module, x, torch.float32)
    got, expected = re.search(
        r"got (\S+), expected (\S+);", str(failure.value)
    ).groups()
    assert float(got) == pytest.approx(2 * float(expected), rel=1e-5)


def test_an_error_is_shown_where_it_is_largest():
    actual = torch.tensor([[1.0, 2.5], [3.0, 9.0]])
    expected = torch.tensor([[1.0, 2.5], [6.0, 5.0]], dtype=torch.float64)
    shown = "at [1, 1]: got 9, expected 5; the error's norm is 5, allowed 0.25"
    assert checks.error_of(actual, expected, allowed=0.25) == shown
    assert checks.error_of(actual, expected, allowed=5.0) == ""
    assert checks.error_of(actual * torch.nan, expected, allowed=5.0)
    assert checks.error_of(actual * torch.nan, expected * torch.nan, allowed=5.0) == ""


def test_a_layer_may_have_a_table_as_a_frozen_parameter():
    case = test_ffn.TestFeedForward.cases["SwiGLU"]
    module = case.build(dtype=torch.float32)
    module.table = nn.Parameter(torch.zeros(64), requires_grad=False)
    x, _ = case.arguments(dtype=torch.float32)
    case.check(module(x), module, x, torch.float32)
