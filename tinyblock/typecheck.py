"""Shape checks at run time: turn jaxtyping annotations into errors.

`@typecheck` checks a function or a class, and `typecheck(module)` checks the public
functions of a module, and the `__init__` and `forward` of its classes. A call that
violates an annotation raises `jaxtyping.TypeCheckError`, a `TypeError`, which names the
function, the argument, its shape and the expected shape.

A wrapper around each function checks a call in one of two ways.

In eager mode, jaxtyping and beartype check it, which takes 12 to 30 microseconds for
one or two tensors. So the wrapper calls them only if the signature of a call is new.
The signature consists of

- the type, dtype and shape of each tensor,
- the type and value of each number, string, dtype, device or class,
- the type of each function,
- the text of each expression that an annotation has in braces, such as
  `{self.d_model}`.

It leaves out parameters that are unannotated or annotated as Any. A signature must hold
all that an annotation asks for. So calls with any other argument, such as a list, and
functions with any annotation other than classes, arrays, Literal, Callable, and unions
of these, are checked each time.

In code that torch.compile or torch.export traces, jaxtyping cannot run (its issues 196
and 384). So functions of this file compare shapes with annotations. The compiler calls
them while it traces, with tensors that have shapes but no values. A size is a number,
or a symbol that gets a guard when it is compared. So the compiled code has no checks,
and a call with other sizes is traced, and checked, again. After an error, torch.compile
runs the call in eager mode, which raises the error of jaxtyping. With fullgraph=True it
raises an error of its own, which contains this one.

JAXTYPING_DISABLE=1 leaves all functions unwrapped and beartype unimported. So does
`python -O`, with a warning, because beartype checks nothing there.
"""

