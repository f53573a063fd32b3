"""Checked functions, and for each a right and a wrong call.

Without checks, torch takes almost all of the wrong calls.
"""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    NewType,
    Protocol,
    TypeVar,
    Union,
    runtime_checkable,
)

import numpy as np
import torch
from beartype.vale import Is
from jaxtyping import Bool, Float, Float32, Int, Integer, Shaped
from torch import Tensor, nn
from typing_extensions import TypeAliasType

from tinyblock.typecheck import typecheck

ones = torch.ones
x = ones(2, 3)
w = ones(3)
int_ones = torch.ones(2).int()
LABEL = object()
ONE = ones(1)
CONFIG = SimpleNamespace(width=3)


class Masked(Tensor):
    """A subclass, as DTensor is one."""


def masked(name):
    """Return a tensor that only this attribute tells from others."""
    tensor = ones(3).as_subclass(Masked)
    setattr(tensor, name, True)
    return tensor


@runtime_checkable
class HasScale(Protocol):
    scale: float


class Halves(NamedTuple):
    first: Tensor
    second: Tensor


class Sizes:
    dtype = None  # without a shape, it is no array

    def __init__(self, width: int) -> None:
        self.width = width


Kind = TypeVar("Kind", bound=Tensor)
Rows = TypeVar("Rows", bound=Float[Tensor, "{count} d"])
Named = NewType("Named", Float[Tensor, "{count} d"])
Item = TypeVar("Item")
Alias = TypeAliasType("Alias", Float[Tensor, "n {count}"])  # type Alias = ...
Pair = TypeAliasType(
    "Pair", tuple[Item, Item], type_params=(Item,)
)  # type Pair[Item] = ...
Positive = Annotated[Float[Tensor, " n"], Is[lambda x: bool((x > 0).all())]]


# Names of axes ------------------------------------------------------------------------


@typecheck
def dot(
    q: Float[Tensor, "*batch query d_k"], k: Float[Tensor, "*batch key d_k"]
) -> Float[Tensor, "*batch query d_k"]:
    return q * k.sum(-2, keepdim=True)


@typecheck
def to_gray(
    image: Float[Tensor, "color=3 height width"],
) -> Float[Tensor, "height width"]:
    return image.mean(0)


@typecheck
def rotate(
    x: Float[Tensor, "*batch seq d_k"], angles: Float[Tensor, "*#batch seq d_k//2"]
) -> Float[Tensor, "*batch seq d_k"]:
    return x + angles.sum()


@typecheck
def mask_out(
    x: Float[Tensor, "query key"], mask: Bool[Tensor, "#query key"] | None
) -> Float[Tensor, "query key"]:
    return x if mask is None else x * mask.sum()


@typecheck
def both(
    x: Float[Tensor, "*#shape"], y: Float[Tensor, "*#shape"]
) -> Float[Tensor, "*shape"]:
    return torch.stack((x.sum(), y.sum())).sum() + torch.zeros(4, 3)


@typecheck
def nested(x: Shaped[Float32[Tensor, "n {count}"], "m"], count: int) -> Tensor:
    return x.sum()


NAMES = {
    "size": (dot, (ones(2, 5), ones(4, 5)), (ones(2, 5), ones(4, 1)), "'k'"),
    "fixed size": (to_gray, (ones(3, 2, 2),), (ones(1, 2, 2),), "'image'"),
    "number of axes": (to_gray, (ones(3, 2, 2),), (ones(3, 2),), "'image'"),
    "*batch": (dot, (ones(2, 4, 5),) * 2, (ones(2, 4, 5), ones(1, 4, 5)), "'k'"),
    "*#batch": (
        rotate,
        (ones(2, 4, 6), ones(1, 4, 3)),
        (ones(2, 4, 6), ones(3, 4, 3)),
        "'angles'",
    ),
    "*#batch with more axes": (
        rotate,
        (ones(2, 4, 6), ones(4, 3)),
        (ones(4, 6), ones(2, 4, 3)),
        "'angles'",
    ),
    "*#batch that exceeds *batch": (
        rotate,
        (ones(2, 4, 6), ones(1, 4, 3)),
        (ones(1, 4, 6), ones(2, 4, 3)),
        "'angles'",
    ),
    "*# twice": (both, (ones(4, 1), ones(3)), (ones(4, 1), ones(2, 3)), "'y'"),
    "*# with more axes later": (
        both,
        (ones(3), ones(4, 1)),
        (ones(3), ones(4, 2)),
        "'y'",
    ),
    "result of *#": (both, (ones(4, 1), ones(3)), (ones(5, 1), ones(3)), "return"),
    "expression": (
        rotate,
        (ones(4, 6), ones(4, 3)),
        (ones(4, 6), ones(4, 6)),
        "'angles'",
    ),
    "#axis": (
        mask_out,
        (ones(4, 3), ones(1, 3).bool()),
        (ones(4, 3), ones(2, 3).bool()),
        "'mask'",
    ),
    "annotation of an annotation": (
        nested,
        (ones(2, 2, 3), 3),
        (ones(2, 2, 3).double(), 3),
        "'x'",
    ),
}

