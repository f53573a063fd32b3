"""typecheck says what jaxtyping and beartype say, in each mode.

Each annotation of a list stands at each place of a signature: for an argument, for
several, for keywords and for the result. The arguments of a call fit all of the list.
Some calls change one of them. Others have arrays of random annotations, shapes and
dtypes. jaxtyping and beartype check the same calls.
"""

import random
from collections.abc import Callable
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
import pytest
import torch
from beartype import BeartypeConf, beartype
from beartype.vale import Is
from blamed import blamed
from jaxtyping import Bool, Float, Float32, Int, Shaped, TypeCheckError, jaxtyped
from torch import Tensor, nn
from torch.export import Dim
from torch.utils._pytree import tree_map
from typing_extensions import TypeAliasType

from tinyblock.typecheck import typecheck

ones = torch.ones


class Masked(Tensor):
    """A subclass, as DTensor is one."""


class Halves(NamedTuple):
    first: Tensor
    second: Tensor


class Area:
    """Has what arrays have, and is none."""

    shape = 3
    dtype = None


class Typed:
    """Has a dtype, and is no array."""

    dtype = None


@runtime_checkable
class HasScale(Protocol):
    scale: float


def marked(name):
    """Return a tensor that only this attribute tells from others."""
    tensor = ones(2).as_subclass(Masked)
    setattr(tensor, name, True)
    return tensor


Bound = TypeVar("Bound", bound=Float[Tensor, "{count} d"])
Named = NewType("Named", Float[Tensor, "{count} d"])
Item = TypeVar("Item")
Alias = TypeAliasType("Alias", Float[Tensor, "n {count}"])  # type Alias = ...
# type Pair[Item] = ...
Pair = TypeAliasType("Pair", tuple[Item, Item], type_params=(Item,))
Positive = Annotated[Float[Tensor, " n"], Is[lambda x: bool((x > 0).all())]]

# Annotations and values that fit, where n=2, d=3, batch=(4, 2) and count=3.
COMPARED_IN_ALL_MODES: list[tuple[Any, Any]] = [
    (Float[Tensor, "*batch n"], ones(4, 2, 2)),
    (Float[Tensor, "*batch d"], ones(4, 2, 3)),
    (Int[Tensor, "color=3 #d d-n"], ones(3, 1, 1).int()),
    (Bool[Tensor, "#n d"] | None, ones(1, 3).bool()),
    (Float[Tensor, "n 3"] | Float[Tensor, "3 n"], ones(3, 2)),
    (Union[Float[Tensor, " d"], float], 2.0),  # noqa: UP007
    (Float[Tensor, " d"] | float, ones(3).as_subclass(Masked)),
    (
        tuple[Float[Tensor, "n m"], Int[Tensor, " m"]] | None,
        (ones(2, 5), ones(5).int()),
    ),
    (tuple[Float[Tensor, " n"], Tensor], Halves(ones(2), ones(3))),
    (tuple[Float[Tensor, " n"], ...], (ones(2),)),
    (tuple[Float[Tensor, "n {count}"], None], (ones(2, 3), None)),
    (Shaped[Tensor, "m n {count}"], ones(5, 2, 3)),
    (Float[Tensor, "#{count} 2*d+n _"], ones(1, 8, 2)),
    (Float[Tensor, "{x.ndim} ..."], ones(2, 1)),
]
# Compiled code does not compare "*#batch" where sizes are symbols.
COMPARED_WITH_STATIC_SIZES: list[tuple[Any, Any]] = [
    (Float[Tensor, "*batch n"], ones(4, 2, 2)),
    (Float[Tensor, "*#batch d"], ones(1, 2, 3)),
    (Float[Tensor, "*#batch 2*n"], ones(2, 4)),
    (tuple[Float[Tensor, " n"], Area], (ones(2), Area())),
]
COMPARED_IN_EAGER_MODE: list[tuple[Any, Any]] = [
    *COMPARED_WITH_STATIC_SIZES,
    (list[Float[Tensor, "n {count}"]], [ones(2, 3)]),
    (Shaped[Float32[Tensor, "n {count}"], "m"], ones(5, 2, 3)),
    (dict[str, Float[Tensor, " n"]], {"key": ones(2)}),
    (Annotated[Float[Tensor, "n d"], {"of": "a word"}], ones(2, 3)),
    (Annotated[Float[Tensor, " d"], "trained"] | None, None),
    (Bound, ones(3, 3)),
    (Named | None, ones(3, 3)),
    (Alias, ones(2, 3)),
    (Pair[Alias], (ones(2, 3), ones(2, 3))),
    (Positive, ones(2)),
    (Float[Tensor, "{count!s}*{len(args)} ..."], ones(3, 1)),
    (Float[Tensor, "{count}{count} ..."], ones(33, 1)),
    (Float[Tensor, "#{count!r} 2*{count:d}+n _"], ones(1, 8, 2)),
    (Float[Tensor, " {max(count,(lambda:2)())}"], ones(3)),
    (int, 2),
    (bool, True),
    (float, 2.0),
    (Literal["{n}", 0] | None, "{n}"),
    (tuple[Tensor, Literal[1, 2]], (ones(2), 1)),
    (list[Tensor], [ones(2)]),
    (type[nn.Module], nn.Linear),
    (Callable[..., Any], len),
    (Area, Area()),
    (HasScale | float, marked("scale")),
    (Float[Masked, " n"], ones(2).as_subclass(Masked)),
    (tuple[Float[Masked, " n"], int], (ones(2).as_subclass(Masked), 2)),
    (Float[nn.Parameter, " n"], marked("_is_param")),
    (tuple[Float[np.ndarray, " n 3"], int], (np.ones((2, 3), np.float32), 2)),
    (Typed, Typed()),
]


