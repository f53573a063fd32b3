"""Every case of calls.py in each mode: the right call passes, the wrong call raises."""

import re
from typing import Any, NamedTuple

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor, nn
from torch.export import Dim
from typecheck import calls


class Case(NamedTuple):
    function: Any
    right: tuple[Any, ...]
    wrong: tuple[Any, ...]  # the last argument may be a dict of keywords
    where: str  # what the error names

    def call(self, arguments):
        *first, last = arguments
        if isinstance(last, dict):
            return self.function(*first, **last)
        return self.function(*first, last)


def cases(*tables):
    """Return the cases of these tables by their titles."""
    return {title: Case(*case) for table in tables for title, case in table.items()}


NAMES_AND_BRACES = cases(calls.NAMES, calls.BRACES)
IN_EVERY_MODE = cases(calls.NAMES, calls.BRACES, calls.PARTS, calls.DECORATED)
IN_EAGER_MODE = cases(calls.EAGER)


def message_of(title, function, *arguments):
    try:
        function(*arguments)
    except (TypeCheckError, RuntimeError) as error:
        return str(error)
    pytest.fail(f"{title}: the wrong call raises no error")


@pytest.mark.parametrize("cases", [IN_EVERY_MODE, IN_EAGER_MODE], ids=["all", "eager"])
def test_eager_mode_takes_right_calls_and_raises_for_wrong_ones(cases):
    for title, case in cases.items():
        for _ in range(2):
            case.call(case.right)
            message = message_of(title, case.call, case.wrong)
            assert case.where in message.partition("\n-----")[0], title


def right_calls(cases):
    return [case.call(case.right) for case in cases]


def test_right_calls_compile_to_one_graph():
    """Sizes of 2 and more are symbols, of which a comparison knows less than of numbers."""
    cases = [*IN_EVERY_MODE.values()]
    compiled = torch.compile(right_calls, backend="eager", fullgraph=True, dynamic=True)
    torch.testing.assert_close(compiled(cases), right_calls(cases))


def test_wrong_calls_raise_in_compiled_code():
    """With fullgraph, so that no other graph break leads to the checks of eager mode."""
    for title, case in IN_EVERY_MODE.items():
        compiled = torch.compile(
            case.call, backend="eager", fullgraph=True, dynamic=True
        )
        message = message_of(title, compiled, case.wrong)
        assert re.search(f"(?s)TypeCheckError.*{case.where}", message), title


def test_compiled_code_takes_right_calls_that_only_eager_mode_checks():
    for title, case in IN_EAGER_MODE.items():
        result = torch.compile(case.call, backend="eager")(case.right)
        torch.testing.assert_close(result, case.call(case.right), msg=title)
        torch._dynamo.reset()


class Exported(nn.Module):
    """Calls as torch.export takes them."""

    def __init__(self, cases):
        super().__init__()
        self.cases = cases

    def forward(self, arguments):
        pairs = zip(self.cases, arguments, strict=True)
        return [case.call(own) for case, own in pairs]


def export(cases, arguments):
    dims = [[dict.fromkeys(range(x.ndim), Dim.AUTO) for x in own] for own in arguments]
    return torch.export.export(
        Exported(cases), (arguments,), dynamic_shapes=(dims,), strict=False
    )


@pytest.mark.filterwarnings("ignore")
def test_export_takes_right_calls_and_raises_for_wrong_ones():
    cases = {
        title: case
        for title, case in NAMES_AND_BRACES.items()
        if all(isinstance(each, Tensor) for each in (*case.right, *case.wrong))
    }
    right = [[*case.right] for case in cases.values()]
    exported = export([*cases.values()], right).module()
    torch.testing.assert_close(exported(right), right_calls(cases.values()))
    for title, case in cases.items():
        message = message_of(title, export, [case], [[*case.wrong]])
        assert case.where in message.partition("\n-----")[0], title
