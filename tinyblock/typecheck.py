"""Shape checks at run time: turn jaxtyping annotations into errors.

`@typecheck` checks a function or a class, and `typecheck(module)` checks the public
functions of a module, and the `__init__` and `forward` of its classes. A call that
violates an annotation raises `jaxtyping.TypeCheckError`, a `TypeError`, with a table:

    check_shapes.py:31: scores(q, k)
       *batch[-2]  *batch[-1]  query  d  key
    q           2           3      5  8
    k           2           1         8    7
                            ^  *batch[-1] is 3 in q

A check has two steps.

1. *Describe.* The description of a call has the class of each argument, the dtype and
   shape of each tensor, each value for a Literal, and the size of each `{self.d_model}`.
2. *Judge.* The description, and nothing else, is compared with the annotations. Whether
   a dtype and a shape fit is decided by jaxtyping.

So a call with the description of a right call is right. In eager mode, each call is
described, which takes a microsecond, and judged only if its description is new. Code
that torch.compile traces is described and judged once, while it is traced: a size is a
number, or a symbol that gets a guard when it is compared. So the compiled code has no
checks, and a call with other sizes is traced, and judged, again. A wrong call breaks the
graph, so that Python runs the wrapper, which raises the error. With fullgraph=True, where
a graph must not break, torch.compile raises an error of its own, which contains this one.

What can be described: classes, jaxtyping's arrays of torch.Tensor, tuples and unions of
these, None, Any, Literal, and Callable. If a function has another annotation, jaxtyping
and beartype check each of its calls in eager mode, in 10 to 30 microseconds, and compiled
code leaves that annotation unchecked.

JAXTYPING_DISABLE=1 leaves all functions unwrapped and beartype unimported. So does
`python -O`, with a warning, because beartype checks nothing there.

These names are not part of torch's public interface. Without

- `torch._dynamo.comptime`, compiled code is not checked,
- `torch.fx.experimental.symbolic_shapes.free_unbacked_symbols`, a size that depends on
  values is compared, and the compiler raises an error,
- `torch._dynamo.decorators.skip`, the compiler traces the checks of eager mode after a
  graph break, which breaks the graph again,
- `torch._guards.TracingContext`, a message shows the line that calls compiled code,
- `node.meta["example_value"]`, no shape is known while a compiler traces,
- `_torchdynamo_orig_callable`, a function that torch.compile made is not checked.
"""

import functools
import inspect
import linecache
import operator
import re
import traceback
import warnings
from abc import ABCMeta
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from types import FunctionType, ModuleType, NoneType, SimpleNamespace, UnionType
from typing import (
    Any,
    Literal,
    NamedTuple,
    Optional,
    ParamSpecArgs,
    ParamSpecKwargs,
    TypeAlias,
    TypeVar,
    Union,
    Unpack,
    get_args,
    get_origin,
    get_type_hints,
)

import torch
from jaxtyping import AnnotationError, Shaped, TypeCheckError, config, jaxtyped
from torch import SymBool, SymFloat, SymInt, Tensor
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.fx.node import map_aggregate

__all__ = ["typecheck"]

