"""Shape checks at run time: turn jaxtyping annotations into errors.

`@typecheck` checks a function or a class, and `typecheck(module)` checks the public
functions of a module, and the `__init__` and `forward` of its classes. A call that
violates an annotation raises `jaxtyping.TypeCheckError`, a `TypeError`, with a table:

    check_shapes.py:31: scores(q, k)
       *batch[-2]  *batch[-1]  query  d  key
    q           2           3      5  8
    k           2           1         8    7
                            ^  *batch[-1] is 3 in q

Each call is *described*: the class of each argument, the dtype and shape of each tensor,
each value for a Literal, and the size of each `{self.d_model}`. The description, and
nothing else, is *judged*, and jaxtyping decides whether a dtype and a shape fit. So a
call with the description of a right call is right.

In eager mode, each call is described, which takes a microsecond, and judged only if its
description is new. Code that torch.compile traces is judged once, while it is traced: a
size is a number, or a symbol that gets a guard when it is compared. So the compiled code
has no checks, and a call with other sizes is traced, and judged, again. A wrong call
breaks the graph, so that Python runs the wrapper, which raises the error. With
fullgraph=True, torch.compile raises an error of its own, which contains this one.

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
from collections.abc import Callable, Iterable, Iterator
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
_RIGHT = (None, None, None)  # for a default, and what a compiler does not show
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
    # The compiler looks at all that it traces, and does not understand objects: it sees
    # functions only. It keeps the annotations as they are resolved now.
    before, after = check.before, check.after
    function, show, show_result = check.function, before.show, after.show

    def get_check() -> _Check:
        return check

    def see(context: Any) -> None:
        check.see(context, before, after)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if is_dynamo_compiling():
            # At a graph break, the compiler cuts a function in two, but no try block.
            # So Python runs the wrapper, and `function` is compiled by itself.
            try:
                from torch._dynamo.comptime import comptime

                seen: Any = show(*args, **kwargs)
                found: Any = None
                comptime(see)
                result = function(*args, **kwargs)
                found = show_result(result, *args, **kwargs)  # noqa: F841  # `see` does
                comptime(see)
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
            is_new = check.read_result(result, *args, **kwargs) != last_found
        except Exception:
            is_new = True
        if is_new:
            check.finish(last_seen, last_found, result, args, kwargs)
        return result

    return wrapper


# The check of a function -------------------------------------------------------------

# Three places for each part of the annotations, and then each size in braces: equal
# tuples are compared faster if they are flat. Where a part may be a default or a union,
# its description stands in the first of its places.
_Description: TypeAlias = tuple[Any, ...]


class _Check:
    """The annotations of a function, and the descriptions of its right calls."""

    def __init__(self, function: Any, owner: Any) -> None:
        self.function = function
        self.owner = owner
        self.name = f"{function.__module__}.{function.__qualname__}"
        self.header = _header(function)
        self.known: dict[Any, _Description] = {}  # of arguments -> of a result
        self.last: tuple[Any, Any] = (None, None)  # those of the call before
        self.resolve()

    def resolve(self, is_final: bool = False) -> None:
        """Read the annotations; a name that is missing at first is looked up once more."""
        hints, is_complete = _resolve(self.function, self.owner, warn=is_final)
        self.is_resolved = is_complete or is_final
        self.before = _Side(self.function, self.header, hints, is_result=False)
        self.after = _Side(self.function, self.header, hints, is_result=True)
        self.read, self.read_result = self.before.read, self.after.read
        self.by_jaxtyping: Any = None
        parts = (*self.before.parts, *self.after.parts)
        if any(isinstance(o, _Refused) for part in parts for o in part.type.inside()):
            self.by_jaxtyping = _by_jaxtyping(self.function, self.header, hints)

    # In eager mode -----------------------------------------------------------------

    def call(self, seen: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function, and judge what is new. `seen` is None if it is not known."""
        __tracebackhide__ = True
        if not self.is_resolved:
            self.resolve(is_final=True)
            seen = None
        if self.by_jaxtyping is not None and not is_compiling():
            return self.by_jaxtyping(*args, **kwargs)
        if seen is None:
            try:
                self.header.bind(*args, **kwargs)
            except TypeError:
                return self.function(*args, **kwargs)  # raises Python's own error
        try:
            expected = self.known.get(seen)
        except TypeError:  # symbols, of which torch.export makes sizes, have no hash
            expected = None
        if expected is None:
            seen = self.described(self.before, *args, **kwargs)
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
        found = self.described(self.after, result, *args, **kwargs)
        if found != expected:
            self.judge(seen, found)
            if _has_symbols((seen, found)):
                return
            if len(self.known) >= _MAX_DESCRIPTIONS:
                self.known.clear()
            self.known[seen] = found
        self.last = seen, found

    def described(self, side: "_Side", *args: Any, **kwargs: Any) -> "_Description":
        """Return the description of any call, with numbers for all sizes in braces."""
        __tracebackhide__ = True
        try:
            return side.read_any(*args, **kwargs)
        except Exception as error:
            sizes = ", ".join(f"{{{size}}}" for size in side.sizes)
            message = f"cannot read {sizes} of {self.name}: {error}"
            raise AnnotationError(message) from error

    def judge(self, seen: _Description, found: _Description | None = None) -> None:
        """Raise an error unless the descriptions of a call fit the annotations."""
        __tracebackhide__ = True
        described = [(self.before, seen)]
        if found is not None:
            described.append((self.after, found))
        if not _fits(described, is_partial=False):
            raise TypeCheckError(_message(self.function, described))

    # While a compiler traces -------------------------------------------------------

    def see(self, context: Any, before: "_Side", after: "_Side") -> None:
        """Judge a call of which the compiler has traced the arguments, or the result."""
        self.hide()
        described = []
        for side, name in ((before, "seen"), (after, "found")):
            shown = context.get_local(name).as_proxy()
            if shown is not None:
                described.append((side, _as_description(side, shown)))
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
        own: list[Any] = [_Check.call, _Check.finish, _Check.described]
        for side in (self.before, self.after):
            own += [side.read, side.read_any]
        for each in (*own, _describe, _number_of):
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


