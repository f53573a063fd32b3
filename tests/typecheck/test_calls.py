"""What typecheck guarantees beside the verdicts of jaxtyping and beartype."""

import contextlib
import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, ParamSpec, Protocol, Self

import numpy as np
import pytest
import torch
from beartype.vale import Is
from blamed import blamed
from jaxtyping import AnnotationError, Float, TypeCheckError
from torch import Tensor, nn
from torch.export import Dim

from tinyblock.typecheck import typecheck

ones = torch.ones
x = ones(2, 3)
w = ones(3)
ONE = ones(1)
CONFIG = types.SimpleNamespace(width=3)


@pytest.fixture(params=["eager", "compiled"])
def in_mode(request):
    """Return a function that makes calls run in a mode; compiled, without a graph break."""
    if request.param == "eager":
        return lambda function: function
    return functools.partial(
        torch.compile, backend="eager", fullgraph=True, dynamic=True
    )


@contextlib.contextmanager
def raises(where):
    """Expect an error that blames this place, also within torch.compile's own error."""
    with pytest.raises((TypeCheckError, RuntimeError)) as caught:
        yield
    assert blamed(caught.value) == where, caught.value


class Scale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    @typecheck
    def forward(
        self, x: Float[Tensor, "*batch {self.width}"]
    ) -> Float[Tensor, "*batch {self.width}"]:
        return 2 * x


def test_each_call_reads_braces_anew(in_mode):
    layer = Scale(3)
    call = in_mode(layer)
    call(x)
    layer.width = 4
    call(ones(2, 4))
    with raises("x"):
        call(x)


class Cache:
    """A cache of keys, of which each call changes the length."""

    def __init__(self) -> None:
        self.keys = ones(2, 4)
        self.length = 2

    @typecheck
    def append(
        self,
        keys: Float[Tensor, "new 4"],
        mask: Float[Tensor, " {self.length}"],
        start: int,
    ) -> Float[Tensor, "{self.length} 4"]:
        self.keys = torch.cat((self.keys, keys))
        self.length = len(self.keys)
        return self.keys[start:]


def test_braces_of_parameters_are_read_before_the_call_and_of_results_after_it(in_mode):
    @in_mode
    def append(mask, start):
        cache = Cache()
        cache.append(ones(1, 4), ones(2), 0)
        return cache.append(ones(2, 4), mask, start)

    append(ones(3), 0)
    with raises("mask"):
        append(ones(2), 0)
    with raises("return value"):
        append(ones(3), 1)


@typecheck
def configured(
    x: Float[Tensor, " {config.width}"],
    bias: Float[Tensor, " {config.width}"] = None,  # type: ignore[assignment]  # wrong
    scale: Float[Tensor, " {config.width}"] = ONE,  # wrong, too: it is of width 1
    config: Any = CONFIG,
) -> Tensor:
    return x * scale


def test_a_default_is_right_whatever_its_annotation_says(in_mode):
    call = in_mode(configured)
    call(w)
    call(w, None)
    call(w, w, w)
    for wrong in (2, ones(1)):
        with raises("bias"):
            call(w, wrong)
    with raises("x"):
        call(x)


def test_in_eager_mode_an_argument_that_equals_a_wrong_default_is_checked():
    """Compiled code cannot tell it from the default, so it checks neither."""
    with raises("scale"):
        configured(w, scale=ones(1))


@typecheck
def joined(xs: tuple[Float[Tensor, "n d"], ...]) -> tuple[Float[Tensor, "n d"], ...]:
    return (*xs, xs[0] if len(xs) == 10 else ones(1))


def test_all_items_of_a_tuple_are_checked(in_mode):
    """Beartype alone would check one of them, at random."""
    call = in_mode(joined)
    call((x,) * 10)
    with raises("xs"):
        call((*(x,) * 9, ones(2, 4)))
    with raises("return value"):
        call((x,) * 11)


@typecheck
def paired(pair: tuple[Float[Tensor, " n"], int, str]) -> Tensor:
    return pair[0] + 1


def test_each_item_of_a_tuple_is_compared_with_its_own_class(in_mode):
    call = in_mode(paired)
    call((w, 1, "a"))
    with raises("pair"):
        call((w, "a", 1))


