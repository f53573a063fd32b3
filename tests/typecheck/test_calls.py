"""Every case of calls.py in each mode: the right call passes, the wrong call raises."""

import __future__

import functools
import re
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor, nn
from torch.export import Dim

CALLS = Path(__file__).with_name("calls.py")


class Case(NamedTuple):
    call: Any
    right: tuple[Any, ...]
    wrong: tuple[Any, ...]  # the last argument may be a dict of keywords
    where: str  # what the error names


def load(name, flags):
    """Import calls.py by this name, where the compiler finds it."""
    sys.modules[name] = module = types.ModuleType(name)
    exec(compile(CALLS.read_text(), CALLS, "exec", flags), vars(module))
    return vars(module)


MODULE = load("calls", 0)
POSTPONED = load("postponed_calls", __future__.annotations.compiler_flag)


def cases(*tables, module=MODULE):
    """Return the cases of these tables by their titles."""
    return {
        title: Case(*case) for table in tables for title, case in module[table].items()
    }


IN_EVERY_MODE = cases("NAMES", "BRACES", "PARTS", "DECORATED")
IN_EAGER_MODE = cases("EAGER")


def call(function, arguments):
    *arguments, last = arguments
    if isinstance(last, dict):
        return function(*arguments, **last)
    return function(*arguments, last)


def message_of(title, function, arguments):
    try:
        call(function, arguments)
    except (TypeCheckError, RuntimeError) as error:
        return str(error)
    pytest.fail(f"{title}: the wrong call raises no error")


def right_result(title, function, arguments):
    try:
        return call(function, arguments)
    except (TypeCheckError, RuntimeError) as error:
        pytest.fail(f"{title}: {error}")


def check_in_eager_mode(cases):
    for title, case in cases.items():
        for _ in range(2):
            right_result(title, case.call, case.right)
            message = message_of(title, case.call, case.wrong)
            assert case.where in message.partition("\n-----")[0], title


def test_eager_mode_takes_right_calls_and_raises_for_wrong_ones():
    check_in_eager_mode(IN_EVERY_MODE | IN_EAGER_MODE)


def test_postponed_annotations_are_checked():
    tables = ("NAMES", "BRACES", "PARTS", "DECORATED", "EAGER")
    check_in_eager_mode(cases(*tables, module=POSTPONED))


def test_compiled_code_is_one_graph_and_raises_for_wrong_calls():
    """Sizes of 2 and more are symbols, of which a comparison knows less than of numbers."""
    for title, case in IN_EVERY_MODE.items():
        compiled = torch.compile(
            case.call, backend="eager", fullgraph=True, dynamic=True
        )
        result = right_result(title, compiled, case.right)
        torch.testing.assert_close(result, call(case.call, case.right), msg=title)
        message = message_of(title, compiled, case.wrong)
        assert re.search(f"(?s)TypeCheckError.*{case.where}", message), title
        torch._dynamo.reset()


def test_compiled_code_raises_the_error_of_eager_mode():
    for title, case in IN_EVERY_MODE.items():
        expected = message_of(title, case.call, case.wrong)
        compiled = torch.compile(case.call, backend="eager")
        assert message_of(title, compiled, case.wrong) == expected, title
        torch._dynamo.reset()


def test_compiled_code_takes_right_calls_that_only_eager_mode_checks():
    for title, case in IN_EAGER_MODE.items():
        compiled = torch.compile(case.call, backend="eager")
        result = right_result(title, compiled, case.right)
        torch.testing.assert_close(result, call(case.call, case.right), msg=title)
        torch._dynamo.reset()


class Exported(nn.Module):
    """A case as torch.export takes it."""

    def __init__(self, case):
        super().__init__()
        self.case = case

    def forward(self, *arguments):
        return self.case.call(*arguments)


def export(case, arguments):
    dims = tuple(dict.fromkeys(range(each.ndim), Dim.AUTO) for each in arguments)
    return torch.export.export(
        Exported(case), arguments, dynamic_shapes=(dims,), strict=False
    )


@pytest.mark.filterwarnings("ignore")
def test_export_takes_right_calls_and_raises_for_wrong_ones():
    for title, case in cases("NAMES").items():
        if not all(isinstance(each, Tensor) for each in (*case.right, *case.wrong)):
            continue
        result = export(case, case.right).module()(*case.right)
        torch.testing.assert_close(result, case.call(*case.right), msg=title)
        message = message_of(title, functools.partial(export, case), (case.wrong,))
        assert case.where in message.partition("\n-----")[0], title
