"""Annotated functions and classes, as a user might write them. The tests check copies."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn

if TYPE_CHECKING:
    from fractions import Fraction


def scale(
    x: Float[Tensor, "*a d"], weight: Float[Tensor, " d"], factor: float = 1.0
) -> Float[Tensor, "*a d"]:
    return x * weight * factor


def without_result(x: Float[Tensor, " n"]):
    return [x]


def without_weight(
    x: Float[Tensor, " n"],
    weight: Float[Tensor, " n"] = None,  # type: ignore[assignment]
    count: int = 0.5,  # type: ignore[assignment]
) -> None:
    pass


def doubled(x: Float[Tensor, " n"], /) -> Float[Tensor, " n"]:
    return 2 * x


def limited(x: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    if len(x) > 2:
        raise RuntimeError(f"{len(x)} is too long")
    return x


def half(x: Float[Tensor, " n"], of: "Fraction | None" = None) -> None:
    pass


def renamed_class(x: Float[Tensor, " n"], of: "torch.NotThere" = 2) -> None:  # type: ignore[name-defined]
    pass


@contextmanager
def generator(x: Float[Tensor, " n"]) -> Iterator[None]:
    yield


async def coroutine(x: Float[Tensor, " n"]) -> None:
    pass


def _private(x: Float[Tensor, " n"]) -> None:
    pass


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(
        self, x: Float[Tensor, "*batch {self.width}"]
    ) -> Float[Tensor, "*batch {self.width}"]:
        return x

    def unchecked(self) -> int:
        return "text"  # type: ignore[return-value]