def changes(value):
    """Return values that differ from this one in one respect."""
    changed: list[Any] = [None, 2, 1.0, ones(2, 3)]
    if isinstance(value, Tensor):
        changed += [value[None], value.sum(0), value.as_subclass(Tensor)]
        changed += [value.bool(), value.double(), value.clone()]
        for axis in range(value.ndim):
            changed += [value.narrow(axis, 0, 1), torch.cat((value, value), axis)]
    elif isinstance(value, (tuple, list)):
        changed += [[*value], (*value,), (*value, value[0])]
        kind: Any = list if isinstance(value, list) else tuple
        for place in range(len(value)):
            changed += map(kind, with_changes(value, place))
    elif isinstance(value, dict):
        changed += [{"key": other} for other in changes(value["key"])]
    return changed


def with_changes(items, place):
    """Return these items with each change of the one at a place."""
    return [
        (*items[:place], other, *items[place + 1 :]) for other in changes(items[place])
    ]


class Case(NamedTuple):
    function: Any  # checked
    arguments: Any
    problem: str | None  # what the error of jaxtyping and beartype names

    def __repr__(self) -> str:
        return f"{self.problem}: {self.function.__annotations__}, {self.arguments}"


def call(function, arguments):
    x, first, other, keyword, result, count = arguments
    return function(x, first, other, key=keyword, count=count, result=result)


def problem(function, arguments):
    """Return what the error of a call names, or None if there is no error."""
    try:
        call(function, arguments)
    except (TypeCheckError, RuntimeError) as error:
        return blamed(error)
    return None


def changed_calls(annotations):
    """Yield a function for each annotation, with right calls and some changed ones."""
    rng = random.Random(0)
    for i in range(len(annotations)):
        four = [annotations[i - k] for k in range(4)]
        hints, values = zip(*four, strict=True)
        right = (ones(2, 3), *values)
        calls = [(*right, 3), (*right, 2)]
        for place in range(len(right)):
            calls.append((*rng.choice(with_changes(right, place)), 3))
        yield from compared(hints, calls)


def compared(hints, calls):
    """Yield the cases of these calls to a function with these annotations."""

    # typecheck has variables of the same names.
    def function(x, call, *args, count, result, **kwargs):
        return result

    names = ("call", "args", "kwargs", "return")
    function.__annotations__ = dict(zip(names, hints, strict=True))
    function.__annotations__.update(x=Float[Tensor, "n d"], count=int)
    checked, oracle = typecheck(function), jaxtyping_and_beartype(function)
    for arguments in calls:
        yield Case(checked, arguments, problem(oracle, arguments))


def jaxtyping_and_beartype(function):
    an_int_is_a_float = BeartypeConf(is_pep484_tower=True)
    return jaxtyped(function, typechecker=beartype(conf=an_int_is_a_float))


