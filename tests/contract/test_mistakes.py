"""What Case.check notices: small errors, and usual mistakes by their name."""

import importlib
import re
from collections import defaultdict

import pytest
import torch

from tinyblock.contract import target
from tinyblock.contract.checks import name_of


def page_of(layer):
    return importlib.import_module(f"tinyblock.contract.test_{layer}")


def cases_with_mistakes():
    """Return the common cases by their class or function, and each of their mistakes.

    Not each of the cases shows its mistake.
    """
    found = defaultdict(list)
    for layer in ("rmsnorm", "ffn", "rope", "attention", "block"):
        for case in page_of(layer).CASES.values():
            if case.is_common:
                for mistake in case.mistakes:
                    found[case.name, mistake].append(case)
    return found


CASES_WITH = cases_with_mistakes()


@pytest.mark.parametrize(
    ("name", "mistake"), CASES_WITH, ids=[": ".join(names) for names in CASES_WITH]
)
def test_the_first_case_that_shows_a_mistake_names_it(name, mistake):
    target.select(target.ABOVE)  # test tinyblock's own layers
    for case in CASES_WITH[name, mistake]:
        module = case.build(dtype=torch.float32)
        x, _ = case.arguments(dtype=torch.float32)
        right = case.exact(module, x)
        wrong = case.exact(module, x, case.mistakes[mistake])
        if not torch.allclose(wrong, right):
            break
    else:
        pytest.fail("no case shows this mistake")
    message = rf"^{re.escape(mistake)}: result in float32 at "
    with pytest.raises(pytest.fail.Exception, match=message):
        case.check(wrong.float(), module, x, torch.float32)


# Relative errors a little above the contract's tolerance.
SMALL = {
    torch.float64: 3e-12,
    torch.float32: 6e-6,
    torch.bfloat16: 0.05,
    torch.float16: 0.01,
}


@pytest.mark.parametrize("dtype", SMALL, ids=name_of)
@pytest.mark.parametrize("wrong", ["result", "gradient"])
def test_a_small_error_is_noticed(wrong, dtype):
    target.select(target.ABOVE)
    case = page_of("ffn").CASES["SwiGLU"]
    module = case.build(dtype=dtype)
    x, _ = case.arguments(dtype=dtype)
    result = module(x)
    error = SMALL[dtype] * result
    if wrong == "gradient":
        error = error - error.detach()  # is 0, but has a gradient
    message = f"^{wrong} .*in {name_of(dtype)} at"
    with pytest.raises(pytest.fail.Exception, match=message):
        case.check(result + error, module, x, dtype)


def test_an_error_that_changes_no_sum_is_noticed():
    """Nor does its gradient, so a check of `result.sum()` alone would not notice it."""
    target.select(target.ABOVE)
    case = page_of("ffn").CASES["SwiGLU"]
    module = case.build(dtype=torch.float32)
    x, _ = case.arguments(dtype=torch.float32)
    result = module(x)
    error = 1e-3 * (result - result.mean())
    error = error - error.detach()
    with pytest.raises(pytest.fail.Exception, match=r"^gradient of x in float32 at"):
        case.check(result + error, module, x, torch.float32)