class _Part(NamedTuple):
    """A parameter or the result, and what its annotation takes."""

    place: str  # in messages
    text: str  # the expression that reads it
    type: "_Type"
    default: Any = _EMPTY


class _Code(str):
    """A text that inspect.Signature writes as it is."""

    __repr__ = str.__str__


class _Side:
    """The parameters, or the result: what one description describes."""

    def __init__(
        self,
        function: Any,
        header: inspect.Signature,
        hints: dict[str, Any],
        is_result: bool,
    ) -> None:
        self.header = header
        self.is_result = is_result
        self.sizes: dict[str, str] = {}  # what is in braces -> the axis of this size
        self.parts: list[_Part] = []
        for name in ["return"] if is_result else header.parameters:
            if hints.get(name, Any) is Any:
                continue
            try:
                self.parts.append(self.part(name, hints[name]))
            except (AnnotationError, SyntaxError) as error:
                raise AnnotationError(
                    f"cannot read the annotation of {_place(function, name)}: {error}"
                ) from error
        self.read = self.expression(_reading, "{}")
        self.read_any = self.expression(_reading_any, "_typecheck_number_of({})")
        self.show = self.expression(_showing, "_typecheck_show_size({})")

    def split(self, description: _Description) -> tuple[list[Any], tuple[Any, ...]]:
        """Return the description of each part, and the sizes in braces."""
        end = 3 * len(self.parts)
        items: list[Any] = []
        for i in range(0, end, 3):
            item: Any = description[i : i + 3]
            while isinstance(item[0], tuple):
                item = item[0]
            items.append(item)
        return items, description[end:]

    def part(self, name: str, hint: Any) -> _Part:
        if name == "return":
            return _Part("return value", _RESULT, self.type(hint))
        parameter = self.header.parameters[name]
        if parameter.kind is parameter.VAR_POSITIONAL:
            return _Part(name, name, self.type(tuple[hint, ...]))
        if parameter.kind is parameter.VAR_KEYWORD:
            return _Part(name, f"(*{name}.values(),)", self.type(tuple[hint, ...]))
        return _Part(name, name, self.type(hint), parameter.default)

    def type(self, hint: Any) -> "_Type":
        return _Type(hint, self.options(hint))

    def options(self, hint: Any) -> "list[_Option]":
        """Return what a value may be. All that is not understood is refused here."""
        origin, parts = get_origin(hint), get_args(hint)
        if origin in (Union, UnionType):
            return [option for part in parts for option in self.options(part)]
        if origin is tuple and parts and not any(map(_is_unpacked, parts)):
            items = [self.type(part) for part in parts if part is not Ellipsis]
            return [_Items(items, repeats=parts[1:] == (Ellipsis,))]
        if origin is Literal:
            return [_Value(value) for value in parts]
        if origin is Callable:
            return [_Class(Callable)]
        if hint is Any:
            return [_Class(object)]
        if hint is None:
            return [_Class(NoneType)]
        is_array = isinstance(hint, type) and hasattr(hint, "dim_str")  # jaxtyping's
        if is_array and hint.array_type is Tensor:
            axes = self.axes(hint)
            return [_Refused(Tensor) if axes is None else _Array(hint, axes)]
        kind = origin or hint
        is_plain = isinstance(kind, type) and type(kind).__instancecheck__ in _PLAIN
        if is_plain and origin is None:
            return [_Class(kind)]
        return [_Refused(kind if is_plain else object)]

    def axes(self, array: Any) -> list[str] | None:
        """Return its axes, with the name of an axis in place of each size in braces.

        These names are added to `sizes`. The result is None for braces that are refused.
        """
        axes: list[str] = array.dim_str.split()
        braces: list[str] = []
        for i, dim in enumerate(array.dims):
            text = f"{getattr(dim, 'elem', '')}"  # an expression, without # and name=
            braces += _BRACE.findall(text)
            plain = _BRACE.sub(lambda brace: self.axis(brace[1]), text)
            compile(f"f'{plain}'" if "{" in plain else plain or "0", axes[i], "eval")
            axes[i] = axes[i].removesuffix(text) + plain
        if any("{" in axis for axis in axes):
            return None
        for brace in braces:
            if brace.partition(".")[0] not in self.header.parameters:
                raise AnnotationError(f"no parameter has the name in {{{brace}}}")
            self.sizes[brace] = self.axis(brace)
        return axes

    def axis(self, brace: str) -> str:
        """Return the name of an axis of the size in braces, before or after a call."""
        when = "after" if self.is_result else "before"
        return f"typecheck_{when}_{brace.replace('.', '_dot_')}"

    def expression(
        self, reading: Callable[[_Part, str], str], size: str
    ) -> Callable[..., _Description]:
        """Return a function that takes a call and returns its description.

        It is the only code that is made from text: a loop takes longer, and braces name
        the parameters. All other names begin with _typecheck.
        """
        names: dict[str, Any] = {
            "_typecheck_right": _RIGHT,
            "_typecheck_describe": _describe,
            "_typecheck_show": _show,
            "_typecheck_number_of": _number_of,
            "_typecheck_show_size": _show_size,
        }
        parameters = []
        if self.is_result:
            first = inspect.Parameter(_RESULT, inspect.Parameter.POSITIONAL_ONLY)
            parameters.append(first)
        for name, parameter in self.header.parameters.items():
            default = parameter.default
            if default is not _EMPTY:
                default = _Code(f"_typecheck_default_{name}")
                names[default] = parameter.default
            parameters.append(parameter.replace(annotation=_EMPTY, default=default))
        items = []
        for number, part in enumerate(self.parts):
            kinds = f"_typecheck_kinds_{number}"
            names[kinds] = part.type.kinds()
            item = reading(part, kinds)
            if part.default is not _EMPTY:
                is_default = f"{part.text} is _typecheck_default_{part.text}"
                item = f"_typecheck_right if {is_default} else ({item},), None, None"
            items.append(item)
        items += [size.format(brace) for brace in self.sizes]
        takes = str(inspect.Signature(parameters))[1:-1]
        body = "".join(f"{item}, " for item in items)
        # `names` are variables of a closure, because compiled code compares the globals
        # of a function, and each of their names, at each call.
        make = eval(f"lambda {', '.join(names)}: lambda {takes}: ({body})", {})
        return make(*names.values())