def test_equal_unions_of_two_modules_are_understood():
    """Beartype rejected the right calls of the second module, when typecheck passed
    Union[A, B] to it for `x`: it remembered this as the equal A | B of `*xs`.
    """
    for _ in ("first module", "second module"):
        Number = Float[Tensor, " width"] | float

        @typecheck
        def several(*xs: Number) -> None:
            pass

        @typecheck
        def one(x: Number) -> None:
            pass

        several(w, 2.0)
        one(w)


@typecheck
def positive(x: Annotated[Tensor, Is[lambda x: bool((x > 0).all())]]) -> None:
    pass


def test_a_validator_of_values_is_asked_at_each_call_in_eager_mode():
    positive(w)
    with raises("x"):
        positive(-w)


def test_a_class_that_looks_into_a_value_is_asked_at_each_call():
    """A tensor of a subclass is an nn.Parameter if it has an attribute."""

    class Masked(Tensor):
        pass

    @typecheck
    def train(weight: nn.Parameter) -> None:
        pass

    weight: Any = w.as_subclass(Masked)
    weight._is_param = True
    train(weight)
    with raises("weight"):
        train(w.as_subclass(Masked))  # type: ignore[arg-type]


def test_a_function_under_a_decorator_is_refused_and_one_below_it_is_checked(in_mode):
    def scale(x: Float[Tensor, "n d"], gain: Float[Tensor, " d"]) -> Tensor:
        return x * gain

    with pytest.raises(TypeError, match="put @typecheck below the other decorators"):
        typecheck(torch.no_grad()(scale))
    call = in_mode(torch.no_grad()(typecheck(scale)))
    call(x, w)
    with raises("gain"):
        call(x, ONE)


@typecheck
def limit(x: Float[Tensor, " n"], /, *, scale: float) -> Float[Tensor, " n"]:
    if len(x) > 3:
        raise RuntimeError(f"{len(x)} is too long")
    return x


limited: Any = limit  # for mypy, a function that takes any arguments


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: limited(scale=2.0), r"^limit\(\) missing .* 'x'$"),
        (lambda: limited(x=w, scale=2.0), "positional-only"),
        (lambda: limited(w, scale=2.0, by=2), "unexpected keyword argument 'by'"),
        (lambda: limited(ones(4), scale=2.0), "4 is too long"),
    ],
    ids=["missing", "positional", "keyword", "its own"],
)
def test_functions_raise_their_own_errors(compiles, call, message):
    if compiles:
        call = torch.compile(call, backend="eager")
    with pytest.raises((TypeError, RuntimeError), match=message):
        call()


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("size", [np.int64(3), torch.tensor(3), "3", [3], 3.0])
def test_a_size_that_is_no_int_is_an_error_that_names_it(size, compiles):
    @typecheck
    def sized(x: Float[Tensor, " {size}"], size: Any) -> Tensor:
        return x + 1

    call = torch.compile(sized, backend="eager") if compiles else sized
    with pytest.raises(TypeCheckError, match=r"\{size\} must be an int, got"):
        call(w, size)


def test_what_a_compiler_does_not_know_loses_only_itself():
    """A size of a list, and the sizes that depend on values."""

    @typecheck
    def known(
        some: list[Float[Tensor, " n"]],
        next: Float[Tensor, " n+1"],
        q: Float[Tensor, " d"],
        k: Float[Tensor, " d"],
    ) -> Tensor:
        return q

    @typecheck
    def counted(x: Float[Tensor, " n"]) -> Tensor:
        return x

    def select(x):
        return counted(x[x > 0])

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        select = torch.compile(select, backend="eager")
        select(w)
        with pytest.raises(TypeCheckError, match=r"x must be .*, got int64"):
            select(w.long())
    compiled = torch.compile(known, backend="eager")
    compiled([w], w[:1].expand(4), w, w)
    with pytest.raises(TypeCheckError, match="k"):
        compiled([w], w[:1].expand(4), w, w[:2])


# Errors --------------------------------------------------------------------------------


