"""What typecheck guarantees in eager mode beside the cases of calls.py."""

import types
from collections.abc import Callable
from typing import Any, Self

import pytest
import torch
from jaxtyping import AnnotationError, Float, Float32, TypeCheckError
from torch import Tensor

from tinyblock.typecheck import typecheck

ones = torch.ones
x = ones(2, 3)
w = ones(3)


@pytest.mark.parametrize(
    "wrong", [w.double(), ones(4), None], ids=["a dtype", "a size", "None"]
)
def test_a_wrong_result_raises_after_a_right_one(wrong):
    results = iter([w, wrong])

    @typecheck
    def draw(x: Float[Tensor, " n"]) -> Float32[Tensor, " n"]:
        return next(results)

    draw(w)
    with pytest.raises(TypeCheckError):
        draw(w)


def test_braces_of_a_result_are_read_after_the_call():
    @typecheck
    def add(
        x: Float[Tensor, " d"], rows: Any, more: int
    ) -> Float[Tensor, "{len(rows)} d"]:
        rows.extend([x] * more)
        return x.expand(1, -1)

    add(w, [], 1)
    with pytest.raises(TypeCheckError, match=r"len\(rows\)=2"):
        add(w, [], 2)


def test_a_result_without_annotation_is_not_checked(module):
    assert module.without_result(w) == [w]
    with pytest.raises(TypeCheckError):
        module.without_result(x)


def test_an_integer_is_a_float(module):
    module.scale(x, w, 2)


def test_a_default_is_right_whatever_its_annotation_says(module):
    for _ in range(2):
        module.without_weight(w)
        module.without_weight(w, None)
        with pytest.raises(TypeCheckError):
            module.without_weight(w, 0.5, 0.25)  # of the type of the wrong default


def test_the_message_names_function_argument_axis_and_sizes(module):
    layer = module.Layer(3)
    layer(x)
    with pytest.raises(TypeCheckError) as caught:
        layer(ones(2, 4))
    assert str(caught.value) == (
        "Type-check error whilst checking the parameters of users_module.Layer.forward.\n"
        "The problem arose whilst typechecking parameter 'x'.\n"
        "Actual value: f32[2,4](torch)\n"
        "Expected type: <class 'Float[Tensor, '*batch self.width']'>.\n"
        "The size of dimension self.width is 4 which does not equal the existing value of 3.\n"
        "----------------------\n"
        "Called with parameters: {'self': Layer(...), 'x': f32[2,4](torch)}\n"
        "Parameter annotations: (self, x: Float[Tensor, '*batch self.width']) -> Any.\n"
        "The current values for each jaxtyping axis annotation are as follows.\n"
        "self.width=3"
    )


def test_braces_are_read_at_each_call(module):
    layer = module.Layer(3)
    layer(x)
    layer.width = 4
    layer(ones(2, 4))
    with pytest.raises(TypeCheckError, match=r"self\.width=4"):
        layer(x)


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda module: module.Layer(3)(), r"^Layer\.forward\(\) missing .* 'x'$"),
        (lambda module: module.doubled(x=w), "positional-only"),
        (lambda module: module.scale(x, w, by=2), "unexpected keyword argument 'by'"),
        (lambda module: module.limited(x=w), "3 is too long"),
    ],
    ids=["missing", "positional", "keyword", "its own"],
)
def test_functions_raise_their_own_errors(compiles, call, message, module):
    if compiles:
        call = torch.compile(call, backend="eager")
    with pytest.raises((TypeError, RuntimeError), match=message):
        call(module)


@typecheck
class Builder:
    def add(self, weight: Float[Tensor, " n"], bias: Float[Tensor, " n"]) -> Self:
        return self

    def find(self, weight: Float[Tensor, " n"]) -> Self | None:
        return self

    def join(self, other: "Builder | Tensor") -> None:
        pass


def test_a_method_may_return_self_and_take_its_own_class():
    builder = Builder()
    assert builder.add(w, w) is builder
    assert builder.find(w) is builder
    builder.join(builder)
    with pytest.raises(TypeCheckError):
        builder.add(w, x)
    with pytest.raises(TypeCheckError):
        builder.join(3)  # type: ignore[arg-type]


@typecheck
def takes(
    x: "Float[LaterTensor, ' {1*size}']",
    size: Any,
    y: "Later",
    z: Float[Tensor, "2*{size}"],
) -> None:
    pass


class Later:
    pass


LaterTensor = Tensor