def _is_unpacked(part: Any) -> bool:  # as in tuple[*Items]
    return get_origin(part) is Unpack or getattr(part, "__unpacked__", False)


def _reading(part: _Part, kinds: str) -> str:
    """Return what describes a tensor fast, and raises an error for another value."""
    if _is_one_array(part):
        return f"{part.text}.__class__, {part.text}.dtype, {part.text}.shape"
    return _reading_any(part, kinds)


def _reading_any(part: _Part, kinds: str) -> str:
    """Return what describes any argument or result."""
    if _is_one_array(part):
        return f"*_typecheck_describe({part.text})"
    found = [*part.type.inside()]
    if any(isinstance(option, _Value) for option in found):
        return f"_typecheck_describe({part.text}, True), None, None"
    if any(isinstance(option, (_Array, _Items)) for option in found):
        return f"_typecheck_describe({part.text}), None, None"
    return f"{part.text}.__class__, None, None"


def _is_one_array(part: _Part) -> bool:
    return len(part.type.options) == 1 and isinstance(part.type.options[0], _Array)


def _describe(value: Any, by_value: bool = False) -> tuple[Any, ...]:
    """Return class, dtype and shape; class, items or value, and None."""
    kind = value.__class__
    if isinstance(value, Tensor):
        try:
            return kind, value.dtype, value.shape
        except RuntimeError:  # a nested tensor, or a lazy one, has no shape
            return kind, None, None
    if isinstance(value, tuple):
        return kind, tuple([_describe(item, by_value) for item in value]), None
    if by_value and isinstance(value, _LITERALS):
        return kind, value, None
    return kind, None, None


