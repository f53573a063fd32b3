"""The contract notices layers that torch.compile cannot take as one graph."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tinyblock.contract import every_layer
from tinyblock.contract.checks import Function


@dataclass
class CaseOf:
    """A function in the place of a layer, with what the test asks of a case."""

    function: Any

    def build(self, dtype):
        return Function(self.function, shapes=[], options={})

    def first(self, count):
        return torch.ones(2, count, 3), {}


def doubles(x):
    return 2 * x


def branches_on_values(x):
    return x if x.sum() > 0 else -x


def loops_over_tokens(x):
    for _ in range(x.shape[-2]):
        x = x + 1
    return x


def distinguishes_lengths(x):
    return x + 1 if x.shape[-2] % 2 else x


def changes_when_compiled(x):
    return x if torch.compiler.is_compiling() else 2 * x


def changes_for_several_tokens_when_compiled(x):
    return 2 * x if torch.compiler.is_compiling() and x.shape[-2] > 1 else x


@torch.compiler.disable
def is_not_compiled(x):
    return x


def test_right_code_passes():
    every_layer.test_compiles_to_one_graph(CaseOf(doubles))


# Code that reads a number is missing: it fails in test_built_on_meta.
WRONG = {
    branches_on_values: "[Dd]ata-dependent",
    is_not_compiled: "torch.compiler.disable",
    loops_over_tokens: "must make 1 or 2 graphs, got 3",
    distinguishes_lengths: "must make 1 or 2 graphs, got 3",
    changes_when_compiled: "^compiled result for 1 tokens",
    changes_for_several_tokens_when_compiled: "^compiled result for 7 tokens",
}


@pytest.mark.parametrize("function", WRONG)
def test_it_names_what_is_wrong_with(function):
    errors = (RuntimeError, AssertionError, pytest.fail.Exception)
    with pytest.raises(errors, match=WRONG[function]):
        every_layer.test_compiles_to_one_graph(CaseOf(function))
