"""An error a little above rounding is noticed, and shown with the right number."""

import re

import pytest
import torch
from torch import nn

from tinyblock.contract import test_ffn

CASE = test_ffn.TestFeedForward.cases["SwiGLU"]
# Relative errors a little above the contract's tolerance.
SMALL = {
    torch.float64: 3e-12,
    torch.float32: 6e-6,
    torch.bfloat16: 0.05,
    torch.float16: 0.01,
}


def check_with_error(relative, wrong, dtype):
    """Check a result that is wrong by a share of itself, or whose gradient is."""
    module = CASE.build(dtype=dtype)
    # A layer may have a table as a frozen parameter.
    module.table = nn.Parameter(torch.zeros(64), requires_grad=False)
    x, _ = CASE.arguments(dtype=dtype)
    result = module(x)
    error = relative * result
    if wrong == "gradient":
        error = error - error.detach()  # is 0, but has a gradient
    CASE.check(result + error, module, x, dtype)


@pytest.mark.parametrize("dtype", SMALL, ids=str)
@pytest.mark.parametrize("wrong", ["result", "gradient"])
def test_a_small_error_is_noticed(wrong, dtype):
    """A tenth of it is rounding."""
    check_with_error(SMALL[dtype] / 10, wrong, dtype)
    with pytest.raises(pytest.fail.Exception, match=rf"^{wrong} ") as failure:
        check_with_error(SMALL[dtype], wrong, dtype)
    assert not failure.value.pytrace  # the message alone is shown


@pytest.mark.parametrize("wrong", ["result", "gradient"])
def test_a_failure_shows_where_the_error_is_largest(wrong):
    """Of twice the right numbers, the error is largest where the numbers are."""
    with pytest.raises(pytest.fail.Exception) as failure:
        check_with_error(1.0, wrong, torch.float32)
    exact, gradients = CASE.exact_with_gradients(CASE.build(), CASE.arguments()[0])
    expected = exact if wrong == "result" else gradients["x"]
    largest = expected.abs() == expected.abs().max()
    at = largest.nonzero()[0].tolist()
    pattern = r"at (\[.*\]): got (\S+), expected (\S+); the error's norm is (\S+),"
    where, *numbers = re.search(pattern, str(failure.value)).groups()
    assert where == str(at)
    number = float(expected[largest])
    right = [2 * number, number, float(expected.norm())]
    assert [float(each) for each in numbers] == pytest.approx(right, rel=0.05)