_Target = TypeVar("_Target")
# A sequence that grows token by token adds one description per token.
_MAX_DESCRIPTIONS = 1024
# A value belongs to a class of these metaclasses by its type alone. A Protocol or
# nn.Parameter, for example, also looks into the value.
_PLAIN = {type.__instancecheck__, ABCMeta.__instancecheck__}
_SUBCLASSES: dict[Any, tuple[type, ...]] = {float: (int,), complex: (float, int)}
_OF_SYMBOL: dict[Any, type] = {SymInt: int, SymFloat: float, SymBool: bool}
_LITERALS = (bool, int, str, bytes, Enum, NoneType)
_EMPTY = inspect.Parameter.empty
_RESULT = "_typecheck_result"
_VARIADIC = {
    inspect.Parameter.VAR_POSITIONAL: "_typecheck_args",
    inspect.Parameter.VAR_KEYWORD: "_typecheck_kwargs",
}
_BRACE = re.compile(r"(?<!\w)\{([^\W\d]\w*(?:\.[^\W\d]\w*)*)\}(?!\w)")
# The frames of these are not the caller's.
_NOT_THE_CALLER = ((lambda: 0).__code__.co_filename, str(Path(torch.__file__).parent))


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
        jaxtyping.AnnotationError: an annotation is wrong, such as Float[Tensor, "{n"].
    """
    if config.jaxtyping_disable:
        return target
    if not __debug__:
        warnings.warn("python -O turns all shape checks off", stacklevel=2)
        return target
    if not isinstance(target, (ModuleType, type)):
        if not _is_checkable(target):
            raise TypeError(
                "target must be a module, a class, or an annotated function that is no "
                f"generator and no coroutine, got {target!r}"
            )
        return _checked(target)
    functions = list(_annotated_functions(target))
    if not functions:
        warnings.warn(
            f"typecheck found nothing to check in {target.__name__}: pass its modules",
            stacklevel=2,
        )
    # First all wrappers, so that an error leaves the target as it was.
    wrappers = [_checked(function, owner) for owner, _, function in functions]
    for (owner, name, _), wrapper in zip(functions, wrappers, strict=True):
        setattr(owner, name, wrapper)
    return target


def _annotated_functions(
    owner: ModuleType | type,
) -> Iterator[tuple[ModuleType | type, str, FunctionType]]:
    """Yield (owner, name, function) for each public function that is defined there."""
    names = [
        name for name in vars(owner) if name == "__init__" or not name.startswith("_")
    ]
    # The module in which a class is defined, or the module itself.
    home = vars(owner).get("__module__", owner.__name__)
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
        inspect.isgeneratorfunction(plain)
        or inspect.iscoroutinefunction(plain)
        or inspect.isasyncgenfunction(plain)
    )


# The wrapper -------------------------------------------------------------------------


def _checked(function: Any, owner: Any = None) -> Any:
    """Return a wrapper of `function` that checks its calls."""
    if getattr(function, "__typechecked__", None) is function:
        return function
    check = _Check(function, owner)
    wrapper = _wrapper(check)
    functools.update_wrapper(wrapper, function, updated=())
    # A function that torch.compile has made has attributes that lead the compiler past
    # the wrapper, so the wrapper gets those of the function below it.
    plain = function
    while "_torchdynamo_orig_callable" in vars(plain):
        plain = plain._torchdynamo_orig_callable
    vars(wrapper).update(vars(plain), __wrapped__=function, __typechecked__=wrapper)
    # Dynamo counts the recompilations of each code object, and reports them by its name.
    wrapper.__code__ = wrapper.__code__.replace(co_name=check.name)
    return wrapper


def _wrapper(check: "_Check") -> Any:
    # Functions, because the compiler looks at all that the wrapper uses, and does not
    # understand objects.
    function, show, show_result = check.function, check.show, check.show_result
    get_check, see_arguments, see_result = _functions_of(check)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if is_dynamo_compiling():
            # At a graph break, the compiler cuts a function in two, but no try block.
            # So Python runs the wrapper, and `function` is compiled by itself.
            try:
                from torch._dynamo.comptime import comptime

                seen: Any = show(*args, **kwargs)
                comptime(see_arguments)
                result = function(*args, **kwargs)
                found = show_result(result, *args, **kwargs)
                comptime(see_result)
                return result
            except Exception:
                raise
        # Most calls have the description of the call before.
        check = get_check()
        last_seen, last_found = check.last
        try:
            seen = check.read(*args, **kwargs)
            is_new = seen != last_seen
        except Exception:  # `call` reads it again, and explains the error
            seen, is_new = None, True
        if is_new:
            return check.call(seen, args, kwargs)
        result = function(*args, **kwargs)
        try:
            found = check.read_result(result, *args, **kwargs)
            is_new = found != last_found
        except Exception:
            is_new = True
        if is_new:
            check.finish(last_seen, last_found, result, args, kwargs)
        return result

    return wrapper


def _functions_of(check: "_Check") -> Any:
    def get_check() -> _Check:
        return check

    def see_arguments(context: Any) -> None:
        check.see(context, "seen")

    def see_result(context: Any) -> None:
        check.see(context, "seen", "found")

    return get_check, see_arguments, see_result


# The check of a function -------------------------------------------------------------

# What annotations read: each part, of which a tensor takes three places, and then each
# size in braces. It is flat, because equal tuples are compared faster than nested ones.
_Description: TypeAlias = tuple[Any, ...]


class _Part(NamedTuple):
    """A parameter or the result, and what its annotation takes."""

    place: str  # in messages
    text: str  # the expression that reads it
    options: "list[_Option]"
    default: Any = _EMPTY

    @property
    def width(self) -> int:
        """Return how many places of a description it takes."""
        is_tensor = len(self.options) == 1 and isinstance(self.options[0], _Array)
        return 3 if is_tensor and self.default is _EMPTY else 1


class _Side(NamedTuple):
    """The parameters, or the result: what one description describes."""

    parts: list[_Part]
    sizes: dict[str, str]  # what stands in braces -> the name of an axis of this size

    def split(self, description: "_Description") -> tuple[list[Any], dict[str, Any]]:
        """Return the description of each part, and each size in braces."""
        items: list[Any] = []
        start = 0
        for part in self.parts:
            item = description[start : start + part.width]
            start += part.width
            is_tensor = part.width == 3 and item[1] is not None
            items.append(item if is_tensor else item[0])
        return items, dict(zip(self.sizes, description[start:], strict=True))


class _Check:
    """The annotations of a function, and the descriptions of its right calls."""

    def __init__(self, function: Any, owner: Any) -> None:
        self.function = function
        self.owner = owner
        self.name = f"{function.__module__}.{function.__qualname__}"
        self.header = _header(function)
        self.known: dict[_Description, _Description] = {}  # of arguments -> of a result
        self.last: tuple[Any, Any] = (None, None)  # those of the call before
        self.resolve()
        # Compiled code keeps the annotations as they are resolved here.
        self.shown = _Side(_shown(self.before.parts), self.before.sizes)
        self.shown_after = _Side(_shown(self.after.parts), self.after.sizes)
        self.show = _expression(self.header, self.shown, _showing)
        self.show_result = _expression(self.header, self.shown_after, _showing, _RESULT)

    def resolve(self, is_final: bool = False) -> None:
        """Read the annotations; a name that is missing at first is looked up once more."""
        hints, is_complete = _resolve(self.function, self.owner, warn=is_final)
        self.is_resolved = is_complete or is_final
        self.before, self.after = _Side([], {}), _Side([], {})
        for name in (*self.header.parameters, "return"):  # in jaxtyping's order
            hint = hints.get(name, Any)
            if hint is Any:
                continue
            side = self.after if name == "return" else self.before
            side.parts.append(self.part(name, hint, side.sizes))
        self.by_jaxtyping: Any = None
        parts = (*self.before.parts, *self.after.parts)
        if any(
            isinstance(o, _Refused) for part in parts for o in _inside(part.options)
        ):
            self.by_jaxtyping = _by_jaxtyping(self.function, self.header, hints)
        self.read = _expression(self.header, self.before, _reading)
        self.read_result = _expression(self.header, self.after, _reading, _RESULT)
        self.read_any = _expression(self.header, self.before, _reading_any)
        self.read_any_result = _expression(
            self.header, self.after, _reading_any, _RESULT
        )

    def part(self, name: str, hint: Any, sizes: dict[str, str]) -> _Part:
        def axes(array: Any) -> list[str] | None:
            return _without_braces(array, sizes, {*self.header.parameters}, where)

        where = _place(self.function, name)
        if name == "return":
            return _Part("return value", _RESULT, _options(hint, axes))
        parameter = self.header.parameters[name]
        if parameter.kind is parameter.VAR_POSITIONAL:
            return _Part(name, name, _options(tuple[hint, ...], axes))
        if parameter.kind is parameter.VAR_KEYWORD:
            values = f"(*{name}.values(),)"
            return _Part(name, values, _options(tuple[hint, ...], axes))
        return _Part(name, name, _options(hint, axes), parameter.default)

    # In eager mode -----------------------------------------------------------------

    def call(
        self, seen: _Description | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call the function, and judge what is new. `seen` is None if it is not known."""
        __tracebackhide__ = True
        if not self.is_resolved:
            self.resolve(is_final=True)
            seen = None
        if self.by_jaxtyping is not None and not is_compiling():
            return self.by_jaxtyping(*args, **kwargs)
        try:
            if seen is None:
                seen = self.read_any(*args, **kwargs)
            seen = _with_numbers(seen, self.before)
        except Exception as error:
            self.explain(error, args, kwargs)
            return self.function(*args, **kwargs)  # raises Python's own error
        try:
            expected = self.known.get(seen)
        except TypeError:  # symbols, of which torch.export makes sizes, have no hash
            expected = None
        if expected is None:
            self.judge(seen)
        result = self.function(*args, **kwargs)
        self.finish(seen, expected, result, args, kwargs)
        return result

    def finish(
        self,
        seen: _Description,
        expected: _Description | None,
        result: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Judge the result of a call unless it is as expected, and remember both."""
        __tracebackhide__ = True
        try:
            found = self.read_any_result(result, *args, **kwargs)
            found = _with_numbers(found, self.after)
        except Exception as error:
            self.explain(error, args, kwargs)
            raise
        if found != expected:
            self.judge(seen, found)
            if is_compiling() or _has_symbols(seen):
                return
            if len(self.known) >= _MAX_DESCRIPTIONS:
                self.known.clear()
            self.known[seen] = found
        self.last = seen, found

    def explain(
        self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Raise an error about braces, unless the arguments do not fit the function."""
        try:
            self.header.bind(*args, **kwargs)
        except TypeError:
            return
        sizes = ", ".join(
            f"{{{size}}}" for size in (*self.before.sizes, *self.after.sizes)
        )
        raise AnnotationError(f"cannot read {sizes} of {self.name}: {error}") from error

    def judge(self, seen: _Description, found: _Description | None = None) -> None:
        """Raise an error unless the descriptions of a call fit the annotations."""
        __tracebackhide__ = True
        described = [(self.before, seen)]
        if found is not None:
            described.append((self.after, found))
        if not _fits(described, is_partial=False):
            raise TypeCheckError(_message(self.function, described))

    # While a compiler traces -------------------------------------------------------

    def see(self, context: Any, *names: str) -> None:
        """Judge a call of which the compiler has traced the arguments or the result."""
        self.hide()
        sides = (self.shown, self.shown_after)
        described = [
            (side, _described(side, context.get_local(name).as_proxy()))
            for side, name in zip(sides, names, strict=False)
        ]
        if not _fits(described, is_partial=True):
            message = _message(self.function, described)
            context.graph_break(f"TypeCheckError: {message}")

    def hide(self) -> None:
        """Keep the compiler from tracing the checks of eager mode, after a graph break.

        It traces none of them, but still compiles `function`, which `call` calls.
        """
        from torch._dynamo.decorators import skip

        if "judge" not in vars(self):
            vars(self)["judge"] = torch.compiler.disable(self.judge)
            if self.by_jaxtyping is not None:
                self.by_jaxtyping = torch.compiler.disable(self.by_jaxtyping)
        own = (_Check.call, _Check.finish, _Check.explain)
        reads = (self.read, self.read_result, self.read_any, self.read_any_result)
        for each in (*own, *reads, _describe, _fields, _with_numbers):
            skip(each)


class _Missing:
    """In place of an argument that is not passed, and has no default."""


def _header(function: Any) -> inspect.Signature:
    """Return the signature, which below a decorator takes any call.

    A decorator may take or pass some of the arguments. Python raises for other errors.
    """
    signature = inspect.signature(function)
    if not hasattr(function, "__wrapped__"):
        return signature
    parameters = []
    for parameter in signature.parameters.values():
        if parameter.kind not in _VARIADIC and parameter.default is _EMPTY:
            parameter = parameter.replace(default=_Missing)
        parameters.append(parameter)
    kinds = {parameter.kind for parameter in parameters}
    for kind, name in _VARIADIC.items():
        if kind not in kinds:
            parameters.append(inspect.Parameter(name, kind))
    return inspect.Signature(sorted(parameters, key=lambda each: each.kind))


# What a call has: its description ----------------------------------------------------


class _Code(str):
    """A text that inspect.Signature writes as it is."""

    __repr__ = str.__str__


def _expression(
    header: inspect.Signature,
    side: _Side,
    reading: Callable[[_Part, str], str],
    first: str = "",
) -> Callable[..., _Description]:
    """Return a function that takes a call and returns its description.

    It is the only code that is made from text: a loop takes longer, and braces name the
    parameters. All other names begin with _typecheck.
    """
    names: dict[str, Any] = {
        "_typecheck_describe": _describe,
        "_typecheck_show": _show,
        "_typecheck_show_size": _show_size,
        "_typecheck_fields": _fields,
    }
    parameters = []
    if first:
        parameters.append(inspect.Parameter(first, inspect.Parameter.POSITIONAL_ONLY))
    for name, parameter in header.parameters.items():
        default = parameter.default
        if default is not _EMPTY:
            default = _Code(f"_typecheck_default_{name}")
            names[default] = parameter.default
        parameters.append(parameter.replace(annotation=_EMPTY, default=default))
    items = []
    for number, part in enumerate(side.parts):
        kinds = f"_typecheck_kinds_{number}"
        names[kinds] = _kinds(part.options)
        item = reading(part, kinds)
        if part.default is not _EMPTY:  # it is right, whatever it is
            item = f"({part.text} is _typecheck_default_{part.text} or {item})"
        items.append(item)
    for size in side.sizes:
        items.append(f"_typecheck_show_size({size})" if reading is _showing else size)
    takes = str(inspect.Signature(parameters))[1:-1]
    body = "".join(f"{item}, " for item in items)
    # `names` are variables of a closure, because compiled code compares the globals
    # of a function, and each of their names, at each call.
    make = eval(f"lambda {', '.join(names)}: lambda {takes}: ({body})", {})
    return make(*names.values())


def _reading(part: _Part, kinds: str) -> str:
    """Return an expression that describes, for a tensor as fast as possible.

    It raises an error if something else stands in place of a tensor.
    """
    if part.width == 3:
        return f"{part.text}.__class__, {part.text}.dtype, {part.text}.shape"
    return _reading_any(part, kinds)


def _reading_any(part: _Part, kinds: str) -> str:
    """Return an expression that describes any argument or result."""
    if part.width == 3:
        return f"*_typecheck_fields({part.text})"
    found = [*_inside(part.options)]
    if any(isinstance(option, _Value) for option in found):
        return f"_typecheck_describe({part.text}, True)"
    if any(isinstance(option, (_Array, _Items)) for option in found):
        return f"_typecheck_describe({part.text})"
    return f"({part.text}.__class__,)"


def _fields(value: Any) -> tuple[Any, ...]:
    described = _describe(value)
    return described if len(described) == 3 else (described, None, None)


def _describe(value: Any, by_value: bool = False) -> tuple[Any, ...]:
    """Return (class, dtype, shape), (class, items), (class, value) or (class,)."""
    kind = value.__class__
    if isinstance(value, Tensor):
        try:
            return kind, value.dtype, value.shape
        except RuntimeError:  # a nested tensor, or a lazy one, has no shape
            return (kind,)
    if isinstance(value, tuple):
        return kind, tuple([_describe(item, by_value) for item in value])
    if by_value and isinstance(value, _LITERALS):
        return kind, value
    return (kind,)


def _with_numbers(description: _Description, side: _Side) -> _Description:
    """Return sizes as numbers, because a tensor has other values later."""
    items = sum(part.width for part in side.parts)
    sizes = []
    for size in description[items:]:
        is_number = isinstance(size, (int, float, SymInt, SymFloat))
        sizes.append(size if is_number else operator.index(size))
    return (*description[:items], *sizes)


# While a compiler traces: it shows tensors and numbers, and no classes ------------------


def _shown(parts: list[_Part]) -> list[_Part]:
    """Return the parts that are judged in compiled code."""
    return [
        part
        for part in parts
        if any(isinstance(option, _Array) for option in _inside(part.options))
        # The compiler does not say whether a tensor is the default.
        and not isinstance(part.default, Tensor)
    ]


def _showing(part: _Part, kinds: str) -> str:
    """Return an expression that the compiler traces."""
    return f"_typecheck_show({part.text}, {kinds})"


def _show(value: Any, kinds: tuple[type, ...]) -> tuple[Any, ...]:
    """Return whether a value is of these classes, and the tensors in it."""
    is_named = isinstance(value, kinds)
    if isinstance(value, Tensor):
        return is_named, value
    if isinstance(value, tuple):
        return is_named, tuple([_show(item, kinds) for item in value])
    return (is_named,)


def _show_size(size: Any) -> Any:
    return size if isinstance(size, (int, float)) else None


def _described(side: _Side, shown: Any) -> _Description:
    """Return the description of what a compiler shows.

    In place of a class, it has whether a value is of a class that the annotation names.
    """

    def example(leaf: Any) -> Any:
        is_proxy = isinstance(leaf, torch.fx.Proxy)
        return leaf.node.meta["example_value"] if is_proxy else leaf

    def described(item: Any) -> Any:
        if item is True or len(item) == 1:
            return item
        is_named, inside = item
        if isinstance(inside, Tensor):
            return is_named, inside.dtype, inside.shape
        return is_named, tuple(map(described, inside))

    values = map_aggregate(shown, example)
    description: list[Any] = []
    for part, item in zip(side.parts, values, strict=False):
        fields = described(item)
        if part.width == 3 and len(fields) != 3:
            fields = fields, None, None
        description += fields if part.width == 3 else [fields]
    return (*description, *values[len(side.parts) :])


# What annotations take ---------------------------------------------------------------


class _Class(NamedTuple):
    kind: type

    def __str__(self) -> str:
        return "None" if self.kind is NoneType else self.kind.__name__

    def fits(self, seen: Any, limits: "_Limits") -> bool:
        kind = seen[0]
        if isinstance(kind, bool):
            return kind
        kind = _OF_SYMBOL.get(kind, kind)
        return issubclass(kind, (self.kind, *_SUBCLASSES.get(self.kind, ())))


class _Refused(_Class):
    """An annotation that jaxtyping and beartype check in eager mode.

    In compiled code, it takes all values of a class.
    """


class _Value(NamedTuple):
    """One value of a Literal."""

    value: Any

    def __str__(self) -> str:
        return repr(self.value)

    def fits(self, seen: Any, limits: "_Limits") -> bool:
        return seen[0] is True or seen == (type(self.value), self.value)


class _Items(NamedTuple):
    """A tuple."""

    items: "list[list[_Option]]"
    repeats: bool  # as in tuple[int, ...]

    def __str__(self) -> str:
        items = ", ".join(map(_text, self.items))
        return f"tuple[{items}, ...]" if self.repeats else f"tuple[{items}]"

    def options_of(self, seen: Any) -> "list[list[_Option]] | None":
        """Return the options for each item of a tuple of this length."""
        if len(seen) != 2 or not isinstance(seen[1], tuple):
            return None
        options = self.items * len(seen[1]) if self.repeats else self.items
        return options if len(options) == len(seen[1]) else None

    def fits(self, seen: Any, limits: "_Limits") -> bool:
        options = self.options_of(seen)
        if options is None:
            return False
        pairs = zip(options, seen[1], strict=True)
        return all(_fits_one(each, item, limits) for each, item in pairs)


class _Tensor(NamedTuple):
    """What jaxtyping reads of a tensor."""

    dtype: Any
    shape: tuple[Any, ...]


class _Array:
    """An array of jaxtyping. Braces are replaced by names of axes."""

    def __init__(self, hint: Any, axes: list[str]) -> None:
        # Its dtype restricts the dtypes again, as in Float[Float32[Tensor, "n"], "m"].
        name = hint.dtype.__name__
        dtype: Any = type(name, (hint.dtype,), {"dtypes": hint.dtypes})
        self.text = f'{name}[Tensor, "{hint.dim_str}"]'
        self.written = hint.dim_str.split()
        self.axes = axes
        self.star = -1 if hint.index_variadic is None else hint.index_variadic
        star = self.written[self.star] if self.star >= 0 else ""
        self.star_name = "" if star in ("", "...") else f"*{star.lstrip('#*')}"
        self.may_broadcast = "#" in star
        if self.may_broadcast:  # jaxtyping needs it for "*#batch", but not as a package
            import numpy  # noqa: F401
        self.hint = dtype[Any, " ".join(axes)]
        self.any_shape = dtype[Any, "..."]
        # jaxtyping compares "*#batch" by numpy, which would turn symbols into numbers.
        without = ["..." if {"*", "#"} <= {*axis} else axis for axis in axes]
        self.with_symbols = dtype[Any, " ".join(without)]

    def __str__(self) -> str:
        return self.text

    def columns(self, rank: int) -> list[tuple[str, int]]:
        """Return a column of the table for each axis of a shape, and where it is written."""
        columns: dict[str, int] = {}
        extra = rank - len(self.written)
        for i, written in enumerate(self.written):
            name = written.lstrip("#*")
            if i == self.star:
                name = self.star_name or "..."
                for k in range(-extra - 1, 0):
                    columns[f"{name}[{k}]"] = i
                continue
            while name in columns:  # as in "n n"
                name += " "
            columns[name] = i
        return [*columns.items()]

    def cells(self, shape: Sequence[int]) -> dict[str, int]:
        names = [name for name, _ in self.columns(len(shape))]
        return dict(zip(names, shape, strict=True))

    def has_rank_and_dtype_of(self, seen: Any) -> bool:
        if len(seen) != 3 or not isinstance(_Tensor(seen[1], ()), self.any_shape):
            return False
        extra = len(seen[2]) - len(self.written)
        return extra == 0 if self.star < 0 else extra >= -1

    def fits(self, seen: Any, limits: "_Limits") -> bool:
        if len(seen) != 3 or not (
            seen[0] in (True, False) or issubclass(seen[0], Tensor)
        ):
            return False
        if _depends_on_values(seen[2]):
            return True
        hint = self.with_symbols if limits.has_symbols else self.hint
        try:
            return isinstance(_Tensor(*seen[1:]), hint)
        except AnnotationError:  # it needs a size that is not known
            if limits.is_partial:
                return True
            raise


_Option: TypeAlias = _Class | _Value | _Items | _Array


class _Limits(NamedTuple):
    """What is not known of a call."""

    is_partial: bool  # a compiler shows some of the arguments only
    has_symbols: bool  # sizes may be symbols


def _options(hint: Any, axes_of: Callable[[Any], list[str] | None]) -> "list[_Option]":
    """Return what a value may be. All that is not understood is refused here."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return [option for part in parts for option in _options(part, axes_of)]
    if origin is tuple and _can_count(hint):
        repeats = parts[1:] == (Ellipsis,)
        items = [_options(part, axes_of) for part in parts if part is not Ellipsis]
        return [_Items(items, repeats)]
    if origin is Literal:
        return [_Value(value) for value in parts]
    if origin is Callable:
        return [_Class(Callable)]
    if hint is Any:
        return [_Class(object)]
    if hint is None:
        return [_Class(NoneType)]
    if _is_array(hint) and hint.array_type is Tensor:
        axes = axes_of(hint)
        return [_Refused(Tensor) if axes is None else _Array(hint, axes)]
    kind = origin or hint
    is_plain = isinstance(kind, type) and type(kind).__instancecheck__ in _PLAIN
    if is_plain and origin is None:
        return [_Class(kind)]
    return [_Refused(kind if is_plain else object)]


def _can_count(hint: Any) -> bool:
    """Return whether a tuple says which items it has, unlike typing.Tuple or [*Ts]."""
    parts = get_args(hint)
    unpacked = [
        get_origin(part) is Unpack or getattr(part, "__unpacked__", False)
        for part in parts
    ]
    return (bool(parts) or hint == tuple[()]) and not any(unpacked)


def _is_array(hint: Any) -> bool:
    return isinstance(hint, type) and hasattr(hint, "dim_str")  # jaxtyping's


def _inside(options: "Iterable[_Option]") -> "Iterator[_Option]":
    """Yield all options, also those for the items of tuples."""
    for option in options:
        yield option
        if isinstance(option, _Items):
            for item in option.items:
                yield from _inside(item)


def _kinds(options: "Iterable[_Option]") -> tuple[type, ...]:
    """Return the classes that an annotation names."""
    kinds: list[type] = []
    for option in _inside(options):
        if isinstance(option, _Class):
            kinds += (option.kind, *_SUBCLASSES.get(option.kind, ()))
        elif isinstance(option, _Value):
            kinds.append(type(option.value))
    return tuple(kinds)


def _without_braces(
    array: Any, sizes: dict[str, str], parameters: set[str], place: str
) -> list[str] | None:
    """Return its axes, with the name of an axis in place of each size in braces.

    These names are added to `sizes`. The result is None for braces that are refused.
    """
    axes: list[str] = array.dim_str.split()
    braces = []
    for i, dim in enumerate(array.dims):
        text = f"{getattr(dim, 'elem', '')}"  # an expression, without # and name=
        braces += _BRACE.findall(text)
        plain = _BRACE.sub(lambda brace: _axis_of(brace[1], place), text)
        try:
            compile(f"f'{plain}'" if "{" in plain else plain or "0", axes[i], "eval")
        except SyntaxError as error:
            raise AnnotationError(
                f"cannot read the axis '{axes[i]}' of {place}: {error.msg}"
            ) from error
        axes[i] = axes[i].removesuffix(text) + plain
    if any("{" in axis for axis in axes):
        return None
    for brace in braces:
        if brace.partition(".")[0] not in parameters:
            raise AnnotationError(
                f"cannot read {{{brace}}} of {place}: no such parameter"
            )
        sizes[brace] = _axis_of(brace, place)
    return axes


def _axis_of(brace: str, place: str) -> str:
    """Return the name of an axis that has the size in braces, before or after a call."""
    when = "after" if place.startswith("the result") else "before"
    return f"typecheck_{when}_{brace.replace('.', '_dot_')}"


def _place(function: Any, name: str) -> str:
    part = "the result" if name == "return" else f"parameter '{name}'"
    return f"{part} of {function.__module__}.{function.__qualname__}"


def _resolve(function: Any, owner: Any, warn: bool) -> tuple[dict[str, Any], bool]:
    """Return the annotations to check, and whether all names in them are there."""
    variables = inspect.unwrap(function).__globals__
    names = {owner.__name__: owner} if isinstance(owner, type) else {}
    for scope in (owner, function):  # class Layer[T]; def f[T](x: T)
        names |= {each.__name__: each for each in getattr(scope, "__type_params__", ())}
    hints: dict[str, Any] = {}
    is_complete = True
    for name, annotation in function.__annotations__.items():
        one: Any = SimpleNamespace(__annotations__={name: annotation})
        place = _place(function, name)
        try:
            hint = get_type_hints(one, variables, names, include_extras=True)[name]
        except (NameError, AttributeError) as error:
            is_complete = False
            if warn:
                warnings.warn(f"typecheck cannot check {place}: {error}", stacklevel=5)
            continue
        except Exception as error:
            raise AnnotationError(f"{place} has a wrong annotation: {error}") from error
        # By its text, because Python 3.10 has Self in typing_extensions only.
        is_self = re.search(r"\.Self\b", repr(hint))
        if not is_self and not isinstance(hint, (ParamSpecArgs, ParamSpecKwargs)):
            hints[name] = hint
    return hints, is_complete


def _by_jaxtyping(
    function: Any, header: inspect.Signature, hints: dict[str, Any]
) -> Any:
    """Return a function whose calls jaxtyping and beartype check."""
    from beartype import BeartypeConf, beartype  # here, because most users need it not
    from beartype.roar import BeartypeException

    @functools.wraps(function)  # so that errors name it
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    parameters = []
    for name, parameter in header.parameters.items():
        hint = hints.get(name, Any)
        if parameter.default is None:  # which is right, also if it is passed
            hint = Optional[hint]  # noqa: UP045  # | does not take all annotations
        parameters.append(parameter.replace(annotation=hint))
    signature = inspect.Signature(
        parameters, return_annotation=hints.get("return", Any)
    )
    vars(call)["__signature__"] = signature
    call.__annotations__ = {}  # jaxtyping 0.3.0 prefers these to the signature
    int_is_float = BeartypeConf(is_pep484_tower=True)  # as in theta=10000
    try:
        return jaxtyped(call, typechecker=beartype(conf=int_is_float))
    except BeartypeException as error:
        raise AnnotationError(f"{error}".partition("\n")[0]) from error


# The judge ---------------------------------------------------------------------------


def _fits(described: "list[tuple[_Side, _Description]]", is_partial: bool) -> bool:
    """Return whether the descriptions of a call fit the annotations."""
    limits = _Limits(is_partial, _has_symbols([seen for _, seen in described]))
    with jaxtyped("context"):  # in which jaxtyping remembers the sizes of axes
        return all(
            _fits_one(part.options, item, limits) for part, item in _steps(described)
        )


def _fits_one(options: "list[_Option]", item: Any, limits: _Limits) -> bool:
    return any(option.fits(item, limits) for option in options)


def _steps(
    described: "list[tuple[_Side, _Description]]",
) -> Iterator[tuple[_Part, Any]]:
    """Tell jaxtyping the sizes in braces, and yield each part with its description."""
    for side, description in described:
        items, sizes = side.split(description)
        known = {side.sizes[text]: n for text, n in sizes.items() if n is not None}
        _axes_fit(known, (*known.values(),))
        for part, item in zip(side.parts, items, strict=True):
            if item is not True:  # the default
                yield part, item


def _axes_fit(axes: Iterable[str], shape: tuple[Any, ...]) -> bool:
    hint: Any = Shaped[Any, " ".join(axes)]
    try:
        return isinstance(_Tensor("", shape), hint)
    except AnnotationError:  # it needs a size that is not known
        return True


def _has_symbols(described: Any) -> bool:
    leaves: list[Any] = []
    map_aggregate(described, leaves.append)
    return any(isinstance(leaf, SymInt) for leaf in leaves)


def _depends_on_values(shape: Any) -> bool:
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return any(isinstance(n, SymInt) and free_unbacked_symbols(n) for n in shape)


# The message: a table of axes ----------------------------------------------------------


class _Row(NamedTuple):
    """A tensor in the table."""

    place: str
    array: _Array
    cells: dict[str, int]  # column -> size


def _message(function: Any, described: "list[tuple[_Side, _Description]]") -> str:
    """Return what is wrong with a call that does not fit.

    jaxtyping is asked once more, argument by argument, and for a wrong one, axis by axis.
    """
    described = [(side, map_aggregate(seen, _number)) for side, seen in described]
    sizes: dict[str, Any] = {}
    for side, seen in described:
        sizes.update(side.split(seen)[1])
    rows: list[_Row] = []
    lines: list[str] = []
    with jaxtyped("context"):
        for part, item in _steps(described):
            lines = _explained(part.place, part.options, item, rows, sizes)
            if lines:
                break
    return "\n".join([_callers_line(function), *lines])


def _explained(
    place: str,
    options: "list[_Option]",
    item: Any,
    rows: list[_Row],
    sizes: dict[str, Any],
) -> list[str]:
    """Return the lines about a wrong value, or add the tensors of a right one to `rows`."""
    fits = _fits_one(options, item, _Limits(is_partial=True, has_symbols=False))
    tuples = [
        (option.options_of(item) or [], item[1])
        for option in options
        if isinstance(option, _Items) and option.options_of(item) is not None
    ]
    arrays = [
        _Row(place, option, option.cells(item[2]))
        for option in options
        if isinstance(option, _Array) and option.has_rank_and_dtype_of(item)
    ]
    if len(tuples) == 1:
        for i, (each, inner) in enumerate(zip(*tuples[0], strict=True)):
            lines = _explained(f"{place}[{i}]", each, inner, rows, sizes)
            if lines:
                return lines
    # With several arrays, it is not known which of them was meant.
    row = arrays[0] if len(arrays) == 1 else None
    if fits:
        rows += [row] if row else []
        return []
    misfit = _misfit(row, rows, sizes) if row else None
    if row and misfit:
        return _table([*rows, row], *misfit)
    return [*_table(rows), f"{place} must be {_text(options)}, got {_got(item)}"]


def _misfit(
    row: _Row, rows: list[_Row], sizes: dict[str, Any]
) -> tuple[str, str] | None:
    """Return the column that does not fit, and why, if that is understood."""
    array = row.array
    columns = array.columns(len(row.cells))
    for column, i in columns:
        if i == array.star or _axes_fit([array.axes[i]], (row.cells[column],)):
            continue
        name = column.strip()
        if not name.isidentifier():
            values = [f"{text} is {sizes[text]}" for text in _BRACE.findall(name)]
            return column, ", and ".join([f"must be {name}", *values])
        origin = _find(name, rows) or row
        return column, f"{name} is {origin.cells[name]} in {origin.place}"
    star = array.star_name
    others = [other for other in rows if star and other.array.star_name == star]
    longest = max(len(other.cells) for other in (row, *others))
    for i in range(-1, -longest - 1, -1):  # as torch broadcasts
        column = f"{star}[{i}]"
        size, found = row.cells.get(column), _find(column, others)
        if size in (None, 1) and array.may_broadcast:
            continue
        if found and size != found.cells[column]:
            return column, f"{column} is {found.cells[column]} in {found.place}"
        if size and others and not found:
            return column, f"{others[0].place} has no {column}"
    return None


def _find(column: str, rows: list[_Row]) -> _Row | None:
    """Return the row that says the size of a column: a 1 may be broadcast."""
    found = [row for row in rows if column in row.cells]
    wide = [row for row in found if row.cells[column] != 1]
    return next(iter([*wide, *found]), None)


def _table(rows: list[_Row], wrong: str = "", reason: str = "") -> list[str]:
    """Return a line for each row, with a mark under the wrong column of the last one."""
    columns = dict.fromkeys(column for row in rows for column in row.cells)
    if wrong:
        columns.setdefault(wrong)
    sizes = [[row.cells.get(column, "") for column in columns] for row in rows]
    mark = ["^" * (column == wrong) for column in columns]
    widths = [
        max(len(f"{cell}") for cell in cells)
        for cells in zip(columns, *sizes, strict=True)
    ]
    left = max([len(row.place) for row in rows], default=0)
    lines = []
    for place, cells in zip(
        ("", *(row.place for row in rows), ""), (columns, *sizes, mark), strict=True
    ):
        padded = [f"{cell:>{w}}" for cell, w in zip(cells, widths, strict=True)]
        lines.append("  ".join([place.ljust(left), *padded]).rstrip())
    if wrong:
        lines[-1] += f"  {reason}"
    return lines if wrong else lines[:-1] if rows else []


def _text(options: "Iterable[_Option]") -> str:
    return " | ".join(map(str, options))


def _got(item: Any) -> str:
    """Return a description in words."""
    kind, *rest = item
    name = "another type" if isinstance(kind, bool) else f"{_Class(kind)}"
    if len(rest) == 2:
        return f"{rest[0]} of shape {(*rest[1],)}".removeprefix("torch.")
    if rest and isinstance(rest[0], tuple):
        return f"{name} of {len(rest[0])} items"
    return repr(rest[0]) if rest else name


def _number(size: Any) -> Any:
    """Return a number for a symbol, which becomes constant: the call fails anyway."""
    if isinstance(size, SymInt) and not _depends_on_values([size]):
        return int(size)
    return size


def _callers_line(function: Any) -> str:
    """Return the line of the call, as `file:number: code`."""
    frames = [(f.f_code.co_filename, n) for f, n in traceback.walk_stack(None)]
    if is_compiling():  # the frames of traced code are not on Python's stack
        from torch._guards import TracingContext

        traced = TracingContext.extract_stack()
        frames = [(f.filename, f.lineno or 0) for f in reversed(traced)] + frames
    file, number = next(
        (each for each in frames if not each[0].startswith(_NOT_THE_CALLER)), frames[-1]
    )
    code = linecache.getline(file, number).strip()
    if function.__name__ not in code:
        code += f"  # {function.__qualname__}"
    return f"{Path(file).name}:{number}: {code}"