def _number_of(size: Any) -> Any:
    """Return a size as a number, because a tensor has other values later."""
    is_number = isinstance(size, (int, float, SymInt, SymFloat))
    return size if is_number else operator.index(size)


# While a compiler traces: it shows tensors and numbers, and no classes ------------------


def _showing(part: _Part, kinds: str) -> str:
    """Return an expression that the compiler traces."""
    has_array = any(isinstance(option, _Array) for option in part.type.inside())
    # The compiler does not say whether a tensor is the default.
    if not has_array or isinstance(part.default, Tensor):
        return "_typecheck_right, None, None"
    return f"_typecheck_show({part.text}, {kinds}), None, None"


def _show(value: Any, kinds: tuple[type, ...]) -> tuple[Any, ...]:
    """Return whether a value is of these classes, and the tensors in it."""
    is_named = isinstance(value, kinds)
    if isinstance(value, Tensor):
        return is_named, value, None
    if isinstance(value, tuple):
        return is_named, tuple([_show(item, kinds) for item in value]), None
    return is_named, None, None


def _show_size(size: Any) -> Any:
    return size if isinstance(size, (int, float)) else None


def _as_description(side: _Side, shown: Any) -> _Description:
    """Return the description of what a compiler shows.

    In place of a class, it has whether a value is of a class that the annotation names.
    """

    def example(leaf: Any) -> Any:
        is_proxy = isinstance(leaf, torch.fx.Proxy)
        return leaf.node.meta["example_value"] if is_proxy else leaf

    def described(item: Any) -> tuple[Any, ...]:
        is_named, inside, _ = item
        if isinstance(inside, Tensor):
            return is_named, inside.dtype, inside.shape
        if isinstance(inside, tuple):
            return is_named, tuple(map(described, inside)), None
        return item

    items, sizes = side.split(map_aggregate(shown, example))
    return (*(place for item in items for place in described(item)), *sizes)


# What annotations take ---------------------------------------------------------------


class _Class(NamedTuple):
    kind: type

    def fits(self, seen: Any, has_symbols: bool) -> bool:
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

    def fits(self, seen: Any, has_symbols: bool) -> bool:
        return seen[0] is True or seen == (type(self.value), self.value, None)


class _Items(NamedTuple):
    """A tuple."""

    items: "list[_Type]"
    repeats: bool  # as in tuple[int, ...]

    def pairs(self, seen: Any) -> "list[tuple[_Type, Any]] | None":
        """Return each item's type and description, if a tuple has this length."""
        _, inside, _ = seen
        if not isinstance(inside, tuple):
            return None
        items = self.items * len(inside) if self.repeats else self.items
        same_length = len(items) == len(inside)
        return [*zip(items, inside, strict=True)] if same_length else None

    def fits(self, seen: Any, has_symbols: bool) -> bool:
        pairs = self.pairs(seen)
        return pairs is not None and all(t.fits(item, has_symbols) for t, item in pairs)


class _Tensor(NamedTuple):
    """What jaxtyping reads of a tensor."""

    dtype: Any
    shape: tuple[Any, ...]