AXES = ["n", "d", "2", "#n", "#d", "n+1", "_", "{count}", "2*d", "#{count}"]
STARS = ["...", "*batch", "*#batch"]
DTYPES: list[tuple[Any, torch.dtype]] = [
    (Float, torch.float32),
    (Float32, torch.float64),
    (Int, torch.int64),
    (Shaped, torch.bool),
]


def drawn(number, stars):
    """Yield functions with random arrays as annotations, each with one random call.

    Sizes are 1, 2 or 3, and half of them are those that the names have in most arrays.
    """
    rng = random.Random(1)
    sizes = {"n": 2, "d": 3, "n+1": 3, "{count}": 3, "2*d": 6}

    def array():
        kind, dtype = rng.choice(DTYPES if rng.random() < 0.2 else DTYPES[:1])
        axes = rng.choices(AXES, k=rng.randint(0, 3))
        shape = []
        for axis in axes:
            size = sizes.get(axis.lstrip("#"), 2)
            shape.append(size if rng.random() < 0.85 else rng.randint(1, 3))
        if rng.random() < 0.5:
            place = rng.randint(0, len(axes))
            axes.insert(place, rng.choice(stars))
            shape[place:place] = rng.choice([(), (2,), (3, 2), (3, 2), (1, 2)])
        if rng.random() < 0.1:
            shape = shape[1:]
        return kind[Tensor, " ".join(axes)], ones(shape).to(dtype)

    for _ in range(number):
        four = [array() for _ in range(4)]
        hints, values = zip(*four, strict=True)
        yield from compared(hints, [(ones(2, 3), *values, 3)])


@pytest.fixture(scope="module")
def in_all_modes():
    cases = [*changed_calls(COMPARED_IN_ALL_MODES)]
    return [*cases, *drawn(40, STARS[:2])]


@pytest.fixture(scope="module")
def with_static_sizes():
    cases = [*changed_calls(COMPARED_WITH_STATIC_SIZES)]
    return [*cases, *drawn(20, STARS)]


@pytest.fixture(scope="module")
def in_eager_mode():
    cases = [*changed_calls(COMPARED_IN_EAGER_MODE)]
    return [*cases, *drawn(60, STARS)]


def test_eager_mode_decides_as_jaxtyping_and_beartype(in_all_modes, in_eager_mode):
    for case in (*in_all_modes, *in_eager_mode):
        assert problem(case.function, case.arguments) == case.problem, case
        if case.problem is None:  # it is remembered
            assert problem(case.function, case.arguments) is None, case


def test_all_right_calls_compile_to_one_graph(in_all_modes, in_eager_mode):
    """Sizes of 2 and more are symbols, of which a comparison knows less than of numbers."""
    cases = (*in_all_modes, *in_eager_mode)
    right = [case for case in cases if case.problem is None][::3]

    def calls():
        for case in right:
            call(case.function, case.arguments)

    torch.compile(calls, backend="eager", fullgraph=True, dynamic=True)()


def test_compiled_code_decides_wrong_calls_as_jaxtyping_and_beartype(
    in_all_modes, with_static_sizes
):
    """With fullgraph, so that no graph break leads to the checks of eager mode."""
    for cases, dynamic in ((in_all_modes[::3], True), (with_static_sizes, False)):
        for case in (each for each in cases if each.problem is not None):
            torch._dynamo.reset()
            compiled = torch.compile(
                case.function, backend="eager", fullgraph=True, dynamic=dynamic
            )
            assert problem(compiled, case.arguments) == case.problem, case


@pytest.mark.filterwarnings("ignore")  # of torch.export
def test_export_decides_as_jaxtyping_and_beartype(in_all_modes):
    cases = in_all_modes[::10]

    class Calls(nn.Module):
        def forward(self, calls):
            for case, arguments in zip(cases, calls, strict=True):
                assert problem(case.function, arguments) == case.problem, case
            return ones(1)

    def dynamic(value):
        if isinstance(value, Tensor):
            return dict.fromkeys(range(value.ndim), Dim.AUTO)
        return Dim.AUTO if isinstance(value, int) else None

    calls = [case.arguments for case in cases]
    torch.export.export(
        Calls(), (calls,), dynamic_shapes=(tree_map(dynamic, calls),), strict=False
    )
