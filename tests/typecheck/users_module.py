"""Annotated functions and classes, as a user might write them. The tests check copies."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal

import torch
from beartype.vale import Is
from jaxtyping import Float, Float32
from torch import Tensor, nn

looked_at = []  # the lengths that beartype looked at


def scale(
    x: Float[Tensor, "*a d"], weight: Float[Tensor, " d"], *, factor: float = 1.0
) -> Float[Tensor, "*a d"]:
    """Scale."""
    return x * weight * (factor or 1.0)


def first(tensors: list[Float[Tensor, " d"]]) -> Float[Tensor, " d"]:
    return tensors[0]


def watched(
    x: Annotated[Tensor, Is[lambda x: not looked_at.append(len(x))]],
    by: Callable[..., Tensor] = scale,
) -> None:
    pass


def nonzero(x: Float[Tensor, " n"], width: int = 2) -> Float[Tensor, " {width}"]:
    return x[x != 0]


def count(*xs: Float[Tensor, " n"], **options: int) -> int:
    return "many" if xs[0].sum() > 0 else len(options)  # type: ignore[return-value]


def halved(x: Float32[Tensor, " n"], dtype: Any) -> Float32[Tensor, " n"]:
    return x.to(dtype)


def trained(x: Float[nn.Parameter, " n"]) -> None:
    pass


def named(x: Float[Tensor, " n"], name: Literal["{n}", "x"] = "x") -> dict[str, Tensor]:
    return {name: x} if x.sum() > 0 else [x]  # type: ignore[return-value]


def limited(x: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    if len(x) > 2:
        raise ValueError(f"{len(x)} is too long")
    return x


@torch.no_grad()
def decorated(x: Float[Tensor, " n"], *, bias: float = 0.0) -> Float[Tensor, " n"]:
    return x + bias


def fail(x: Float[Tensor, " n"], *, layer: int, error: int) -> None:
    raise RuntimeError("of the function")


@contextmanager
def scope(x: Float[Tensor, " n"]) -> Iterator[None]:
    yield


async def later(x: Float[Tensor, " n"]) -> None:
    pass


def _private(x: Float[Tensor, " n"]) -> None:
    pass


class Layer(nn.Module):
    def __init__(
        self, width: int, rate: float = 1.0, kind: type[nn.Module] = nn.Module
    ) -> None:
        super().__init__()
        self.width = width

    def forward(
        self, x: Float[Tensor, "*batch {self.width}"], times: int = 1
    ) -> Float[Tensor, "*batch {self.width}"]:
        return x * (times or 1)
