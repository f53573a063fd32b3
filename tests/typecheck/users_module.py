"""Annotated functions and classes, as a user might write them. The tests check copies."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NewType,
    Protocol,
    TypeVar,
    runtime_checkable,
)

import torch
from beartype.vale import Is
from jaxtyping import Float, Float32
from torch import Tensor, nn

if TYPE_CHECKING:
    from fractions import Fraction

CONFIG = SimpleNamespace(width=3)
Rows = TypeVar("Rows", bound=Float[Tensor, "{count} d"])
Named = NewType("Named", Float[Tensor, "{count} d"])
Positive = Annotated[Float[Tensor, " n"], Is[lambda x: bool((x > 0).all())]]


@runtime_checkable
class HasScale(Protocol):
    scale: float


def scale(
    x: Float[Tensor, "*a d"], weight: Float[Tensor, " d"], factor: float = 1.0
) -> Float[Tensor, "*a d"]:
    return x * weight * factor


def repeat(x: Float[Tensor, " n"], times: int = 2) -> Float[Tensor, " {times}*n"]:
    return x.repeat(times)


def configured(x: Float[Tensor, " {config.width}"], config: Any = CONFIG) -> None:
    pass


def nonzero(x: Float32[Tensor, " n"], width: int = 2) -> Float32[Tensor, " {width}"]:
    return x[x != 0]


def cast(x: Float[Tensor, " n"], dtype: torch.dtype) -> Float32[Tensor, " n"]:
    return x.to(dtype)


def without_result(x: Float[Tensor, " n"]):
    return 2 * x


def doubled(x: Float[Tensor, " n"], /) -> Float[Tensor, " n"]:
    return 2 * x


def count(*xs: Float[Tensor, " n"], **options: int) -> int:
    return len(options)


def named(x: Float[Tensor, " n"], name: Literal["{n}", "x"] = "x") -> str:
    return name


def listed(x: Float[Tensor, " n"]) -> list[Tensor]:
    return [x] if x.sum() > 0 else x  # type: ignore[return-value]


def flagged(x: Float[Tensor, " n"], flag: bool) -> None:
    pass


def bound(rows: Rows, count: int) -> None:
    pass


def renamed(rows: Named, count: int) -> None:
    pass


def positive(x: Positive) -> None:
    pass


def parameter(x: Float[nn.Parameter, " n"]) -> None:
    pass


def scaled_tensor(x: HasScale) -> None:
    pass


def scaled_tensor_or_number(x: HasScale | float) -> None:
    pass


class Masked(Tensor):
    """A subclass, as DTensor is one."""


def masked(x: Float[Masked, " n"]) -> None:
    pass


def to_masked(x: Float[Tensor, " n"]) -> Float[Masked, " n"]:
    return x.as_subclass(Masked) if x.sum() > 0 else x  # type: ignore[return-value]


def unlisted(x: Float[Tensor, " n"]) -> Tensor:
    return x if x.sum() > 0 else [x]  # type: ignore[return-value]


def with_default(
    x: Float[Tensor, " n"],
    weight: Float[Tensor, " n"] = torch.ones(1),  # noqa: B008
) -> None:
    pass


def without_weight(
    x: Float[Tensor, " n"],
    weight: Float[Tensor, " n"] = None,  # type: ignore[assignment]
) -> None:
    pass


def clashing(
    isinstance: Float[Tensor, " n"],
    Tensor: Float[Tensor, " n"],
    __signature: Float[Tensor, " n"],
    _result: int = 2,
) -> Float[Tensor, "{_result}*n"]:
    return isinstance.repeat(_result)


def limited(x: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    if len(x) > 2:
        raise RuntimeError(f"{len(x)} is too long")
    return x


@torch.no_grad()
def decorated(x: Float[Tensor, " n"], *, bias: float = 0.0) -> Float[Tensor, " n"]:
    return x + bias


def remembered(
    x: Float[Tensor, " n"],
    by: Callable[..., Tensor] = scale,
    value: object = None,
    ignored: Any = None,
) -> None:
    pass


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
    def __init__(self, width: int, kind: type[nn.Module] = nn.Module) -> None:
        super().__init__()
        self.width = width

    def forward(
        self, x: Float[Tensor, "*batch {self.width}"] | None, times: int = 1
    ) -> Float[Tensor, "*batch {self.width}"] | None:
        return None if x is None else x.repeat_interleave(times, 0)

    def unchecked(self) -> int:
        return "text"  # type: ignore[return-value]
