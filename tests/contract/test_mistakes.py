"""What Case.check notices: small errors, wrong weights, and usual mistakes by their name."""

import importlib
import re
from collections import defaultdict

import pytest
import torch
from torch import nn

from tinyblock.contract import target
from tinyblock.contract.checks import Weights, error_of, name_of


def page_of(layer):
    return importlib.import_module(f"tinyblock.contract.test_{layer}")


def prepared(layer, title, dtype):
    """Return a case of a page, tinyblock's own layer, and the x that it is called with."""
    target.select(target.ABOVE)
    case = page_of(layer).CASES[title]
    x, _ = case.arguments(dtype=dtype)
    return case, case.build(dtype=dtype), x


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


@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float64, 1e-10), (torch.float32, 1e-5)]
)
def test_a_small_error_has_no_name_of_a_mistake(dtype, error):
    """In this case, some mistakes in eps change as little, or nothing."""
    case, module, x = prepared("rmsnorm", "two batch axes", dtype)
    with pytest.raises(pytest.fail.Exception, match=r"^result in "):
        case.check(module(x) * (1 - error), module, x, dtype)


def test_no_mistake_is_named_in_a_half_precision():
    """In float16, the result without eps equals the one with eps added to the root."""
    case, module, x = prepared("rmsnorm", "where eps matters", torch.float16)
    mistake = case.mistakes["eps is added to the root, not below it"]
    wrong = case.exact(module, x, mistake).half()
    with pytest.raises(pytest.fail.Exception, match=r"^result in float16 at"):
        case.check(wrong, module, x, torch.float16)


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
    case, module, x = prepared("ffn", "SwiGLU", dtype)
    result = module(x)
    error = SMALL[dtype] * result
    if wrong == "gradient":
        error = error - error.detach()  # is 0, but has a gradient
    message = f"^{wrong} .*in {name_of(dtype)} at"
    with pytest.raises(pytest.fail.Exception, match=message):
        case.check(result + error, module, x, dtype)


def test_an_error_that_changes_no_sum_is_noticed():
    """The gradient of `result.sum()` is right, too, so the contract takes another one."""
    case, module, x = prepared("ffn", "SwiGLU", torch.float32)
    result = module(x)
    error = 1e-3 * (result - result.mean())
    error = error - error.detach()
    with pytest.raises(pytest.fail.Exception, match=r"^gradient of x in float32 at"):
        case.check(result + error, module, x, torch.float32)


def test_an_error_is_shown_where_it_is_largest():
    actual = torch.tensor([[1.0, 2.5], [3.0, 9.0]])
    expected = torch.tensor([[1.0, 2.5], [6.0, 5.0]], dtype=torch.float64)
    shown = "at [1, 1]: got 9, expected 5; the error's norm is 5, allowed 0.25"
    assert error_of(actual, expected, allowed=0.25) == shown
    assert error_of(actual, expected, allowed=5.0) == ""


def test_an_x_that_the_layer_overwrites_is_not_what_the_formula_reads():
    case, module, x = prepared("ffn", "SwiGLU", torch.float32)
    x.data.mul_(2)  # as a layer might, before its first operation
    with pytest.raises(pytest.fail.Exception, match=r"^result in float32 at"):
        case.check(module(x), module, x, torch.float32)


def fail_with_swiglu(change):
    """Return the failure of SwiGLU after a change of the layer."""
    case, module, x = prepared("ffn", "SwiGLU", torch.float32)
    change(module)
    with pytest.raises(pytest.fail.Exception) as failure:
        case.check(module(x), module, x, torch.float32)
    return failure.value


def test_one_frozen_weight_is_named():
    """If all are frozen, the layer may be an adapter."""
    failure = fail_with_swiglu(lambda module: module.w3.requires_grad_(False))
    assert failure.msg == "w3.weight must require a gradient, as the other weights do"


def test_a_weight_that_is_not_in_the_equation_is_named():
    def add_unused_weight(module):
        module.register_parameter("b1", nn.Parameter(torch.zeros(64)))

    failure = fail_with_swiglu(add_unused_weight)
    assert failure.msg == "the layer has the weight b1, which is not in the equation"


def test_a_layer_may_have_a_table_as_a_frozen_parameter():
    case, module, x = prepared("ffn", "SwiGLU", torch.float32)
    module.table = nn.Parameter(torch.zeros(64), requires_grad=False)
    case.check(module(x), module, x, torch.float32)


def test_a_weight_that_the_result_does_not_depend_on_is_named():
    def detach(module):
        module.w3.forward = lambda x: x @ module.w3.weight.detach().T

    failure = fail_with_swiglu(detach)
    assert re.match("w3.weight has no gradient: detach, .data, or no_", failure.msg)


def test_a_failure_shows_no_code_of_the_contract():
    failure = fail_with_swiglu(lambda module: module.w3.requires_grad_(False))
    assert failure.pytrace is False


def test_a_part_of_another_name_is_named():
    weights = Weights(
        {"mha.q_proj.weight": torch.ones(2, 2), "ln1.weight": torch.ones(2)}
    )
    message = "must have the part attn, got mha.q_proj.weight, ln1.weight$"
    with pytest.raises(pytest.fail.Exception, match=message):
        weights.of("attn")