# Sizes in braces ----------------------------------------------------------------------


@typecheck
class Gain(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.gain = nn.Parameter(torch.ones(1))

    def forward(
        self, x: Float32[Tensor, "*batch {self.width}"]
    ) -> Float32[Tensor, "*batch {self.width}"]:
        return x * self.gain

    def widened(
        self, x: Float[Tensor, "{self.width}"], times: Integer[Tensor, "2*{self.width}"]
    ) -> Float[Tensor, "2*{self.width}"]:
        return x.sum() * times


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = Gain(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.gain(x) + 1


class Sub(Gain):
    @typecheck
    def forward(  # type: ignore[override]
        self, x: Float[Tensor, "n {self.width}"], by: float
    ) -> Float[Tensor, "n {self.width}"]:
        return super().forward(x) * by


class Cache:
    """A cache of keys, of which each call changes the length."""

    def __init__(self) -> None:
        self.keys = ones(1, 0, 4)

    @typecheck
    def append(
        self, keys: Float[Tensor, "1 new 4"], start: int
    ) -> Float[Tensor, "1 {self.keys.shape[1]} 4"]:
        self.keys = torch.cat((self.keys, keys), 1)
        return self.keys[:, start:]


def append_twice(start):
    cache = Cache()
    cache.append(ones(1, 2, 4), 0)
    return cache.append(ones(1, 1, 4), start)


class Counter:
    """Each call changes the number of rows that it expects of the next."""

    def __init__(self) -> None:
        self.rows = 2

    @typecheck
    def grow(
        self, x: Float[Tensor, "{self.rows} d"], more: int
    ) -> Float[Tensor, "{self.rows} d"]:
        self.rows += 1
        return x.new_ones(len(x) + more, x.shape[1])


def grow_twice(more):
    counter = Counter()
    return counter.grow(counter.grow(ones(2, 3), 1), more)


@typecheck
def head(x: Float[Tensor, "seq d"], count: int = 2) -> Float[Tensor, "{count} d"]:
    return x[:2]


@typecheck
def six_times(x: Float[Tensor, " n"], a: int, b: int) -> Float[Tensor, "{a}*{b}*n"]:
    return x.repeat(6)


@typecheck
def formatted(
    x: Float[Tensor, "{n!s} 2*{n:d}"], n: int
) -> Float[Tensor, "#{n!r} {max(n,(lambda:2)())}+{n}"]:
    return x


def formatted_with_3(x):
    return formatted(x, n=3)


@typecheck
def configured(x: Float[Tensor, " {config.width}"], config: Any = CONFIG) -> Tensor:
    return x + 1


@typecheck
def sized(x: Float[Tensor, " {sizes.width}"], sizes: Sizes) -> Tensor:
    return x + 1


@typecheck
def clashing(
    isinstance: Float[Tensor, " n"],
    __describe: Float[Tensor, " n"],
    __call: int = 2,
    **more: int,
) -> Float[Tensor, "{__call}*n"]:
    return isinstance.repeat(__call) + 0 * __describe.sum()


BRACES = {
    "attribute": (Gain(3), (ones(2, 3),), (ones(2, 1),), "'x'"),
    "method": (
        Gain(3).widened,
        (ones(3), ones(6).int()),
        (ones(3), ones(3).int()),
        "'times'",
    ),
    "nested layer": (Model(), (ones(2, 3),), (ones(2, 1),), "'x'"),
    "method that calls the checked method of its base": (
        Sub(3),
        (ones(2, 3), 1.5),
        (ones(2, 1), 1.5),
        "'x'",
    ),
    "cache": (append_twice, (0,), (1,), "return"),
    "size that changes in the call": (grow_twice, (1,), (0,), "return"),
    "default": (head, (ones(4, 3),), (ones(1, 3),), "return"),
    "parameter": (head, (ones(4, 3), 2), (ones(4, 3), 3), "return"),
    "keyword": (formatted_with_3, (ones(3, 6),), (ones(3, 3),), "'x'"),
    "parameters": (six_times, (ones(3), 2, 3), (ones(3), 2, 2), "return"),
    "formats": (formatted, (ones(3, 6), 3), (ones(3, 3), 3), "'x'"),
    "default object": (configured, (w,), (ones(4),), "'x'"),
    "object": (sized, (w, Sizes(3)), (w, Sizes(4)), "'x'"),
    "names of the wrapper": (clashing, (w, w), (w, ones(2)), "'__describe'"),
}

# Containers, unions, aliases ------------------------------------------------------------


@typecheck
def pick(x: Float[Tensor, "rows d"] | Int[Tensor, " rows"], rows: Int[Tensor, " rows"]):
    return x.sum() + rows.sum()


@typecheck
def either(
    x: Float[Tensor, "n 3"] | Float[Tensor, "3 n"], y: Float[Tensor, " 2*n"]
) -> Float[Tensor, "2 2"] | Tensor:
    return x.sum() + y


@typecheck
def scaled(
    x: Float[Tensor, "*shape"],
    *,
    by: Union[Float[Tensor, "*shape"], float] = 2.0,  # noqa: UP007
) -> Float[Tensor, "*shape"]:
    return x * by


@typecheck
def split(x: Float[Tensor, "seq d"]) -> tuple[Float[Tensor, " d"], Int[Tensor, " seq"]]:
    return x.sum(0), x[0].int() * 0 + 1


@typecheck
def turn(
    x: Float[Tensor, "seq d"],
    turns: tuple[Float[Tensor, "seq half"], Float[Tensor, "seq half"]] | None,
) -> Tensor:
    return x if turns is None else x + turns[0].sum()


@typecheck
def couple(x: Float[Tensor, " n"], kind: Any) -> tuple[Float[Tensor, " n"], Tensor]:
    return kind((x, x))


@typecheck
def some(x: Float[Tensor, " n"], first: int) -> tuple[Float[Tensor, " n"], ...]:
    return x[first:], x


@typecheck
def halved(x: Float[Tensor, " n"], first: int) -> tuple[Float[Tensor, " n"], Tensor]:
    return Halves(x[first:], x)


@typecheck
def listed(xs: list[Float[Tensor, "n {count}"]], count: int) -> Tensor:
    return xs[0] + 1


@typecheck
def by_name(xs: dict[str, Float[Tensor, " n"]], y: Float[Tensor, " n"]) -> Tensor:
    return xs["a"] + y


@typecheck
def with_more(
    x: Float[Tensor, " n"], *others: Float[Tensor, " n"], **named: Float[Tensor, " n"]
) -> Tensor:
    return x + sum(others) + sum(named.values())


@typecheck
def noted(
    x: Annotated[Float[Tensor, "n d"], {"of": "a word"}],
    gain: Annotated[Float[Tensor, " d"], "trained"] | None = None,
) -> Annotated[Float[Tensor, "n d"], "normed"]:
    return x * 2


@typecheck
def positive(x: Positive, y: Float[Tensor, " n"]) -> Tensor:
    return x + y


@typecheck
def bound(rows: Rows, count: int) -> Rows:
    return rows


@typecheck
def renamed(rows: Named | None, count: int) -> Named | None:
    return rows


@typecheck
def aliased(x: Alias, count: int, more: Pair[Alias] | None = None) -> Alias:
    return x


@typecheck
def masked_by(x: Float[Masked, " n"]) -> Tensor:
    return x + 1


@typecheck
def with_default_tensor(
    x: Float[Tensor, " n"], scale: Float[Tensor, " n"] = ONE
) -> Tensor:
    return x * scale


@typecheck
def with_wrong_default(
    x: Float[Tensor, " n"],
    bias: Float[Tensor, " n"] = None,  # type: ignore[assignment]
) -> Tensor:
    return x + 1


@typecheck
def maybe(x: Float[Tensor, " n"], there: bool) -> Float[Tensor, " n"]:
    return x if there else None  # type: ignore[return-value]


@typecheck
def take(x: Float[Tensor, "seq d"], count: Any, y: Float[Tensor, "{count}"]) -> Tensor:
    return x[:2]


@typecheck
def joined(xs: tuple[Float[Tensor, "n {count}"], ...], count: int) -> Tensor:
    return torch.cat(xs)


@typecheck
def renaming(
    x: Float[Tensor, " n"], *, call: Float[Tensor, " n"], function: int, **check: int
) -> Float[Tensor, " n"]:
    return x * call


PARTS = {
    "one of many items": (
        joined,
        ((x,) * 9, 3),
        ((*(x,) * 8, ones(2, 4)), 3),
        "'xs'",
    ),
    "names of parameters": (
        renaming,
        (w, {"call": w, "function": 1, "self": 2}),
        (w, {"call": ones(1), "function": 1, "self": 2}),
        "'call'",
    ),
    "number for a tuple": (turn, (x, (x, x)), (x, 2), "'turns'"),
    "union of arrays": (pick, (x, int_ones), (w.int(), int_ones), "'rows'"),
    "union whose second member fits": (
        either,
        (ones(3, 2), ones(4)),
        (ones(3, 2), ones(6)),
        "'y'",
    ),
    "union with a number": (scaled, (w, {"by": 3.0}), (w, {"by": ones(1)}), "'by'"),
    "tensor for None": (mask_out, (x, None), (x, x), "'mask'"),
    "number for None": (mask_out, (x, None), (x, 3), "'mask'"),
    "dtype": (Gain(3), (x,), (x.double(),), "'x'"),
    "tuple of results": (split, (ones(3, 3),), (ones(4, 3),), "return"),
    "tuple or None": (turn, (x, (x, x)), (x, (x, ones(2, 1))), "'turns'"),
    "length of a tuple": (turn, (x, (x, x)), (x, (x, x, x)), "'turns'"),
    "tuple of any length": (some, (w, 0), (w, 1), "return"),
    "list for a tuple": (couple, (w, tuple), (w, list), "return"),
    "NamedTuple": (halved, (w, 0), (w, 1), "return"),
    "list": (listed, ([x], 3), ([ones(2, 1)], 3), "'xs'"),
    "dict": (by_name, ({"a": w}, w), ({"a": w}, ones(1)), "'y'"),
    "several arguments of one parameter": (with_more, (w, w), (w, ones(1)), "'others'"),
    "keywords of one parameter": (
        with_more,
        (w, {"a": w}),
        (w, {"a": ones(1)}),
        "'named'",
    ),
    "Annotated": (noted, (x, w), (x, ones(1)), "'gain'"),
    "beside a validator": (positive, (w, w), (w, ones(1)), "'y'"),
    "TypeVar": (bound, (x, 2), (x, 3), "'rows'"),
    "NewType": (renamed, (x, 2), (x, 3), "'rows'"),
    "alias": (aliased, (x, 3), (x, 2), "'x'"),
    "generic alias": (aliased, (x, 3, (x, x)), (x, 3, (x, w)), "'more'"),
    "plain tensor for a subclass": (masked_by, (masked("a"),), (w,), "'x'"),
    "no tensor": (dot, (x, x), (x, 3), "'k'"),
    "result that is no tensor": (maybe, (w, True), (w, False), "return"),
    "wrong default": (with_wrong_default, (w,), (w, ones(1)), "'bias'"),
}

# Decorators -----------------------------------------------------------------------------


def with_keyword(function):
    """Add a keyword, and pass another."""

    @functools.wraps(function)
    def inner(*args, verbose=False, **kwargs):
        return function(*args, bias=1.0, **kwargs)

    return inner


@typecheck
@with_keyword
def widened(x: Float[Tensor, "n d"], gain: Float[Tensor, " d"], bias: float) -> Tensor:
    return x * gain + bias


@typecheck
@torch.no_grad()
def without_grad(x: Float[Tensor, " n"], *, bias: float = 0.0) -> Float[Tensor, " n"]:
    return x[:3] + bias


@typecheck
@functools.partial(torch.compile, backend="eager")
def compiled(x: Float[Tensor, "n 3"]) -> Float[Tensor, "n 3"]:
    return x * 2


@torch.no_grad()
@typecheck
def below(x: Float[Tensor, "n 3"]) -> Float[Tensor, "n 3"]:
    return x * 2


DECORATED = {
    "decorator that adds and passes keywords": (
        widened,
        (x, w, {"verbose": True}),
        (x, ones(1), {"verbose": True}),
        "'gain'",
    ),
    "decorator of torch": (without_grad, (w,), (ones(4),), "return"),
    "decorator above": (below, (x,), (w,), "'x'"),
    "compiled function": (compiled, (x,), (ones(2, 4),), "'x'"),
}

# What only eager mode checks --------------------------------------------------------------


@typecheck
def scale(x: Float[Tensor, " n"], factor: float = 1.0, flag: bool = True) -> Tensor:
    return x * factor


@typecheck
def repeat(x: Float[Tensor, " n"], times: int = 2) -> Float[Tensor, " {times}*n"]:
    return x.repeat(times)


@typecheck
def nonzero(x: Float32[Tensor, " n"], width: int = 2) -> Float32[Tensor, " {width}"]:
    return x[x != 0]


@typecheck
def cast(x: Float[Tensor, " n"], dtype: torch.dtype) -> Float32[Tensor, " n"]:
    return x.to(dtype)


@typecheck
def named(x: Float[Tensor, " n"], name: Literal["{n}", "x", 0] | None = "x") -> Tensor:
    return x + 1


@typecheck
def counted_in(x: Tensor, last: bool) -> tuple[Tensor, Literal[1, 2]]:
    return x, 3 if last else 2  # type: ignore[return-value]


@typecheck
def signs(x: Float[Tensor, " n"]) -> list[Tensor]:
    return [x] if x.sum() > 0 else x  # type: ignore[return-value]


@typecheck
def unlisted(x: Float[Tensor, " n"]) -> Tensor:
    return x if x.sum() > 0 else [x]  # type: ignore[return-value]


@typecheck
def to_masked(x: Float[Tensor, " n"]) -> Float[Masked, " n"]:
    return x.as_subclass(Masked) if x.sum() > 0 else x  # type: ignore[return-value]


@typecheck
def all_positive(x: Positive) -> None:
    pass


@typecheck
def parameter(x: Float[nn.Parameter, " n"]) -> None:
    pass


@typecheck
def has_scale(x: HasScale | float) -> None:
    pass


@typecheck
def from_numpy(x: Float[np.ndarray, " n 3"]) -> Float[Tensor, " n 3"]:
    return torch.as_tensor(x)


@typecheck
def build(kind: type[nn.Module], of: Callable[..., Any] = repeat) -> None:
    pass


@typecheck
def applied(x: Float[Tensor, " n"], gain: Gain) -> Tensor:
    return x + 1


@typecheck
def counted(**options: int) -> None:
    pass


class Area:
    """Has what arrays have, and is none."""

    shape = 3
    dtype = None


@typecheck
def squared(area: Area) -> Tensor:
    return ones(area.shape)


EAGER = {
    "text for a number": (scale, (w, 2.0), (w, "2.0"), "'factor'"),
    "integer for a flag": (scale, (w, 1, True), (w, 1, 1), "'flag'"),
    "float for an integer": (repeat, (w, 1), (w, 1.0), "'times'"),
    "values": (nonzero, (ones(2),), (torch.tensor([1.0, 0.0]),), "return"),
    "dtype of the result": (cast, (w, torch.float32), (w, torch.float64), "return"),
    "text of a Literal": (named, (w, "{n}"), (w, "third"), "'name'"),
    "number of a Literal": (named, (w, 0), (w, 1), "'name'"),
    "Literal in a tuple": (counted_in, (w, False), (w, True), "return"),
    "tensor for a list": (signs, (w,), (-w,), "return"),
    "list for a tensor": (unlisted, (w,), (-w,), "return"),
    "class of a result": (to_masked, (w,), (-w,), "return"),
    "validator": (all_positive, (w,), (-w,), "'x'"),
    "Parameter": (parameter, (nn.Parameter(w),), (w,), "'x'"),
    "tensor that says that it is a Parameter": (
        parameter,
        (masked("_is_param"),),
        (masked("other"),),
        "'x'",
    ),
    "Protocol": (has_scale, (masked("scale"),), (masked("other"),), "'x'"),
    "array of numpy": (
        from_numpy,
        (np.ones((2, 3), np.float32),),
        (np.ones((2, 4), np.float32),),
        "'x'",
    ),
    "size that is no integer of Python": (
        take,
        (x, np.int64(2), ones(2)),
        (x, np.int64(2), ones(3)),
        "'y'",
    ),
    "class": (build, (nn.Linear,), (int,), "'kind'"),
    "function": (build, (nn.Linear, len), (nn.Linear, 3), "'of'"),
    "object": (applied, (w, Gain(3)), (w, Model()), "'gain'"),
    "values of keywords": (counted, ({"a": 1},), ({"a": "no"},), "'options'"),
    "object with a shape": (squared, (Area(),), (3,), "'area'"),
    "wrong argument where the default is a tensor": (
        with_default_tensor,
        (w,),
        (w, ones(1)),
        "'scale'",
    ),
}
