"""A checked function keeps its name, and a right call does not let a wrong one pass."""

import inspect
from typing import Any, Literal

import pytest
import torch
from jaxtyping import Float, TypeCheckError
from torch import Tensor

from tinyblock.typecheck import typecheck


def reduced(
    x: Float[Tensor, " n"], by: Literal["sum", "mean"] = "sum"
) -> Float[Tensor, ""]:
    """Return the sum or the mean."""
    return x.sum() if by == "sum" else x.mean()


class Reduce:
    """Has a checked method."""

    def reduced(
        self, x: Float[Tensor, " n"], by: Literal["sum", "mean"] = "sum"
    ) -> Float[Tensor, ""]:
        """Return the sum or the mean."""
        return reduced(x, by)


PLAIN = Reduce.reduced  # which typecheck replaces


def test_a_checked_function_has_its_name_docstring_and_signature():
    for checked, plain in (
        (typecheck(reduced), reduced),
        (typecheck(Reduce).reduced, PLAIN),
    ):
        assert checked is not plain
        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            assert getattr(checked, name) == getattr(plain, name), name
        assert inspect.signature(checked) == inspect.signature(plain)


@pytest.mark.parametrize("wrong", ["total", "SUM", None])
def test_a_wrong_text_for_a_literal_fails_after_right_ones(wrong):
    x = torch.ones(3)
    call: Any
    for call in (typecheck(reduced), typecheck(Reduce)().reduced):
        assert call(x) == call(x, "sum") == call(x, by="sum") == 3
        assert call(x, "mean") == call(x, by="mean") == 1
        with pytest.raises(TypeCheckError):
            call(x, wrong)
        with pytest.raises(TypeCheckError):
            call(x, by=wrong)