import contextlib
import functools
import inspect
import linecache
import re
import sys
import warnings
from abc import ABCMeta
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from textwrap import indent
from types import (
    BuiltinFunctionType,
    FunctionType,
    ModuleType,
    SimpleNamespace,
    UnionType,
)
from typing import (
    Any,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import torch
from jaxtyping import TypeCheckError, config, jaxtyped
from torch import Tensor
from torch.compiler import is_dynamo_compiling

__all__ = ["typecheck"]

_Target = TypeVar("_Target")
# A sequence that grows token by token adds one signature per token.
_MAX_SIGNATURES = 1024
_TYPES_BY_VALUE = {
    type(None),
    bool,
    int,
    float,
    str,
    type,
    torch.dtype,
    torch.device,
}
# The metaclasses of classes to which a value belongs by its type alone. A Protocol or
# nn.Parameter, for example, also looks into the value.
_PLAIN_METACLASSES = {type, ABCMeta, type(Tensor)}


def typecheck(target: _Target) -> _Target:
    """Check every call of a function, of a class's methods, or of a module's members.

    Returns the checked function, or the class or module itself, changed in place:

        @typecheck
        def scores(q: Float[Tensor, "query d"], k: Float[Tensor, "key d"]): ...

        from my_package.layers import attention  # after the import
        typecheck(attention)

    - In a class, it checks `__init__` and the public methods that are annotated there.
    - In a module, it checks the public functions that are defined there, and `__init__`
      and `forward` of the classes, so that no time is spent between layers. Public
      names are listed in `__all__` or, without it, do not begin with an underscore.
    - It does not check values, local variables, nested functions, static or class
      methods, properties, generators, coroutines, or functions under `lru_cache`.
    - It does not check an annotation with `Self`, or with a name that does not exist at
      run time (after a warning), as if imported under TYPE_CHECKING. Names are looked
      up again at the first call, so that a class may name itself.

    Raises:
        TypeError: the target is none of these, or a function without annotations.
    """
    if config.jaxtyping_disable:
        return target
    if not __debug__:
        warnings.warn("python -O turns all shape checks off", stacklevel=2)
        return target
    if not isinstance(target, (ModuleType, type)):
        if not _is_checkable(target):
            raise TypeError(
                f"target must be a module, a class, or an annotated function, got {target!r}"
            )
        return _checked_once(target)
    functions = list(_annotated_functions(target))
    if not functions:
        warnings.warn(
            f"typecheck found nothing to check in {target.__name__}: pass its modules",
            stacklevel=2,
        )
    for owner, name, function in functions:
        setattr(owner, name, _checked_once(function))
    return target


def _checked_once(function: Any) -> Any:
    return function if hasattr(function, "__typechecked__") else _checked(function)


def _annotated_functions(
    owner: ModuleType | type,
) -> Iterator[tuple[ModuleType | type, str, FunctionType]]:
    """Yield (owner, name, function) for each public function that is defined there."""
    names = [
        name for name in vars(owner) if name == "__init__" or not name.startswith("_")
    ]
    home = vars(owner).get("__module__", owner.__name__)  # of a class, or the module
    for name in getattr(owner, "__all__", names):
        member: Any = vars(owner).get(name)
        if getattr(member, "__module__", None) != home:
            continue
        if _is_checkable(member):
            yield owner, name, member
        elif isinstance(member, type):
            for method in ("__init__", "forward"):
                function: Any = vars(member).get(method)
                if _is_checkable(function):
                    yield member, method, function


def _is_checkable(member: Any) -> bool:
    """Return whether annotations describe what a call takes and returns."""
    if not isinstance(member, FunctionType) or not member.__annotations__:
        return False
    plain: Any = inspect.unwrap(member)
    return not (
        inspect.isgeneratorfunction(plain) or inspect.iscoroutinefunction(plain)
    )


# The wrapper -------------------------------------------------------------------------


def _checked(function: Any) -> Any:
    """Return a wrapper of `function` that checks each call whose signature is new."""
    hints, unknown = _resolve(function)
    check = _Check(function, hints, unknown)
    known: dict[Any, Any] = {}  # signature of a call -> description of its last result

    # The wrapper below calls this in eager mode.
    def call(signature: tuple[Any, ...], /, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        try:
            last = known.get(signature)
        except TypeError:  # symbolic sizes, as in torch.export, have no hash
            return _call_with_symbols(function, hints, args, kwargs)
        if last is None:
            _untraced(check)(args, kwargs)
        result = function(*args, **kwargs)
        if isinstance(result, Tensor):  # without a call, which would take time
            found: Any = (result.__class__, result.dtype, result.shape)
        else:
            found = _describe(result)
        if found is None or found != last:
            check_result(result, *args, **kwargs)
            _untraced(_remember)(known, signature, found, hints)
        return result

    def check_result(result: Any, /, *args: Any, **kwargs: Any) -> None:
        __tracebackhide__ = True
        _untraced(check)(args, kwargs, result)

    wrapper = _written(function, hints, unknown, call, check_result)
    functools.update_wrapper(wrapper, function)
    vars(wrapper)["__typechecked__"] = True
    return wrapper


def _untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that dynamo does not trace. After an error, it would."""
    if "torch._dynamo" in sys.modules:
        return torch.compiler.disable(function)
    return function


def _remember(
    known: dict[Any, Any], signature: Any, found: Any, hints: dict[str, Any]
) -> None:
    if None in signature or not all(map(_is_known, hints.values())):
        return
    if len(known) >= _MAX_SIGNATURES:
        known.clear()
    known[signature] = found


# The wrapper's code ------------------------------------------------------------------

# The wrapper has the parameters of the function. It is written as code, because a loop
# over its arguments takes twice as long. A $ becomes underscores, so that no name of the
# wrapper is one of the function. For a method with x: Float[Tensor, "{self.size}"]:
#   {parameters} is (self, x), {passed} is self, x,
#   {sizes} is $size_0 = self.size,
#   {signature} is (x.__class__, x.dtype, x.shape) if ..., f"{$size_0}",
#   {compared} is x, $size_0, $result.
_WRAPPER = """\
def $bind({names}):
    def $wrapper{parameters}:
        __tracebackhide__ = True
        {sizes}
        if $is_dynamo_compiling():
{traced}
        $signature = (
{signature}
        )
        return $call($signature, {passed})
    return $wrapper
"""
_TRACED = """\
from torch._dynamo.comptime import comptime as $comptime
$comptime($compare_arguments)  # the compiler calls it while it traces
if $misfit():
    raise $TypeCheckError($misfit())
$result = $function({passed})
if not $is_dynamo_compiling():  # after a graph break in the function
    ({compared})  # a graph break removes the names that are not used after it
    $check_result($result, {passed})
    return $result
$comptime($compare_result)
if $misfit():
    raise $TypeCheckError($misfit())
return $result"""
_PASSED = {
    inspect.Parameter.POSITIONAL_ONLY: "{0}",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "{0}",
    inspect.Parameter.VAR_POSITIONAL: "*{0}",
    inspect.Parameter.KEYWORD_ONLY: "{0}={0}",
    inspect.Parameter.VAR_KEYWORD: "**{0}",
}


def _written(
    function: Any,
    hints: dict[str, Any],
    unknown: list[str],
    call: Callable[..., Any],
    check_result: Callable[..., None],
) -> Any:
    """Return the wrapper, which in eager mode passes a signature to `call`.

    A signature with None is incomplete, so that the call is always checked.
    """
    parameters = inspect.signature(function).parameters.values()
    passed = ", ".join(_PASSED[p.kind].format(p.name) for p in parameters)
    in_braces = _in_braces(hints.values())
    mark = "__"
    while re.search(rf"\b{mark}", f"{passed} {in_braces}"):
        mark += "_"
    sizes = {f"{mark}size_{i}": text for i, text in enumerate(in_braces)}
    items = _signature_items(function, hints, unknown)
    items += [f'f"{{{size}}}"' for size in sizes]

    compared = _compared(function, hints)
    # What the comparisons read -> its name in the wrapper.
    variables = {name: name for name in compared if name != "return"}
    for size, text in sizes.items():
        variables["{" + text + "}"] = size
    with_result = variables | {"return": f"{mark}result"}
    in_eager_mode = (call, check_result, _untraced, _describe)
    names = {
        "function": function,
        "call": call,
        "check_result": check_result,
        "compare_arguments": _comparison(function, compared, variables, in_eager_mode),
        "compare_result": _comparison(function, compared, with_result, in_eager_mode),
        "misfit": _last_misfit,
        "describe": _describe,
        "is_dynamo_compiling": is_dynamo_compiling,
        "isinstance": isinstance,
        "Tensor": Tensor,
        "TypeCheckError": TypeCheckError,
    }
    traced = _TRACED if compared else "return $function({passed})"
    source = _WRAPPER.format(
        names=", ".join(f"${name}" for name in names),
        parameters=inspect.Signature([_without_values(p) for p in parameters]),
        sizes="; ".join(f"{size} = {text}" for size, text in sizes.items()),
        traced=indent(
            traced.format(passed=passed, compared=", ".join(with_result.values())),
            " " * 12,
        ),
        signature="\n".join(f"            {item}," for item in items),
        passed=passed,
    ).replace("$", mark)
    file = f"<wrapper of {function.__module__}.{function.__qualname__}>"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    made: dict[str, Any] = {}
    exec(compile(source, file, "exec"), {}, made)
    wrapper = made[f"{mark}bind"](*names.values())
    wrapper.__defaults__ = inspect.unwrap(function).__defaults__
    wrapper.__kwdefaults__ = inspect.unwrap(function).__kwdefaults__
    return wrapper


def _signature_items(
    function: Any, hints: dict[str, Any], unknown: list[str]
) -> list[str]:
    """Return the code of each item of a signature, except the sizes in braces."""
    items = []
    for name, parameter in inspect.signature(function).parameters.items():
        item = (
            f"({name}.__class__, {name}.dtype, {name}.shape) "
            f"if $isinstance({name}, $Tensor) else $describe({name})"
        )
        if parameter.default is None:  # mostly, such an argument is not passed
            item = f"{name} is None or ({item})"
        if name in unknown or hints.get(name, Any) is not Any:
            items.append(item)
        if isinstance(parameter.default, Tensor):  # others may look like this one
            items.append("None")
    if any("{" in f"{function.__annotations__[name]}" for name in unknown):
        items.append("None")  # these braces are not in the signature
    return items


def _without_values(parameter: inspect.Parameter) -> inspect.Parameter:
    default = parameter.empty if parameter.default is parameter.empty else None
    return parameter.replace(annotation=parameter.empty, default=default)


# What annotations say ----------------------------------------------------------------


def _resolve(function: Any, warn: bool = False) -> tuple[dict[str, Any], list[str]]:
    """Return the annotations, and the parameters for which they name what is not there.

    These annotations, and annotations with Self, count as Any.
    """
    variables = inspect.unwrap(function).__globals__
    hints: dict[str, Any] = {}
    unknown = []
    for name, annotation in function.__annotations__.items():
        one: Any = SimpleNamespace(__annotations__={name: annotation})
        try:
            hints |= get_type_hints(one, variables, include_extras=True)
        except (NameError, AttributeError) as error:
            hints[name] = Any
            unknown.append(name)
            if warn:
                place = _place(function, name)
                warnings.warn(f"typecheck cannot check {place}: {error}", stacklevel=4)
        if _mentions_self(hints[name]):
            hints[name] = Any
    return hints, unknown


def _mentions_self(hint: Any) -> bool:
    # By its text, because Python 3.10 has it in typing_extensions only.
    is_self = repr(hint) in ("typing.Self", "typing_extensions.Self")
    return is_self or any(map(_mentions_self, get_args(hint)))


def _place(function: Any, name: str) -> str:
    part = "the result" if name == "return" else f"parameter '{name}'"
    return f"{part} of {function.__module__}.{function.__qualname__}"


def _is_array(hint: Any) -> bool:
    return isinstance(hint, type) and hasattr(hint, "dim_str")  # jaxtyping's


def _in_braces(hints: Iterable[Any]) -> list[str]:
    """Return the expressions that annotations have in braces, such as "self.d_model"."""
    found: set[str] = set()
    for hint in hints:
        if hasattr(hint, "dim_str"):  # a text in Literal names no axes
            found.update(re.findall(r"\{([^{}]+)\}", hint.dim_str))
        else:
            found.update(_in_braces(get_args(hint)))
    return sorted(found)


def _has_array(hint: Any) -> bool:
    return _is_array(hint) or any(map(_has_array, get_args(hint)))


# Checks in eager mode ----------------------------------------------------------------


def _describe(value: Any) -> tuple[Any, ...] | None:
    """Return what annotations read of a value, or None if that may change."""
    kind = value.__class__
    if kind in _TYPES_BY_VALUE:
        return kind, value
    if kind in (FunctionType, BuiltinFunctionType):
        return (kind,)
    return None  # an array, or a list, of which beartype checks one random item


def _is_known(hint: Any) -> bool:
    """Return whether a signature has all that the annotation asks for."""
    if hint is Any or get_origin(hint) in (Literal, Callable, type):
        return True
    if get_origin(hint) in (Union, UnionType):
        return all(map(_is_known, get_args(hint)))
    return type(hint.array_type if _is_array(hint) else hint) in _PLAIN_METACLASSES


class _Check:
    """A check of calls by jaxtyping and beartype. It is made when it is first needed."""

    def __init__(
        self, function: Any, hints: dict[str, Any], unknown: list[str]
    ) -> None:
        self.function = function
        self.hints = hints
        self.unknown = unknown
        self.checkers: dict[tuple[str, ...], Callable[..., None]] = {}

    def __call__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *result: Any
    ) -> None:
        """Check the arguments, and the result if it is there."""
        __tracebackhide__ = True
        if self.unknown:
            self.hints.update(_resolve(self.function, warn=True)[0])
            self.unknown.clear()
        signature = inspect.signature(self.function)
        hints = self.hints.copy()
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            if value is signature.parameters[name].default:
                hints.pop(name, None)  # a default is always right
        if not result:
            hints.pop("return", None)
        key = (*hints, "with result" if result else "")
        if key not in self.checkers:
            self.checkers[key] = _checker(self.function, hints, bool(result))
        self.checkers[key](*result, *args, **kwargs)


def _checker(
    function: Any, hints: dict[str, Any], with_result: bool
) -> Callable[..., None]:
    """Return a function that checks arguments, and the result, which is the first."""
    from beartype import BeartypeConf, beartype  # JAXTYPING_DISABLE=1 works without it

    parameters = [
        parameter.replace(annotation=hints.get(name, parameter.empty))
        for name, parameter in inspect.signature(function).parameters.items()
    ]
    of_result = inspect.Parameter.empty
    if with_result:
        free_name = "_result"
        while free_name in inspect.signature(function).parameters:
            free_name += "_"
        parameters.insert(
            0, inspect.Parameter(free_name, inspect.Parameter.POSITIONAL_ONLY)
        )
        of_result = hints.get("return", Any)
    signature = inspect.Signature(parameters, return_annotation=of_result)
    in_braces = _in_braces(hints.values())

    @functools.wraps(function)  # so that errors name it
    def first(*args: Any, **kwargs: Any) -> Any:  # the result, where that is checked
        return args[0] if args else None

    vars(first)["__signature__"] = signature
    first.__annotations__ = {}  # jaxtyping 0.3.0 prefers these to the signature
    int_is_float = BeartypeConf(is_pep484_tower=True)  # as in theta=10000
    checked_first = jaxtyped(first, typechecker=beartype(conf=int_is_float))

    def check(*args: Any, **kwargs: Any) -> None:
        __tracebackhide__ = True
        try:
            checked_first(*args, **kwargs)
        except TypeCheckError as error:
            message = str(error)
        else:
            return
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        for expression in in_braces:
            value = eval(expression, dict(bound.arguments))
            message = message.replace(f"{{{expression}}}", f"{expression}={value}")
        raise TypeCheckError(message)

    return check


# Comparisons while a compiler traces -------------------------------------------------


def _comparison(
    function: Any,
    hints: dict[str, Any],
    variables: dict[str, str],
    in_eager_mode: tuple[Callable[..., Any], ...],
) -> Callable[[Any], None]:
    """Return a function that comptime calls with its view of the wrapper's variables."""

    def compare(context: Any) -> None:
        from torch._dynamo.decorators import skip

        for each in in_eager_mode:  # after an error, dynamo would trace them
            skip(each)
        values = {
            name: _seen(context.get_local(variable))
            for name, variable in variables.items()
        }
        _found["misfit"] = _misfit(function, hints, values)

    return compare


_found: dict[str, str | None] = {"misfit": None}


def _last_misfit() -> str | None:
    return _found["misfit"]


# So dynamo calls this function, and does not trace it. torch.compiler has
# assume_constant_result for this, which would import torch._dynamo, for a second.
vars(_last_misfit)["_dynamo_marked_constant"] = True


@dataclass(frozen=True)
class _Other:
    """A value whose type is all that the compiler knows."""

    kind: type


def _seen(variable: Any) -> Any:
    """Return what the compiler knows of a variable, such as a tensor without values."""
    kind = object
    with contextlib.suppress(NotImplementedError):  # it may know nothing
        kind = variable.python_type()
        if issubclass(kind, Tensor):
            return variable.as_fake()
        if variable.is_python_constant():
            return variable.as_python_constant()
        if kind is int:
            return variable.as_fake()
        if issubclass(kind, tuple):
            return _values(variable.as_proxy())
    return _Other(kind)


def _values(proxy: Any) -> Any:
    if isinstance(proxy, tuple):
        return tuple(map(_values, proxy))
    if isinstance(proxy, torch.fx.Proxy):
        return proxy.node.meta["example_value"]
    return proxy  # a number


def _call_with_symbols(
    function: Any, hints: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call `function` between comparisons, as torch.export(strict=False) runs code."""
    compared = _compared(function, hints)
    values = inspect.signature(function).bind(*args, **kwargs).arguments
    for expression in _in_braces(compared.values()):
        values[f"{{{expression}}}"] = eval(expression, dict(values))
    misfit = _misfit(function, compared, values)
    if misfit is None:
        values["return"] = result = function(*args, **kwargs)
        misfit = _misfit(function, compared, values)
    if misfit is not None:
        raise TypeCheckError(misfit)
    return result


def _compared(function: Any, hints: dict[str, Any]) -> dict[str, Any]:
    """Return the annotations that comparisons cover."""
    compared = {name: hint for name, hint in hints.items() if _has_array(hint)}
    for name, parameter in inspect.signature(function).parameters.items():
        # The compiler does not say whether a tensor is the default.
        is_tensor = isinstance(parameter.default, Tensor)
        if is_tensor or _PASSED[parameter.kind][0] == "*":
            compared.pop(name, None)
    return compared


def _misfit(function: Any, hints: dict[str, Any], values: dict[str, Any]) -> str | None:
    """Return what is wrong with the first value that does not fit, if there is one.

    `values` has arguments by their names, the result as "return", and the values of
    expressions in braces as "{self.d_model}".
    """
    parameters = inspect.signature(function).parameters
    axes = {name: value for name, value in values.items() if name.startswith("{")}
    for name, hint in hints.items():
        if name not in values:
            continue
        value = values[name]
        is_default = name in parameters and value is parameters[name].default
        if is_default or _fits(hint, value, axes):
            continue
        options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        names = [str(each) if get_args(each) else each.__name__ for each in options]
        expected = " | ".join(names)
        known = ", ".join(f"{a.strip('{}')}={_size_text(axes[a])}" for a in axes)
        where = f" where {known}" if known else ""
        place = _place(function, name)
        return f"{place} must be {expected}{where}, got {_text(value)}"
    return None


def _fits(hint: Any, value: Any, axes: dict[str, Any]) -> bool:
    """Return whether a value fits, and True for what these comparisons do not cover.

    `axes` has the sizes of the names so far, and gets this value's sizes.
    """
    items = get_args(hint)
    if get_origin(hint) is tuple and Ellipsis not in items:
        return (
            isinstance(value, tuple)
            and len(value) == len(items)
            and all(_fits(*each, axes) for each in zip(items, value, strict=True))
        ) or (isinstance(value, _Other) and issubclass(value.kind, tuple))
    options = items if get_origin(hint) in (Union, UnionType) else (hint,)
    arrays = [each for each in options if _is_array(each) and each.array_type is Tensor]
    others = [each for each in options if each not in arrays]
    if not isinstance(value, Tensor):
        return others != [] and (value is None or others != [type(None)])
    if any(map(_may_be_tensor, others)):
        return True
    possible = [array for array in arrays if isinstance(value, _without_sizes(array))]
    if len(possible) != 1:  # where several of a union fit, nothing is compared
        return possible != []
    return _sizes_fit(possible[0], value.shape, axes)


def _may_be_tensor(hint: Any) -> bool:
    kind = hint.array_type if _is_array(hint) else get_origin(hint) or hint
    return (
        type(kind) not in _PLAIN_METACLASSES
        or issubclass(kind, Tensor)
        or issubclass(Tensor, kind)
    )


@functools.cache
def _without_sizes(array: Any) -> Any:
    """Return the annotation with the same dtype and number of axes, for any sizes."""
    axes = ["_"] * len(array.dims)
    if array.index_variadic is not None:
        axes[array.index_variadic] = "..."
    return array.dtype[array.array_type, " ".join(axes)]


_Shape = tuple[Any, ...]  # of numbers and symbols


def _sizes_fit(array: Any, shape: _Shape, axes: dict[str, Any]) -> bool:
    """Compare each size, in the order of jaxtyping."""
    dims = array.dims
    variadic = array.index_variadic
    for i, dim in enumerate(dims):
        if i == variadic or not hasattr(dim, "broadcastable"):  # it has no name
            continue
        size = shape[i if variadic is None or i < variadic else i - len(dims)]
        if dim.broadcastable and _is_true(size == 1):
            continue
        if hasattr(dim, "name"):
            expected = axes.setdefault(dim.name, size)
        else:
            expected = dim.size if hasattr(dim, "size") else _evaluate(dim.elem, axes)
        if expected is not None and _is_true(size != expected):
            return False
    if variadic is not None and hasattr(dims[variadic], "name"):
        name = f"*{dims[variadic].name}"
        batch = shape[variadic : len(shape) + variadic + 1 - len(dims)]
        joined = _join(axes.get(name), batch, dims[variadic].broadcastable)
        if joined is None:
            return False
        axes[name] = joined
    return True


def _evaluate(expression: str, axes: dict[str, Any]) -> Any:
    """Return the value of an expression such as "2*{self.d_k}", or None if unknown."""
    symbols = {}
    for i, text in enumerate(re.findall(r"\{[^{}]+\}", expression)):
        value = axes.get(text)
        if isinstance(value, _Other):
            return None
        if isinstance(value, torch.SymInt):  # it has no text
            symbols[f"_{i}"] = value
            value = f"_{i}"
        expression = expression.replace(text, f"{value}")
    try:
        return eval(expression, {}, axes | symbols)
    except NameError:  # a name whose size is not known yet
        return None


def _join(
    known: tuple[bool, _Shape] | None, shape: _Shape, may_broadcast: bool
) -> tuple[bool, _Shape] | None:
    """Return what an axis name such as *batch stands for after one more shape, or None.

    The result says whether all shapes so far may broadcast, and to which shape.
    """
    if known is None:
        return may_broadcast, shape
    may_grow, old = known
    rank = max(len(old), len(shape))
    if (len(old) < rank and not may_grow) or (len(shape) < rank and not may_broadcast):
        return None
    padded_old = (1,) * (rank - len(old)) + old
    padded_new = (1,) * (rank - len(shape)) + shape
    joined = []
    for a, b in zip(padded_old, padded_new, strict=True):
        if _is_true(a != b):
            if may_grow and _is_true(a == 1):
                a = b
            elif not (may_broadcast and _is_true(b == 1)):
                return None
        joined.append(a)
    return may_grow and may_broadcast, tuple(joined)


def _is_true(condition: Any) -> bool:
    """Return False also where that is known only when the compiled code runs."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(condition)


def _text(value: Any) -> str:
    """Return what an error says of a value: its dtype and shape, or its type."""
    if isinstance(value, Tensor):
        return f"{value.dtype}".removeprefix("torch.") + _shape_text(value.shape)
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))})"
    return (value.kind if isinstance(value, _Other) else type(value)).__name__


def _shape_text(shape: _Shape) -> str:
    return f"[{','.join(map(_size_text, shape))}]"


def _size_text(size: Any) -> str:
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    if isinstance(size, tuple):  # of *batch
        return _shape_text(size[1])
    if isinstance(size, torch.SymInt) and not free_unbacked_symbols(size):
        size = int(size)
    return f"{size}"
