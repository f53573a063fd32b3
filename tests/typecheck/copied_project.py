"""Tests of the lines of docs/shape_checks.md, in a project with a copy of typecheck.py.

test_copied_file.py runs them beside the lines, as lines.py, and my_module.py.
"""

import lines  # type: ignore[import-not-found]
import my_module  # type: ignore[import-not-found]
import pytest
import torch
from jaxtyping import TypeCheckError

x = torch.ones(2, 3, 8)
width = lines.Scale(8)


def right_calls():
    return lines.scores(x, x), width(x), my_module.scale(x, x[0, 0])


def test_right_calls_compile_without_a_graph_break():
    compiled = torch.compile(right_calls, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(), right_calls())


@pytest.mark.parametrize(
    "wrong_call",
    [
        lambda: lines.scores(x, x[..., :7]),
        lambda: width(x[..., :7]),
        lambda: my_module.scale(x, x),
    ],
    ids=["function", "class", "module"],
)
def test_a_wrong_call_raises(wrong_call):
    with pytest.raises(TypeCheckError):
        wrong_call()