@typecheck
def scores(
    q: Float[Tensor, "*batch query d"], k: Float[Tensor, "*#batch key d"], n: int = 2
) -> tuple[Float[Tensor, "*batch query key"], Float[Tensor, "{n} 2*d"]]:
    return q @ k.mT, ones(2, 4)


def call_scores(*arguments):
    return scores(*arguments)  # the line that an error shows


CALLER = f"{Path(__file__).name}:{call_scores.__code__.co_firstlineno + 1}: "
CALLER += "return scores(*arguments)  # the line that an error shows\n"
QUERY = ones(2, 3, 5, 2)
TABLES = [
    (
        (QUERY, ones(2, 3, 7, 8)),
        "   *batch[-2]  *batch[-1]  query  d  key\n"
        "q           2           3      5  2\n"
        "k           2           3         8    7\n"
        "                                  ^  d is 2 in q",
    ),
    (
        (QUERY, ones(4, 1, 7, 2)),
        "   *batch[-2]  *batch[-1]  query  d  key\n"
        "q           2           3      5  2\n"
        "k           4           1         2    7\n"
        "            ^  *batch[-2] is 2 in q",
    ),
    (
        (QUERY, ones(2, 3, 7, 2), 5),
        "                 *batch[-2]  *batch[-1]  query  d  key  {n}  2*d\n"
        "q                         2           3      5  2\n"
        "k                         2           3         2    7\n"
        "return value[0]           2           3      5       7\n"
        "return value[1]                                           2    4\n"
        "                                                          ^  n is 5",
    ),
    (
        (ones(5, 3), ones(7, 3)),
        "                 query  d  key  {n}  2*d\n"
        "q                    5  3\n"
        "k                       3    7\n"
        "return value[0]      5       7\n"
        "return value[1]                   2    4\n"
        "                                       ^  must be 2*d",
    ),
    (
        (QUERY, ones(7)),
        "   *batch[-2]  *batch[-1]  query  d\n"
        "q           2           3      5  2\n"
        'k must be Float[Tensor, "*#batch key d"], got float32 of shape (7,)',
    ),
    (
        (QUERY.int(), QUERY),
        'q must be Float[Tensor, "*batch query d"], got int32 of shape (2, 3, 5, 2)',
    ),
    (
        (QUERY, [QUERY]),
        "   *batch[-2]  *batch[-1]  query  d\n"
        "q           2           3      5  2\n"
        'k must be Float[Tensor, "*#batch key d"], got list',
    ),
]


@pytest.mark.parametrize(("arguments", "table"), TABLES)
def test_the_message_is_the_line_of_the_call_and_a_table_of_axes(arguments, table):
    for call in (call_scores, torch.compile(call_scores, backend="eager")):
        with pytest.raises(TypeCheckError) as caught:
            call(*arguments)
        assert str(caught.value) == CALLER + table


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(("arguments", "table"), [TABLES[0], TABLES[2], TABLES[6]])
def test_with_fullgraph_torchs_error_has_the_same_message(dynamic, arguments, table):
    call = torch.compile(call_scores, backend="eager", fullgraph=True, dynamic=dynamic)
    with pytest.raises(RuntimeError) as caught:
        call(*arguments)
    lines = [line.strip() for line in str(caught.value).splitlines()]
    first = next(i for i, line in enumerate(lines) if CALLER.strip() in line)
    count = len(table.splitlines())
    found = " ".join(lines[first + 1 : first + 1 + count]).removesuffix(".")
    assert found.split() == table.split()


def test_an_axis_may_depend_on_another_one_of_its_array():
    @typecheck
    def steps(x: Float[Tensor, "n n+1"]) -> None:
        pass

    with pytest.raises(TypeCheckError) as caught:
        steps(ones(2, 2))
    assert str(caught.value).partition("\n")[2] == (
        "   n  n+1\nx  2    2\n        ^  must be n+1"
    )


