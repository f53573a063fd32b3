"""What Case.check notices: small errors, and usual mistakes by their name."""

import importlib
import re

import pytest
import torch

from tinyblock.contract import target
from tinyblock.contract.checks import name_of

LAYERS = ("rmsnorm", "ffn", "rope", "attention", "block")


def cases_of(layer):
    """Return the cases that every correct layer takes, each with its mistakes."""
    page = importlib.import_module(f"tinyblock.contract.test_{layer}")
    return [case for case in page.CASES.values() if case.is_common]


MISTAKES = dict.fromkeys(
    (layer, case.name, mistake)
    for layer in LAYERS
    for case in cases_of(layer)
    for mistake in case.mistakes
)


@pytest.mark.parametrize(("layer", "name", "mistake"), MISTAKES)
def test_the_first_case_that_shows_a_mistake_names_it(layer, name, mistake):
    target.select(target.ABOVE)
    for case in cases_of(layer):
        if case.name != name or mistake not in case.mistakes:
            continue
        module = case.build(dtype=torch.float32)
        x, _ = case.arguments(dtype=torch.float32)
        right, _ = case.exact(module, x)
        wrong, _ = case.exact(module, x, case.mistakes[mistake])
        if not torch.allclose(wrong, right):
            message = rf"^{re.escape(mistake)}: result in float32 at "
            with pytest.raises(pytest.fail.Exception, match=message):
                case.check(wrong.float(), module, x, torch.float32)
            return
    pytest.fail("no case shows this mistake")


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
    case = cases_of("ffn")[0]
    module = case.build(dtype=dtype)
    x, _ = case.arguments(dtype=dtype)
    result = module(x)
    error = SMALL[dtype] * result
    if wrong == "gradient":
        error = error - error.detach()
    with pytest.raises(
        pytest.fail.Exception, match=f"^{wrong} .*in {name_of(dtype)} at"
    ):
        case.check(result + error, module, x, dtype)
