"""Annotated functions and classes, as a user might write them. The tests check copies."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from jaxtyping import Float, Float32
from torch import Tensor, nn


def scale(
    x: Float[Tensor, "*a d"], weight: Float[Tensor, " d"], factor: float = 1.0
) -> Float[Tensor, "*a d"]:
    return x * weight * factor


def watched(
    x: Float[Tensor, " n"],
    by: Callable[..., Tensor] = scale,
    value: object = None,
    ignored: Any = None,
) -> None:
    pass


def nonzero(
    x: Float32[Tensor, " n"], width: int = 2, dtype: Any = None
) -> Float32[Tensor, " {width}"]:
    return x[x != 0].to(dtype)


def count(*xs: Float[Tensor, " n"], **options: int) -> int:
    return len(options)


def named(x: Float[Tensor, " n"], name: Literal["{n}", "x"] = "x") -> dict[str, Tensor]:
    return {name: x} if x.sum() > 0 else [x]  # type: ignore[return-value]


def limited(x: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    if len(x) > 2:
        raise RuntimeError(f"{len(x)} is too long for this dtype")
    return x


@torch.no_grad()
def decorated(
    x: Float[nn.Parameter, " n"], *, bias: float = 0.0
) -> Float[Tensor, " n"]:
    return x + bias


@contextmanager
def generator(x: Float[Tensor, " n"]) -> Iterator[None]:
    yield


async def coroutine(x: Float[Tensor, " n"]) -> None:
    pass


def _private(x: Float[Tensor, " n"]) -> None:
    pass


class Layer(nn.Module):
    def __init__(self, width: int, kind: type[nn.Module] = nn.Module) -> None:
        super().__init__()
        self.width = width

    def forward(
        self, x: Float[Tensor, "*batch {self.width}"] | None, times: int = 1
    ) -> Float[Tensor, "*batch {self.width}"] | None:
        return None if x is None else x.repeat_interleave(times, 0)

    def unchecked(self) -> int:
        return "text"  # type: ignore[return-value]
