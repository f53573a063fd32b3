"""typecheck in eager mode: wrong calls raise, also after a right call."""

import inspect
import sys
from typing import Any, NamedTuple, Self

import jaxtyping
import pytest
import torch
from jaxtyping import Float, Float32, TypeCheckError
from torch import Tensor, nn

from tinyblock.typecheck import typecheck

ones = torch.ones
x = ones(2, 3)
w = ones(3)


class Case(NamedTuple):
    function: str
    right: tuple[Any, ...]
    wrong: tuple[Any, ...]


class TensorSubclass(Tensor):
    """As DTensor is one."""


def with_attribute(name, value):
    """Return a tensor that only this attribute tells from others."""
    tensor = ones(3).as_subclass(TensorSubclass)
    setattr(tensor, name, value)
    return tensor


EAGER_CALLS = {
    "size": Case("scale", (x, w), (x, ones(4))),
    "size of 1, which torch broadcasts": Case("scale", (x, w), (x, ones(1))),
    "dtype": Case("scale", (x, w), (x.int(), w)),
    "text for a number": Case("scale", (x, w, 2.0), (x, w, "2.0")),
    "True and 1.0 for an integer": Case("repeat", (w, 1), (w, 1.0)),
    "integer for a flag": Case("flagged", (w, True), (w, 1)),
    "result, by values": Case("nonzero", (ones(2),), (torch.tensor([1.0, 0.0]),)),
    "result, by an argument in braces": Case("nonzero", (w, 3), (w, 2)),
    "dtype of the result": Case("cast", (w, torch.float32), (w, torch.float64)),
    "several arguments of one parameter": Case("count", (w, w), (w, ones(4))),
    "text of a Literal": Case("named", (w, "{n}"), (w, "third")),
    "container": Case("listed", (w,), (-w,)),
    "TypeVar with braces": Case("bound", (x, 2), (x, 3)),
    "NewType with braces": Case("renamed", (x, 2), (x, 3)),
    "validator of values": Case("positive", (w,), (-w,)),
    "Parameter": Case("parameter", (nn.Parameter(w),), (w,)),
    "subclass that is a Parameter": Case(
        "parameter",
        (with_attribute("_is_param", True),),
        (with_attribute("_is_param", False),),
    ),
    "Protocol": Case(
        "scaled_tensor",
        (with_attribute("scale", 1.0),),
        (with_attribute("other", 1.0),),
    ),
    "Protocol in a union": Case(
        "scaled_tensor_or_number",
        (with_attribute("scale", 1.0),),
        (with_attribute("other", 1.0),),
    ),
    "result that is a list in a first call": Case("unlisted", (ones(2),), (-w,)),
    "class of a result": Case("to_masked", (w,), (-w,)),
    "argument that equals a default": Case("with_default", (w,), (w, ones(1))),
    "wrong argument where None is a wrong default": Case(
        "without_weight", (w,), (w, ones(1))
    ),
    "names of the generated code": Case("clashing", (w, w, w), (w, w, ones(2))),
    "function in a decorator": Case("decorated", (w,), (x,)),
    "default in braces": Case("configured", (w,), (ones(4),)),
    "class": Case("Layer", (3, nn.Linear), (3, int)),
}


@pytest.mark.parametrize("case", EAGER_CALLS.values(), ids=EAGER_CALLS)
def test_a_wrong_call_raises_after_a_right_one(case, module):
    function = getattr(module, case.function)
    for _ in range(2):
        function(*case.right)
        with pytest.raises(TypeCheckError):
            function(*case.wrong)


def test_a_plain_tensor_does_not_fit_a_subclass(module):
    module.masked(w.as_subclass(module.Masked))
    with pytest.raises(TypeCheckError):
        module.masked(w)


def test_an_integer_is_a_float(module):
    module.scale(x, w, 2)


def test_the_values_of_keywords_are_checked(module):
    module.count(w, number=1)
    with pytest.raises(TypeCheckError):
        module.count(w, number="no")


def test_a_keyword_only_argument_is_checked(module):
    module.decorated(w, bias=2.0)
    with pytest.raises(TypeCheckError):
        module.decorated(w, bias=None)


def test_a_positional_only_argument_is_checked_and_passed_by_position(module):
    assert module.doubled(torch.ones(3)).sum() == 6
    with pytest.raises(TypeCheckError):
        module.doubled(torch.ones(3, 3))
    with pytest.raises(TypeError, match="positional-only"):
        module.doubled(x=torch.ones(3))


def test_a_result_without_annotation_is_not_checked(module):
    assert module.without_result(torch.ones(3)).sum() == 6
    with pytest.raises(TypeCheckError):
        module.without_result(torch.ones(3, 3))