class _Array:
    """An array of jaxtyping. Braces are replaced by names of axes."""

    def __init__(self, hint: Any, axes: list[str]) -> None:
        # Its dtype restricts the dtypes again, as in Float[Float32[Tensor, "n"], "m"].
        dtype: Any = type(hint.dtype.__name__, (hint.dtype,), {"dtypes": hint.dtypes})
        self.written = hint.dim_str.split()
        self.axes = axes
        self.star = -1 if hint.index_variadic is None else hint.index_variadic
        star = self.written[self.star] if self.star >= 0 else ""
        self.star_name = star if star == "..." else f"*{star.lstrip('#*')}"
        self.may_broadcast = "#" in star
        if self.may_broadcast:  # jaxtyping needs it for "*#batch", but not as a package
            import numpy  # noqa: F401
        self.hint = dtype[Any, " ".join(axes)]
        self.any_shape = dtype[Any, "..."]
        # jaxtyping compares "*#batch" by numpy, which would turn symbols into numbers.
        without = ["..." if {"*", "#"} <= {*axis} else axis for axis in axes]
        self.with_symbols = dtype[Any, " ".join(without)]

    def fits(self, seen: Any, has_symbols: bool) -> bool:
        if not _is_tensor(seen):
            return False
        hint = self.with_symbols if has_symbols else self.hint
        return _depends_on_values(seen[2]) or isinstance(_Tensor(*seen[1:]), hint)

    def cells(self, seen: Any) -> dict[str, int] | None:
        """Return the size in each column of the table, if dtype and rank fit."""
        if not _is_tensor(seen) or not isinstance(_Tensor(seen[1], ()), self.any_shape):
            return None
        columns: list[str] = []
        extra = len(seen[2]) - len(self.written)
        for i, written in enumerate(self.written):
            if i == self.star:
                columns += [f"{self.star_name}[{k}]" for k in range(-extra - 1, 0)]
                continue
            name = written.lstrip("#*")
            while name in columns:  # as in "n n"
                name += " "
            columns.append(name)
        same_rank = len(columns) == len(seen[2])
        return dict(zip(columns, seen[2], strict=True)) if same_rank else None


def _is_tensor(seen: Any) -> bool:
    kind, _, shape = seen
    is_named = isinstance(kind, bool)  # which compiled code has in place of a class
    return shape is not None and (is_named or issubclass(kind, Tensor))


_Option: TypeAlias = _Class | _Value | _Items | _Array


class _Type(NamedTuple):
    """What an annotation takes: one of these."""

    hint: Any
    options: list[_Option]

    def __str__(self) -> str:
        text = inspect.formatannotation(self.hint)
        return text.replace("jaxtyping.", "").replace("'", '"')

    def fits(self, item: Any, has_symbols: bool) -> bool:
        return any(option.fits(item, has_symbols) for option in self.options)

    def inside(self) -> Iterator[_Option]:
        """Yield all options, also those for the items of tuples."""
        for option in self.options:
            yield option
            if isinstance(option, _Items):
                for item in option.items:
                    yield from item.inside()

    def kinds(self) -> tuple[type, ...]:
        """Return the classes that an annotation names."""
        kinds: list[type] = []
        for option in self.inside():
            if isinstance(option, _Class):
                kinds += (option.kind, *_SUBCLASSES.get(option.kind, ()))
            elif isinstance(option, _Value):
                kinds.append(type(option.value))
        return tuple(kinds)


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

_Described: TypeAlias = list[tuple[_Side, _Description]]


def _fits(described: _Described, is_partial: bool) -> bool:
    """Return whether the descriptions of a call fit the annotations."""
    has_symbols = _has_symbols([seen for _, seen in described])
    with jaxtyped("context"):  # in which jaxtyping remembers the sizes of axes
        for part, item in _steps(described):
            try:
                if not part.type.fits(item, has_symbols):
                    return False
            except AnnotationError:  # it needs a size that is not known
                if not is_partial:
                    raise
    return True


def _steps(described: _Described) -> Iterator[tuple[_Part, Any]]:
    """Tell jaxtyping the sizes in braces, and yield each part with its description."""
    for side, description in described:
        items, sizes = side.split(description)
        named = zip(side.sizes.values(), sizes, strict=True)
        known = {axis: size for axis, size in named if size is not None}
        _axes_fit(known, (*known.values(),))
        for part, item in zip(side.parts, items, strict=True):
            if item != _RIGHT:
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


