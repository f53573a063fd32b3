"""The contract names each usual mistake of a student in the first case that shows it."""

import importlib
import re

import pytest
import torch

from tinyblock.contract import target

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