def test_axes_of_batch_stand_in_their_order_where_a_later_row_has_more():
    @typecheck
    def wrong(x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
        return ones(2, 4, 3)

    with pytest.raises(TypeCheckError) as caught:
        wrong(x)
    assert str(caught.value).partition("\n")[2] == (
        "              *batch[-2]  *batch[-1]  n\n"
        "x                                  2  3\n"
        "return value           2           4  3\n"
        "                                   ^  *batch[-1] is 2 in x"
    )


def test_a_traceback_has_no_frames_of_typecheck():
    """As pytest shows it, in eager mode and in torch.export."""

    def export():
        layer = Scale(3)
        torch.export.export(layer, (ones(2, 4),), dynamic_shapes=({0: Dim("n")},))

    for call in (lambda: Scale(3)(ones(2, 4)), export):
        with pytest.raises(TypeCheckError) as caught:
            call()
        frames = caught.traceback.filter(caught)
        files = [str(frame.path) for frame in frames]
        assert __file__ in files
        assert inspect.getfile(typecheck) not in files


@pytest.mark.parametrize(
    "annotation",
    [f"Float[Tensor, '{axis}']" for axis in ("{n", "n}", "{n!z}", "{}", "{n n}")]
    + ["Float[Tensor, '{f(a=1)}']", "Float[Tensor, '*a *b']"],
)
def test_an_annotation_that_cannot_be_read_is_an_error_that_names_the_parameter(
    annotation,
):
    def right(x: Float[Tensor, " n"]) -> None:
        pass

    def wrong(x: Float[Tensor, " n"], y: Any) -> None:
        pass

    wrong.__annotations__["y"] = annotation
    module = types.ModuleType(__name__)
    vars(module).update(right=right, wrong=wrong)
    with pytest.raises(AnnotationError, match=r"annotation of 'y' in .*wrong"):
        typecheck(module)
    assert module.right is right  # no half of a module is checked


def test_braces_that_name_no_parameter_are_an_error_at_decoration():
    def some_global(x: Float[Tensor, " n"]) -> Float[Tensor, "{SOME_GLOBAL}"]:
        return x

    with pytest.raises(
        AnnotationError, match=r"some_global: no parameter .*SOME_GLOBAL"
    ):
        typecheck(some_global)


# Names that are not there ------------------------------------------------


@typecheck
class Builder:
    def add(self, weight: Float[Tensor, " n"], other: "Builder | Tensor") -> Self:
        return self

    def find(self, weight: Float[Tensor, " n"]) -> Self | None:
        return self


def test_a_method_may_return_self_and_take_its_own_class():
    builder = Builder()
    assert builder.add(w, builder) is builder
    assert builder.find(w) is builder
    with pytest.raises(TypeCheckError):
        builder.add(x, builder)
    with pytest.raises(TypeCheckError):
        builder.add(w, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("annotation", "message"),
    [
        ("Fractoin | None", "annotation of 'of' in .*misspelled: name 'Fractoin'"),
        ("torch.NotThere", "annotation of 'of' .*no attribute 'NotThere'"),
    ],
)
def test_a_name_that_is_not_there_causes_a_warning_and_loses_only_itself(
    annotation, message
):
    def misspelled(x: Float[Tensor, " n"], of: Any = None) -> None:
        pass

    misspelled.__annotations__["of"] = annotation
    with pytest.warns(UserWarning, match=message) as caught:
        checked = typecheck(misspelled)
    assert [warning.filename for warning in caught] == [__file__]
    checked(w, 3)
    with pytest.raises(TypeCheckError):
        checked(w.int(), 3)


# What is remembered --------------------------------------------------------------------


class Asked(type):
    """Its classes take everything, and count how often they are asked: by each check."""

    count = 0

    def __subclasscheck__(cls, other: type) -> bool:
        Asked.count += 1
        return True


class Anything(metaclass=Asked):
    pass


@pytest.fixture
def is_checked():
    """Return a function that makes a call, and says whether it was checked."""

    @typecheck
    def remembered(
        x: Float[Tensor, " n"],
        probe: Anything,
        value: object = None,
        pair: tuple[float, Float[Tensor, " m"]] | None = None,
        of: Callable[..., Any] | None = None,
        mode: Literal["a", 1] = "a",
        ignored: Any = None,
    ) -> None:
        pass

    def is_checked(length, *arguments, **named):
        before = Asked.count
        remembered(ones(length), None, *arguments, **named)  # type: ignore[arg-type]
        return Asked.count > before

    return is_checked


@pytest.mark.parametrize("value", [1, 1.0, True, "1", int, len, [1], object(), None])
def test_a_known_description_is_not_checked_again(value, is_checked):
    assert is_checked(3, value, ignored=[])
    assert not is_checked(3, value, ignored=())
    assert is_checked(3, value, of=len)
    assert not is_checked(3, value, of=len)
    assert is_checked(4, value)
    assert not is_checked(3, value)  # not only the call before is known
    assert is_checked(3, value, mode=1)
    with pytest.raises(TypeCheckError):
        is_checked(3, value, mode=True)


def test_a_number_counts_by_its_type_and_a_tuple_by_its_items(is_checked):
    assert is_checked(3, 0.5, (0.5, ones(2)))
    for number in range(2000):  # more than the descriptions that are remembered
        assert not is_checked(3, number + 0.5, (number / 2, ones(2)))
    with pytest.raises(TypeCheckError):
        is_checked(3, 0.5, (ones(2), 0.5))


def test_all_results_of_equal_calls_are_remembered():
    results = [None, ones(2)] * 2
    probe: Any = None

    @typecheck
    def alternating(x: Anything) -> Float[Tensor, " n"] | None:
        return results.pop()

    alternating(probe)
    alternating(probe)
    before = Asked.count
    alternating(probe)
    alternating(probe)
    assert Asked.count == before


def test_a_bounded_number_of_descriptions_is_remembered(is_checked):
    for length in range(1024):
        assert is_checked(length)
    assert not is_checked(0)
    assert is_checked(1024)  # one more than is remembered: the others are forgotten
    assert is_checked(0)
    assert not is_checked(1024)


@dataclasses.dataclass
class Duck:
    """Its shape belongs to the instance."""

    shape: tuple[int, ...]
    dtype: str = "float32"


def test_shapes_of_other_classes_are_asked_at_each_call():
    @typecheck
    def length(x: Float[Duck, " n"], y: Float[Tensor, " n"]) -> None:
        pass

    length(Duck((3,)), w)
    for _ in range(2):
        with raises("y"):
            length(Duck((2,)), w)


# What must not raise, or raises where a function is decorated ----------------------------


P = ParamSpec("P")


def passing(x: Float[Tensor, " n"]) -> Callable[..., Any]:
    def inner(of: Callable[P, Any], *args: P.args, **kwargs: P.kwargs) -> Tensor:
        return x

    checked: Any = typecheck(inner)
    return functools.partial(checked, len)


@pytest.mark.filterwarnings("ignore")  # of nested and lazy tensors
def test_right_calls_of_unusual_values():
    class Shapeless(nn.Module):
        @property
        def shape(self):
            raise RuntimeError("not yet")

        dtype = None

    @typecheck
    def norm(x: Tensor, module: nn.Module, scale: float = 1.0) -> Tensor:
        return x

    nested = torch.nested.nested_tensor([ones(2), ones(3)])
    norm(nested, Shapeless())
    norm(nn.LazyLinear(2).weight, Shapeless())

    passing(w)([1], {}, key=[2])


class NotRunTime(Protocol):
    def scale(self) -> float: ...


def test_annotations_that_cannot_be_checked_are_errors_at_decoration():
    def protocol(x: Float[Tensor, " n"], of: list[NotRunTime]) -> None:
        pass

    with pytest.raises(AnnotationError, match=r"protocol.*of.*@runtime_checkable"):
        typecheck(protocol)

    async def awaited(x: Tensor) -> None:
        pass

    with pytest.raises(TypeError, match="no generator and no coroutine"):
        typecheck(awaited)


def test_in_compiled_code_a_refused_part_loses_only_itself():
    @typecheck
    def parts(
        x: Float[Tensor, " n"] | Sequence[Float[Tensor, " n"]],
        y: Float[Tensor, " n"],
    ) -> tuple[Float[Tensor, " n"], list[int]]:
        return y[:2], [1]

    call = torch.compile(parts, backend="eager", fullgraph=True)
    call([w], ones(2))
    with raises("return value"):
        call(w, w)
    with raises("y"):
        call(w, x)
    broken = torch.compile(
        parts, backend="eager"
    )  # after a graph break, jaxtyping checks
    with raises("return value"):
        broken(w, w)
