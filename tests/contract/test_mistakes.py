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


# The cases that every correct layer takes, by the class or function and its mistake.
SHOWN_BY = defaultdict(list)
for layer in ("rmsnorm", "ffn", "rope", "attention", "block"):
    for case in page_of(layer).CASES.values():
        if case.is_common:
            for mistake in case.mistakes:
                SHOWN_BY[case.name, mistake].append(case)


@pytest.mark.parametrize(
    ("name", "mistake"), SHOWN_BY, ids=[": ".join(names) for names in SHOWN_BY]
)
def test_the_first_case_that_shows_a_mistake_names_it(name, mistake):
    target.select(target.ABOVE)
    for case in SHOWN_BY[name, mistake]:
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


# Relative errors of a few roundings.
SMALL = {
    torch.float64: 1e-11,
    torch.float32: 1e-5,
    torch.bfloat16: 0.05,
    torch.float16: 0.01,
}


@pytest.mark.parametrize("dtype", SMALL, ids=str)
@pytest.mark.parametrize("wrong", ["result", "gradient"])
def test_an_error_of_a_few_roundings_is_noticed(wrong, dtype):
    target.select(target.ABOVE)
    case = page_of("ffn").CASES["SwiGLU"]
    module = case.build(dtype=dtype)
    x, _ = case.arguments(dtype=dtype)
    result = module(x)
    error = SMALL[dtype] * result
    if wrong == "gradient":
        error = error - error.mean()  # so that the gradient of a sum is right
        error = error - error.detach()
    message = f"^{wrong} .*in {name_of(dtype)} at"
    with pytest.raises(pytest.fail.Exception, match=message):
        case.check(result + error, module, x, dtype)