@pytest.mark.parametrize(
    "wrong",
    [torch.ones(3).double(), torch.ones(4), None],
    ids=["a dtype", "a size", "None"],
)
def test_a_wrong_result_raises_after_a_right_one(wrong):
    results = iter([torch.ones(3), wrong])

    @typecheck
    def draw(x: Float[Tensor, " n"]) -> Float32[Tensor, " n"]:
        return next(results)

    draw(torch.ones(3))
    with pytest.raises(TypeCheckError):
        draw(torch.ones(3))


def test_a_default_is_right_whatever_its_annotation_says(module):
    for _ in range(2):
        module.without_weight(w)
        module.without_weight(w, None)


def test_a_default_counts_where_braces_name_it(module):
    assert len(module.repeat(w)) == 6
    assert len(module.clashing(w, w, w)) == 6


def test_an_optional_argument_may_be_none_and_nothing_else(module):
    layer = module.Layer(3)
    assert layer(None) is None
    with pytest.raises(TypeCheckError):
        layer(3)


def test_the_message_names_function_argument_shape_and_expected_size(module):
    layer = module.Layer(3)
    layer(x)
    message = r"(?s)users_module.Layer\.forward.*'x'.*f32\[2,4\].*self\.width=3"
    with pytest.raises(TypeCheckError, match=message):
        layer(ones(2, 4))


def test_braces_are_read_at_each_call(module):
    layer = module.Layer(3)
    layer(x)
    layer.width = 4
    layer(ones(2, 4))
    with pytest.raises(TypeCheckError, match=r"self\.width=4"):
        layer(x)


def test_a_missing_argument_is_an_error_of_python(module):
    with pytest.raises(TypeError, match=r"^Layer\.forward\(\) missing .* 'x'$"):
        module.Layer(3)()


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_functions_raise_their_own_errors(compiles, module):
    # Where a compiled call raises, it runs again in eager mode, while dynamo traces.
    limited = module.limited
    if compiles:
        limited = torch.compile(limited, backend="eager")
    with pytest.raises(RuntimeError, match="3 is too long"):
        limited(x=w)


@typecheck
class Builder:
    def add(self, weight: Float[Tensor, " n"], bias: Float[Tensor, " n"]) -> Self:
        return self

    def find(self, weight: Float[Tensor, " n"]) -> Self | None:
        return self


def test_a_method_may_return_self():
    builder = Builder()
    assert builder.add(w, w) is builder
    assert builder.find(w) is builder
    with pytest.raises(TypeCheckError):
        builder.add(w, x)


@typecheck
def takes(x: "Later") -> None:
    pass


class Later:
    pass


def test_a_wrong_call_raises_for_a_class_that_is_defined_later():
    takes(Later())
    with pytest.raises(TypeCheckError):
        takes(torch.ones(3))  # type: ignore[arg-type]


@typecheck
def takes_size(x: "Float[LaterTensor, ' {size}']", size: Any) -> None:
    pass


LaterTensor = Tensor


def test_braces_are_read_at_each_call_for_a_class_that_is_defined_later():
    takes_size(w, 3)
    with pytest.raises(TypeCheckError):
        takes_size(w, 4)


def test_a_name_that_exists_only_for_type_checkers_causes_one_warning(module):
    message = "cannot check parameter 'of' of users_module.half: name 'Fraction' is not"
    with pytest.warns(UserWarning, match=message) as caught:
        module.half(w, 2)
    assert len(caught) == 1, [str(warning.message) for warning in caught]
    module.half(w, 2)
    with pytest.raises(TypeCheckError):
        module.half(w.int(), 2)


def test_an_attribute_that_a_module_lacks_causes_one_warning(module):
    message = "parameter 'of' .*no attribute 'NotThere'"
    with pytest.warns(UserWarning, match=message) as caught:
        module.renamed_class(w)
    assert len(caught) == 1, [str(warning.message) for warning in caught]
    with pytest.raises(TypeCheckError):
        module.renamed_class(x)


@pytest.fixture
def checks(monkeypatch):
    """A list that grows with each check of jaxtyping."""
    done = []

    def counted(function, typechecker):
        check = jaxtyping.jaxtyped(function, typechecker=typechecker)

        def counting(*args, **kwargs):
            done.append(function.__name__)
            return check(*args, **kwargs)

        return counting

    monkeypatch.setattr(sys.modules[typecheck.__module__], "jaxtyped", counted)
    return done


@pytest.fixture
def remembered(module):
    """A function of which typecheck has seen no call."""
    return typecheck(inspect.unwrap(module.remembered))


@pytest.mark.parametrize(
    "value", [1, 1.0, True, "1", int, torch.float32, torch.device("cpu"), None]
)
def test_a_known_signature_is_not_checked_again(value, checks, remembered):
    for _ in range(3):
        remembered(w, value=value, ignored=[])
    assert len(checks) == 2  # the arguments and the result


def test_a_bounded_number_of_signatures_is_remembered(checks, remembered):
    for length in (*range(1000), *range(1100), 0):
        remembered(ones(length))
    assert len(checks) == 2 * 1101  # no length is new in the second thousand