def _message(function: Any, described: _Described) -> str:
    """Return what is wrong with a call that does not fit.

    jaxtyping is asked once more, argument by argument, and for a wrong one, axis by axis.
    """
    described = [(side, map_aggregate(seen, _number)) for side, seen in described]
    sizes: dict[str, Any] = {}
    for side, seen in described:
        sizes.update(zip(side.sizes, side.split(seen)[1], strict=True))
    rows: list[_Row] = []
    with jaxtyped("context"):
        parts = _steps(described)
        each = (_explained(part.place, part.type, x, rows, sizes) for part, x in parts)
        lines = next(filter(None, each), [])
    return "\n".join([_callers_line(function), *lines])


def _explained(
    place: str, type_: _Type, item: Any, rows: list[_Row], sizes: dict[str, Any]
) -> list[str]:
    """Return the lines about a wrong value, or add the tensors of a right one to `rows`."""
    try:
        fits = type_.fits(item, has_symbols=False)
    except AnnotationError:
        fits = True
    arrays = [option for option in type_.options if isinstance(option, _Array)]
    for option in type_.options:
        pairs = option.pairs(item) if isinstance(option, _Items) else None
        for i, (each, inner) in enumerate(pairs or []):
            lines = _explained(f"{place}[{i}]", each, inner, rows, sizes)
            if lines and not fits:
                return lines
    # With several arrays, it is not known which of them was meant.
    cells = arrays[0].cells(item) if len(arrays) == 1 else None
    row = None if cells is None else _Row(place, arrays[0], cells)
    if fits:
        rows += [row] if row else []
        return []
    wrong, reason = _misfit(row, rows, sizes) if row else ("", "")
    if row and wrong:
        return _table([*rows, row], wrong, reason)
    return [*_table(rows), f"{place} must be {type_}, got {_got(item)}"]


def _misfit(row: _Row, rows: list[_Row], sizes: dict[str, Any]) -> tuple[str, str]:
    """Return the column that does not fit, and why, or empty texts."""
    array = row.array
    star = f"{array.star_name}["
    axes = [axis for i, axis in enumerate(array.axes) if i != array.star]
    columns = [column for column in row.cells if not column.startswith(star)]
    for column, axis in zip(columns, axes, strict=True):
        if _axes_fit([axis], (row.cells[column],)):
            continue
        name = column.strip()
        if not name.isidentifier():
            values = [f"{text} is {sizes[text]}" for text in _BRACE.findall(name)]
            return column, ", and ".join([f"must be {name}", *values])
        origin = _origin(name, [*rows, row])
        return column, f"{name} is {origin.cells[name]} in {origin.place}"
    for column in (column for other in rows for column in other.cells):
        if not column.startswith(star):
            continue
        size, origin = row.cells.get(column), _origin(column, rows)
        may_be_1 = array.may_broadcast and size in (None, 1)
        if size != origin.cells[column] and not may_be_1:
            return column, f"{column} is {origin.cells[column]} in {origin.place}"
    return "", ""


def _origin(column: str, rows: list[_Row]) -> _Row:
    """Return the first row that says the size of a column: a 1 may be broadcast."""
    found = [row for row in rows if column in row.cells]
    return max(found, key=lambda row: row.cells[column] != 1)


def _table(rows: list[_Row], wrong: str = "", reason: str = "") -> list[str]:
    """Return a line for each row, with a mark under the wrong column of the last one."""
    columns = [*dict.fromkeys(column for row in rows for column in row.cells)]
    lines = [["", *columns]]
    for row in rows:
        lines.append([row.place, *(f"{row.cells.get(each, '')}" for each in columns)])
    lines.append(["", *("^" * (each == wrong) for each in columns)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = []
    for place, *cells in lines:
        padded = [cell.rjust(w) for cell, w in zip(cells, widths[1:], strict=True)]
        texts.append("  ".join([place.ljust(widths[0]), *padded]).rstrip())
    texts[-1] += f"  {reason}"
    return texts if wrong else texts[:-1] if rows else []


def _got(item: Any) -> str:
    """Return a description in words."""
    kind, inside, shape = item
    if shape is not None:
        return f"{inside} of shape {(*shape,)}".removeprefix("torch.")
    if kind is NoneType:
        return "None"
    name = "another type" if isinstance(kind, bool) else kind.__name__
    if isinstance(inside, tuple):
        return f"{name} of {len(inside)} items"
    return name if inside is None else repr(inside)


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