def test_a_name_may_be_defined_later():
    takes(w, 3, Later(), ones(6))
    with pytest.raises(TypeCheckError):
        takes(w, 4, Later(), ones(8))
    with pytest.raises(TypeCheckError):
        takes(w, 3, w, ones(6))  # type: ignore[arg-type]
    compiled = torch.compile(takes, backend="eager", fullgraph=True)
    compiled(w, 3, Later(), ones(6))
    with pytest.raises(RuntimeError, match="parameter 'z'"):
        compiled(w, 3, Later(), ones(5))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("half", "cannot check parameter 'of' of users_module.half: name 'Fraction'"),
        ("renamed_class", "parameter 'of' .*no attribute 'NotThere'"),
    ],
)
def test_a_name_that_is_not_there_causes_one_warning(name, message, module):
    function = getattr(module, name)
    with pytest.warns(UserWarning, match=message) as caught:
        function(w, 2)
    assert len(caught) == 1, [str(warning.message) for warning in caught]
    assert caught[0].filename == __file__
    function(w, 2)
    with pytest.raises(TypeCheckError):
        function(w.int(), 2)


@pytest.mark.parametrize("axis", ["{n", "n}", "{n!z}", "{}", "{n n}", "{f(a=1)}"])
def test_braces_that_cannot_be_read_are_an_error_that_names_the_parameter(axis):
    def right(x: Float[Tensor, " n"]) -> None:
        pass

    def wrong(x: Float[Tensor, " n"], y: Float[Tensor, axis]) -> None:
        pass

    module = types.ModuleType(__name__)
    vars(module).update(right=right, wrong=wrong)
    with pytest.raises(AnnotationError, match=r"parameter 'y' of .*wrong"):
        typecheck(module)
    assert module.right is right  # no half of a module is checked


def test_an_annotation_that_jaxtyping_rejects_is_an_error_that_names_the_parameter():
    def two(x: "Float[Tensor, '*a *b']") -> None:
        pass

    with pytest.raises(
        AnnotationError, match=r"parameter 'x' of .*two.*more than once"
    ):
        typecheck(two)


def no_attribute(x: Float[Tensor, "{x.no_attribute}"], size: Any) -> None:
    pass


def some_global(x: Float[Tensor, " n"], size: Any) -> Float[Tensor, "{SOME_GLOBAL}"]:
    return x


def no_number(x: Float[Tensor, "{size}"], size: Any) -> None:
    pass


@pytest.mark.parametrize("function", [no_attribute, some_global, no_number])
def test_braces_that_have_no_value_are_an_error_that_names_the_function(function):
    with pytest.raises(
        AnnotationError, match=rf"cannot read .* of .*{function.__name__}"
    ):
        typecheck(function)(w, size="2*n")


# What is remembered --------------------------------------------------------------------


class Array:
    """An array that counts how often its shape is read: once by typecheck itself."""

    dtype = "float32"
    reads = 0

    def __init__(self, *shape):
        self.sizes = shape

    @property
    def shape(self):
        Array.reads += 1
        return self.sizes


def is_judged(function, *args, **kwargs):
    before = Array.reads
    function(*args, **kwargs)
    return Array.reads > before + 1


@pytest.fixture
def remembered():
    @typecheck
    def remembered(
        x: Float[Array, " n"],
        value: object = None,
        number: float = 0.0,
        pair: tuple[float, Float[Array, " m"]] | None = None,
        of: Callable[..., Any] | None = None,
        ignored: Any = None,
    ) -> None:
        pass

    return remembered


@pytest.mark.parametrize("value", [1, 1.0, True, "1", int, len, [1], object(), None])
def test_a_known_signature_is_not_judged_again(value, remembered):
    assert is_judged(remembered, Array(3), value, ignored=[])
    assert not is_judged(remembered, Array(3), value, ignored=())
    assert is_judged(remembered, Array(3), value, of=len)
    assert not is_judged(remembered, Array(3), value, of=len)
    assert is_judged(remembered, Array(4), value)


def test_a_number_counts_by_its_type(remembered):
    assert is_judged(remembered, Array(3), number=0.5)
    for number in range(2000):  # more than are remembered
        assert not is_judged(remembered, Array(3), number=number + 0.25)


def test_a_tuple_counts_by_its_items(remembered):
    first, second = (remembered, Array(3)), Array(2)
    assert is_judged(*first, pair=(0.5, second))
    reads = Array.reads
    remembered(Array(3), pair=(1.5, second))
    assert Array.reads == reads + 2
    with pytest.raises(TypeCheckError):
        remembered(Array(3), pair=(second, 1.5))


def test_a_bounded_number_of_signatures_is_remembered(remembered):
    for length in range(1025):
        assert is_judged(remembered, Array(length))
    assert is_judged(remembered, Array(0))  # all were forgotten
    assert not is_judged(remembered, Array(1024))
