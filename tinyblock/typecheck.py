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
nothing else, is *checked*: jaxtyping decides whether a dtype and a shape fit. So a call
with the description of a right call is right.

In eager mode, a call is checked only if its description is new. Code that torch.compile
traces is checked while it is traced: a size is a number, or a symbol that gets a guard
when it is compared. So the compiled code has no checks, and a call with other sizes is
traced, and checked, again. A wrong call breaks the graph, so that Python runs the wrapper,
which raises the error. With fullgraph=True, torch.compile raises an error of its own,
which contains this one.

If an annotation is more than classes, arrays of torch.Tensor, tuples and unions of these,
None, Any, Literal, and Callable, jaxtyping and beartype check each call of the function
in eager mode, and compiled code leaves this annotation unchecked.

These names are not part of torch's public interface. If one goes, compiled code lacks

- `torch._dynamo.comptime`: the checks,
- `torch._dynamo.decorators.skip`: one graph in place of several, after a graph break,
- `torch._guards.TracingContext`: the caller's line in an error,
- `node.meta["example_value"]`: the checks of dynamic sizes,
- `free_unbacked_symbols`: right calls with sizes that depend on values.
"""

import functools
import inspect
import linecache
import os
import re
import traceback
import typing
import warnings
from abc import ABCMeta
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from types import FunctionType, ModuleType, NoneType, SimpleNamespace, UnionType
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

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
_PLAIN: set[Any] = {type.__instancecheck__, ABCMeta.__instancecheck__}
_SUBCLASSES: dict[Any, tuple[type, ...]] = {float: (int,), complex: (float, int)}
_OF_SYMBOL: Any = {SymInt: int, SymFloat: float, SymBool: bool}
_LITERALS = (bool, int, str, bytes, Enum, NoneType)
_EMPTY = inspect.Parameter.empty
_BRACE = re.compile(r"(?<![\w}])\{([^\W\d]\w*(?:\.[^\W\d]\w*)*)\}(?![\w{])")
# The frames of these are not the caller's.
_NOT_THE_CALLER = (
    "<typecheck of",
    (lambda: 0).__code__.co_filename,
    f"{Path(torch.__file__).parent}{os.sep}",
)


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
      methods, properties, generators, coroutines, functions under other decorators,
      `Self`, and (after a warning) names that are not there yet.

    Raises:
        TypeError: the target is none of these, or a function without annotations or
            under another decorator.
        jaxtyping.AnnotationError: an annotation is wrong, such as Float[Tensor, "{n"].
    """
    if config.jaxtyping_disable:
        return target
    if not isinstance(target, (ModuleType, type)):
        if not _is_checkable(target):
            raise TypeError(
                "target must be a module, a class, or an annotated function that is no "
                f"generator and no coroutine, got {target!r}"
            )
        checked = _checked(target)
        if checked is target and not hasattr(target, "__typechecked__"):
            raise TypeError(f"put @typecheck below the other decorators of {target!r}")
        return checked
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
    others = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
    return not member.__code__.co_flags & others


# The wrapper -------------------------------------------------------------------------

# It is text, because the parameters are those of the function: with *args and **kwargs,
# a check takes 0.4 us more. $ stands for _typecheck_, so that no name is a parameter's.
_WRAPPER = """\
def make({names}):
    def wrapper({parameters}):
        __tracebackhide__ = True
        if $is_compiling():
            # At a graph break, the compiler cuts a function in two, but no try block.
            # So Python runs the wrapper, and the function is compiled by itself.
            try:
                from torch._dynamo.comptime import comptime as $comptime
                $seen, $found = {shown}, None
                $comptime($see)
                $result = $function({arguments})
                $found = {shown_result}
                $comptime($see)
                return $result
            except Exception:
                raise
        # Most calls have the description of the call before.
        $last_seen, $last_found = $last[0]
        $seen = {seen}
        $is_new = $seen != $last_seen
        if $is_new:
            $check($seen)
        $result = $call({arguments})
        $found = {found}
        if $is_new or $found != $last_found:
            $check($seen, $found)
        return $result
    return wrapper
"""
_PASSED: dict[Any, str] = {
    inspect.Parameter.VAR_POSITIONAL: "*{0}",
    inspect.Parameter.VAR_KEYWORD: "**{0}",
    inspect.Parameter.KEYWORD_ONLY: "{0}={0}",
}


def _checked(function: Any, owner: Any = None) -> Any:
    """Return a wrapper of `function` that checks its calls."""
    if hasattr(function, "__wrapped__"):  # checked already, or under a decorator
        return function
    check = _Check(function, owner)
    wrapper = _wrapper(check)
    functools.update_wrapper(wrapper, function)
    wrapper.__typechecked__ = True
    # Dynamo counts the recompilations of each code object, and reports them by its name.
    wrapper.__code__ = wrapper.__code__.replace(co_name=check.name)
    return wrapper


def _wrapper(check: "_Check") -> Any:
    """Return a function that describes its calls, and calls the function."""
    signature, before, after = check.signature, check.before, check.after

    # The compiler looks at all that it traces, and understands functions, but no objects.
    def run(seen: _Description, found: _Description | None = None) -> None:
        __tracebackhide__ = True
        check.run(seen, found)

    def by_jaxtyping(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        call = check.function if is_compiling() else check.by_jaxtyping
        return call(*args, **kwargs)

    def see(context: Any) -> None:
        check.hide(run, by_jaxtyping)
        check.see(context)

    names: dict[str, Any] = {
        "$function": check.function,
        "$call": by_jaxtyping if check.by_jaxtyping else check.function,
        "$last": check.last,
        "$check": run,
        "$see": see,
        "$is_compiling": is_dynamo_compiling,
        "$Tensor": Tensor,
        "$describe": _describe,
        "$show_value": _show_value,
    }
    for part in (*before.parts, *after.parts):
        array = part.annotations.array
        leaves = [leaf for leaf in _leaves(part.hint) if array(leaf) is None]
        # All classes, if one is not understood.
        names[part.classes] = sum([_classes(leaf) or (object,) for leaf in leaves], ())
    parameters, arguments = [], []
    for name, parameter in signature.parameters.items():
        parameter = parameter.replace(annotation=_EMPTY)
        if parameter.default is not _EMPTY:
            names[f"$default_{name}"] = parameter.default
            parameter = parameter.replace(default=None)  # replaced below
        parameters.append(parameter)
        arguments.append(_PASSED.get(parameter.kind, "{0}").format(name))
    text = _WRAPPER.format(
        # `names` are variables of a closure, because compiled code compares the globals
        # of a function, and each of their names, at each call.
        names=", ".join(names),
        parameters=f"{inspect.Signature(parameters)}"[1:-1],
        arguments=", ".join(arguments),
        seen=before.expression(_Part.described),
        found=after.expression(_Part.described),
        shown=before.expression(_Part.shown),
        shown_result=after.expression(_Part.shown),
    )
    made: dict[str, Any] = {}
    code = text.replace("$", "_typecheck_")
    exec(compile(code, f"<typecheck of {check.name}>", "exec"), made)
    wrapper = made["make"](*names.values())
    wrapper.__defaults__ = check.function.__defaults__
    wrapper.__kwdefaults__ = check.function.__kwdefaults__
    return wrapper


# The check of a function -------------------------------------------------------------

# A description has an item for each annotated parameter, or for the result, and then each
# size in braces. An item is
#     (class, dtype, shape)   for a tensor,
#     (class, items, None)    for a tuple,
#     (class, value, None)    for what a Literal may be,
#     (class, None, None)     for another value, and
#     None                    for a default, and for what a compiler does not show.
# A compiler shows no classes: an item has True if the annotation names the class, else
# False, and for another value, the name of the class in the second place.
_Item = tuple[Any, Any, Any]
_Description = tuple[Any, ...]


class _Check:
    """The annotations of a function, and the descriptions of its right calls."""

    def __init__(self, function: Any, owner: Any) -> None:
        self.function = function
        self.name = f"{function.__module__}.{function.__qualname__}"
        self.signature = inspect.signature(function)
        hints = _hints(function, owner)
        self.before = _Annotations(self, hints, is_result=False)
        self.after = _Annotations(self, hints, is_result=True)
        # Of the arguments of right calls, each with None and with the results.
        self.known: set[tuple[_Description, _Description | None]] = set()
        self.last: list[Any] = [(None, None)]  # those of the call before
        self.by_jaxtyping: Any = None
        if self.before.is_refused or self.after.is_refused:
            self.by_jaxtyping = _by_jaxtyping(function, self.signature, hints)

    def run(self, seen: _Description, found: _Description | None = None) -> None:
        """Check a call before and after it, if its description is not known."""
        __tracebackhide__ = True
        if self.by_jaxtyping is not None:  # which checks each call
            return
        try:
            is_known = (seen, found) in self.known
        except TypeError:  # symbols, of which torch.export makes sizes, have no hash
            is_known = False
        if not is_known:
            self.learn(seen, found)
        elif found is not None:
            self.last[0] = seen, found

    def learn(self, seen: _Description, found: _Description | None) -> None:
        """Raise an error unless a call fits, and remember it when it has a result."""
        __tracebackhide__ = True
        message = self.message(seen, found)
        if message:
            raise TypeCheckError(message)
        if found is None or is_compiling() or _has_symbols((seen, found)):
            return
        if len(self.known) >= 2 * _MAX_DESCRIPTIONS:
            self.known.clear()
        self.known |= {(seen, None), (seen, found)}
        self.last[0] = seen, found

    def see(self, context: Any) -> None:
        """Check a call of which the compiler has traced the arguments, or the result."""
        names = ("_typecheck_seen", "_typecheck_found")
        shown = [context.get_local(name).as_proxy() for name in names]
        try:
            message = self.message(*map_aggregate(shown, _as_symbol))
        except AnnotationError:  # it needs a size that the compiler does not show
            return
        if message:
            context.graph_break(f"TypeCheckError: {message}")

    def hide(self, *functions: Any) -> None:
        """Keep the compiler from tracing the checks of eager mode, after a graph break.

        It traces none of them, but still compiles `function`, which the wrapper calls.
        """
        from torch._dynamo.decorators import skip

        if "learn" not in vars(self):
            vars(self)["learn"] = torch.compiler.disable(self.learn)
            if self.by_jaxtyping is not None:
                self.by_jaxtyping = torch.compiler.disable(self.by_jaxtyping)
        for each in [*functions, _Check.run, _describe]:
            skip(each)

    def message(self, seen: _Description, found: _Description | None = None) -> str:
        """Return what is wrong with a call, or an empty text."""
        has_symbols = _has_symbols((seen, found))
        sizes: dict[str, Any] = {}
        right: list[tuple[_Part, _Item]] = []
        described = (self.before, seen), (self.after, found or ())
        with jaxtyped("context"):  # in which jaxtyping remembers the sizes of axes
            for annotations, description in described:
                sizes |= annotations.sizes_in(description)
                for part, item in zip(annotations.parts, description, strict=False):
                    if item is None:
                        continue
                    if annotations.fits(part.hint, item, has_symbols):
                        right.append((part, item))
                        continue
                    rows = [r for p, x in right for r in _rows(p, p.place, p.hint, x)]
                    item = map_aggregate(item, _number)
                    lines = _explained(part, item, rows, sizes)
                    return "\n".join([_callers_line(self.function), *lines])
        return ""


# What a call has: its description ----------------------------------------------------


class _Part(NamedTuple):
    """An annotated parameter, or the result."""

    place: str  # in messages
    value: str  # the expression that reads it
    hint: Any
    default: Any
    classes: str  # the name of those in its annotation
    annotations: "_Annotations"

    def described(self) -> str:
        """Return the expression of its item in eager mode."""
        value, leaves = self.value, [*_leaves(self.hint)]
        if any(get_origin(leaf) is Literal for leaf in leaves):
            item = f"$describe({value}, True)"
        elif self.annotations.array(self.hint):  # at once, what $describe returns
            item = f"($Tensor, {value}.dtype, {value}.shape)"
            item += f" if {value}.__class__ is $Tensor else $describe({value})"
        elif leaves != _options(self.hint) or self.has_array():
            item = f"$describe({value})"
        else:
            item = f"({value}.__class__, None, None)"
        return self.unless_default(item)

    def shown(self) -> str:
        """Return the expression of its item in code that a compiler traces."""
        # The compiler does not say whether a tensor is the default.
        if not self.has_array() or isinstance(self.default, Tensor):
            return "None"
        item = f"$show_value({self.value}, {self.classes})"
        if self.annotations.array(self.hint):  # at once, what $show_value returns
            shape = f"(False, {self.value}.dtype, tuple({self.value}.shape))"
            item = f"{shape} if isinstance({self.value}, $Tensor) else {item}"
        return self.unless_default(item)

    def has_array(self) -> bool:
        return any(self.annotations.array(leaf) for leaf in _leaves(self.hint))

    def unless_default(self, item: str) -> str:
        if self.default is _EMPTY:
            return item
        return f"None if {self.value} is $default_{self.value} else {item}"


def _describe(value: Any, by_value: bool = False) -> _Item:
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


def _show_value(value: Any, kinds: tuple[type, ...]) -> _Item:
    """Return the item in traced code."""
    is_named = isinstance(value, kinds)
    if isinstance(value, Tensor):
        return is_named, value.dtype, tuple(value.shape)
    if isinstance(value, tuple):
        return is_named, tuple([_show_value(item, kinds) for item in value]), None
    # A text, because the compiler does not show the name of list by itself.
    return is_named, f"{type(value).__name__}", None


def _as_symbol(leaf: Any) -> Any:
    """Return what a compiler knows of a size: a symbol, or a number."""
    return leaf.node.meta["example_value"] if isinstance(leaf, torch.fx.Proxy) else leaf


# What annotations take ---------------------------------------------------------------


class _Annotations:
    """The annotations of the parameters, or of the result."""

    def __init__(self, check: _Check, hints: dict[str, Any], is_result: bool) -> None:
        self.function = check.name
        self.parameters = check.signature.parameters
        self.is_result = is_result
        self.sizes: dict[str, str] = {}  # what is in braces -> the axis of this size
        self.parts: list[_Part] = []
        self.arrays: dict[Any, _Array] = {}
        self.is_refused = False
        for name in ["return"] if is_result else self.parameters:
            if hints.get(name, Any) is Any:
                continue
            try:
                for leaf in _leaves(hints[name]):
                    self.read(leaf)
            except (AnnotationError, SyntaxError) as error:
                place = f"annotation of '{name}' in {self.function}"
                raise AnnotationError(f"cannot read the {place}: {error}") from error
            self.parts.append(self.part(name, hints[name]))

    def part(self, name: str, hint: Any) -> _Part:
        classes = f"$classes_{name}"
        if name == "return":
            return _Part("return value", "$result", hint, _EMPTY, classes, self)
        parameter = self.parameters[name]
        is_keywords = parameter.kind is parameter.VAR_KEYWORD
        if is_keywords or parameter.kind is parameter.VAR_POSITIONAL:
            hint = tuple[hint, ...]
        value = f"(*{name}.values(),)" if is_keywords else name
        return _Part(name, value, hint, parameter.default, classes, self)

    def read(self, leaf: Any) -> None:
        """Read the axes of an array. All that is not understood is refused here."""
        if isinstance(leaf, type) and hasattr(leaf, "dim_str"):  # jaxtyping's
            axes = self.axes(leaf)
            if axes is not None:
                self.arrays[leaf] = _Array(leaf, axes)
                return
        if not _classes(leaf):
            self.is_refused = True

    def array(self, hint: Any) -> "_Array | None":
        return self.arrays.get(hint) if isinstance(hint, type) else None

    def axes(self, array: Any) -> list[str] | None:
        """Return its axes, with the name of an axis in place of each size in braces.

        The result is None for an array that is refused.
        """
        axes: list[str] = array.dim_str.split()
        # Of each axis, without # and name=
        expressions = [f"{getattr(dim, 'elem', '')}" for dim in array.dims]
        others = [_BRACE.sub("0", text) for text in expressions]
        for axis, text in zip(axes, others, strict=True):
            compile(f"f'{text}'" if "{" in text else text or "0", axis, "eval")
        is_nested = array.dtypes != array.dtype.dtypes  # an array of arrays
        if array.array_type is not Tensor or is_nested or "{" in "".join(others):
            return None
        for i, text in enumerate(expressions):
            named = _BRACE.sub(lambda brace: self.axis(brace[1]), text)
            axes[i] = axes[i].removesuffix(text) + named
        return axes

    def axis(self, brace: str) -> str:
        """Return the name of an axis of the size in braces, before or after a call."""
        if brace.partition(".")[0] not in self.parameters:
            raise AnnotationError(f"no parameter has the name in {{{brace}}}")
        when = "after" if self.is_result else "before"
        # The last _ tells typecheck_before_1_ from the beginning of typecheck_before_10_.
        new = f"typecheck_{when}_{len(self.sizes)}_"
        return self.sizes.setdefault(brace, new)

    def fits(self, hint: Any, item: _Item, has_symbols: bool) -> bool:
        """Return whether a value is right."""
        kind, inside, _ = item
        options = _options(hint)
        if len(options) > 1:
            return any(self.fits(option, item, has_symbols) for option in options)
        if _is_tuple(hint):
            pairs = _pairs(hint, inside)
            return pairs is not None and all(self.fits(*p, has_symbols) for p in pairs)
        array, classes = self.array(hint), _classes(hint)
        if array is not None:
            return array.fits(item, has_symbols)
        if isinstance(kind, bool) or not classes:  # while traced, and what is refused
            return not classes or kind
        if get_origin(hint) is Literal:
            return any(item == (type(v), v, None) for v in get_args(hint))
        kind = _OF_SYMBOL.get(kind, kind)
        return issubclass(kind, classes)

    def expression(self, of_part: Callable[[_Part], str]) -> str:
        """Return the expression of a description."""
        items = [*map(of_part, self.parts), *self.sizes]
        return f"({''.join(f'{item}, ' for item in items)})"

    def sizes_in(self, description: _Description) -> dict[str, Any]:
        """Return the size of each brace, and tell jaxtyping."""
        found = dict(zip(self.sizes, description[len(self.parts) :], strict=False))
        for brace, size in found.items():
            if not isinstance(size, (int, SymInt)):
                place = f"{{{brace}}} of {self.function}"
                raise AnnotationError(f"{place} must be an int, got {size!r}")
            _axis_fits(self.sizes[brace], size)
        return found


# An annotation is a tree of unions and tuples. Its leaves are arrays, and what has classes.


def _options(hint: Any) -> list[Any]:
    """Return the parts of a union, or the annotation itself."""
    return [*get_args(hint)] if get_origin(hint) in (Union, UnionType) else [hint]


def _is_tuple(hint: Any) -> bool:
    if get_origin(hint) is not tuple or not get_args(hint):
        return False
    # Not one with unpacked items, as in tuple[*Items].
    return not any(
        get_origin(part) is typing.Unpack or getattr(part, "__unpacked__", False)
        for part in get_args(hint)
    )


def _leaves(hint: Any) -> Iterator[Any]:
    for option in _options(hint):
        if not _is_tuple(option):
            yield option
            continue
        for part in get_args(option):
            if part is not Ellipsis:
                yield from _leaves(part)


def _classes(leaf: Any) -> tuple[Any, ...]:
    """Return the classes whose values it takes, or nothing if it is not understood."""
    origin = get_origin(leaf)
    if leaf is Any or leaf is None:
        return (object if leaf is Any else NoneType,)
    if origin is Literal:
        return tuple(map(type, get_args(leaf)))
    if origin is Callable:
        return (Callable,)
    is_class = isinstance(leaf, type) and origin is None
    if is_class and type(leaf).__instancecheck__ in _PLAIN:
        return (leaf, *_SUBCLASSES.get(leaf, ()))
    return ()


def _pairs(hint: Any, items: Any) -> list[tuple[Any, _Item]] | None:
    """Return each item's annotation and item, if this is a tuple of such a length."""
    if not _is_tuple(hint) or not isinstance(items, tuple):
        return None
    hints = get_args(hint)
    if hints[1:] == (Ellipsis,):
        hints = hints[:1] * len(items)
    return [*zip(hints, items, strict=True)] if len(hints) == len(items) else None


class _Tensor(NamedTuple):
    """What jaxtyping reads of a tensor."""

    dtype: Any
    shape: tuple[Any, ...]


class _Array:
    """An array of jaxtyping. `axes` have the names of axes in place of braces."""

    def __init__(self, hint: Any, axes: list[str]) -> None:
        self.axes = axes
        self.names = [axis.lstrip("#*") for axis in hint.dim_str.split()]
        self.star = hint.index_variadic  # the index of "*batch" or "...", or None
        star = "" if self.star is None else axes[self.star]
        self.star_name = star.replace("#", "")
        self.may_broadcast = "#" in star
        without_it = [*axes]
        if self.may_broadcast:
            # jaxtyping compares it by numpy, which would turn symbols into numbers.
            import numpy  # noqa: F401  # because jaxtyping says nothing if it is missing

            without_it[self.star] = "..."
        self.hint = hint.dtype[Any, " ".join(axes)]
        self.hint_of_symbols = hint.dtype[Any, " ".join(without_it)]
        self.any_shape = hint.dtype[Any, "..."]

    def fits(self, seen: _Item, has_symbols: bool) -> bool:
        _, dtype, shape = seen
        if shape is None:
            return False
        hint = self.hint_of_symbols if has_symbols else self.hint
        return _depends_on_values(shape) or isinstance(_Tensor(dtype, shape), hint)

    def cells(self, seen: _Item) -> "dict[_Column, int] | None":
        """Return the size in each column of the table, if dtype and rank fit."""
        _, dtype, shape = seen
        if shape is None or not isinstance(_Tensor(dtype, ()), self.any_shape):
            return None
        columns: list[_Column] = []
        for i, name in enumerate(self.names):
            if i == self.star:
                count = len(shape) - len(self.names) + 1
                columns += [_Column(self.star_name, k) for k in range(-count, 0)]
            else:  # the second axis of "n n" has another number
                columns.append(_Column(name, self.names[:i].count(name)))
        if len(columns) != len(shape):
            return None
        return dict(zip(columns, map(_number, shape), strict=True))


def _hints(function: Any, owner: Any) -> dict[str, Any]:
    """Return the annotations that can be checked."""
    names = {owner.__name__: owner} if isinstance(owner, type) else {}
    hints: dict[str, Any] = {}
    for name, annotation in function.__annotations__.items():
        one: Any = SimpleNamespace(__annotations__={name: annotation})
        place = (
            f"annotation of '{name}' in {function.__module__}.{function.__qualname__}"
        )
        try:
            hint = typing.get_type_hints(
                one, function.__globals__, names, include_extras=True
            )[name]
        except (NameError, AttributeError) as error:
            warnings.warn(f"typecheck ignores the {place}: {error}", stacklevel=5)
            continue
        except Exception as error:
            raise AnnotationError(f"cannot read the {place}: {error}") from error
        is_self = re.search(r"\.Self\b", repr(hint))
        if not is_self and not isinstance(
            hint, (typing.ParamSpecArgs, typing.ParamSpecKwargs)
        ):
            hints[name] = hint
    return hints


def _by_jaxtyping(
    function: Any, signature: inspect.Signature, hints: dict[str, Any]
) -> Any:
    """Return a function whose calls jaxtyping and beartype check."""
    from beartype import BeartypeConf, beartype  # here, because most users need it not
    from beartype.roar import BeartypeException

    @functools.wraps(function)  # so that errors name it
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    parameters = []
    for name, parameter in signature.parameters.items():
        hint = hints.get(name, Any)
        if parameter.default is None:  # which is right, also if it is passed
            hint = Union[hint, None]  # noqa: UP007  # | does not take all annotations
        parameters.append(parameter.replace(annotation=hint))
    result = hints.get("return", Any)
    vars(call)["__signature__"] = inspect.Signature(
        parameters, return_annotation=result
    )
    call.__annotations__ = {}  # jaxtyping 0.3.0 prefers these to the signature
    int_is_float = BeartypeConf(is_pep484_tower=True)  # as in theta=10000
    try:
        return jaxtyped(call, typechecker=beartype(conf=int_is_float))
    except BeartypeException as error:
        raise AnnotationError(f"{error}".partition("\n")[0]) from error


def _axis_fits(axis: str, size: Any) -> bool:
    """Return whether jaxtyping takes this size, which it then remembers."""
    hint: Any = Shaped[Any, axis]
    return isinstance(_Tensor("", (size,)), hint)


def _has_symbols(described: Any) -> bool:
    leaves: list[Any] = []
    map_aggregate(described, leaves.append)
    return any(isinstance(leaf, SymInt) for leaf in leaves)


def _depends_on_values(shape: Any) -> bool:
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return any(isinstance(n, SymInt) and free_unbacked_symbols(n) for n in shape)


# The message: a table of axes ----------------------------------------------------------


class _Column(NamedTuple):
    """An axis. Those of *batch have the numbers ..., -2, -1."""

    name: str
    number: int = 0

    def __str__(self) -> str:
        return f"{self.name}[{self.number}]" if self.number < 0 else self.name


class _Row(NamedTuple):
    """A tensor."""

    place: str
    array: _Array
    cells: dict[_Column, int]


def _rows(part: _Part, place: str, hint: Any, item: _Item) -> list[_Row]:
    """Return the rows of the tensors in a value."""
    options = _options(hint)
    # With several arrays, it is not known which of them was meant.
    arrays = [*filter(None, map(part.annotations.array, options))]
    cells = arrays[0].cells(item) if len(arrays) == 1 else None
    if cells is not None:
        return [_Row(place, arrays[0], cells)]
    pairs = next(filter(None, (_pairs(option, item[1]) for option in options)), [])
    rows = [_rows(part, f"{place}[{i}]", *pair) for i, pair in enumerate(pairs)]
    return [row for each in rows for row in each]


def _explained(
    part: _Part, item: _Item, rows: list[_Row], sizes: dict[str, Any]
) -> list[str]:
    """Return the lines about a value that does not fit, after the rows of right ones."""
    for row in _rows(part, part.place, part.hint, item):
        column, reason = _mark(row, rows, sizes)
        rows = [*rows, row]
        if column is not None:
            return _table(rows, column, reason)
    text = inspect.formatannotation(part.hint)
    text = text.replace("jaxtyping.", "").replace("'", '"')
    return [*_table(rows), f"{part.place} must be {text}, got {_got(item)}"]


def _mark(
    row: _Row, rows: list[_Row], sizes: dict[str, Any]
) -> tuple[_Column | None, str]:
    """Return the column that does not fit, and why."""
    columns = [column for column in row.cells if column.number >= 0]
    axes = [axis for i, axis in enumerate(row.array.axes) if i != row.array.star]
    for column, axis in zip(columns, axes, strict=True):
        if _axis_fits(axis, row.cells[column]):
            continue
        if not column.name.isidentifier():
            texts = _BRACE.findall(column.name)
            values = [f"{text} is {_number(sizes[text])}" for text in texts]
            return column, ", and ".join([f"must be {column}", *values])
        _, reason = _origin(_Column(column.name), [*rows, row])
        return column, reason
    for column in (column for other in rows for column in other.cells):
        is_named = not column.name.startswith((".", "_"))
        if is_named and column.name == row.array.star_name:
            size, (expected, reason) = row.cells.get(column), _origin(column, rows)
            may_be_1 = row.array.may_broadcast and size in (None, 1)
            if size != expected and not may_be_1:
                return column, reason
    return None, ""


def _origin(column: _Column, rows: list[_Row]) -> tuple[int, str]:
    """Return the size of a column, and who said so: not a 1 that may be broadcast."""
    found = [row for row in rows if column in row.cells]
    origin = max(found, key=lambda row: row.cells[column] != 1)
    size = origin.cells[column]
    return size, f"{column} is {size} in {origin.place}"


def _table(
    rows: list[_Row], wrong: _Column | None = None, reason: str = ""
) -> list[str]:
    """Return a line for each row, with a mark under the wrong column of the last one."""
    columns = [*dict.fromkeys(column for row in rows for column in row.cells)]
    names = [column.name for column in columns]
    columns.sort(key=lambda column: (names.index(column.name), column.number))
    lines = [["", *map(str, columns)]]
    lines += [
        [row.place, *(f"{row.cells.get(c, '')}" for c in columns)] for row in rows
    ]
    lines.append(["", *("^" * (each == wrong) for each in columns)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = []
    for place, *cells in lines:
        padded = [cell.rjust(w) for cell, w in zip(cells, widths[1:], strict=True)]
        texts.append("  ".join([place.ljust(widths[0]), *padded]).rstrip())
    texts[-1] += f"  {reason}"
    return texts if wrong else texts[:-1] if rows else []


def _got(item: _Item) -> str:
    """Return a description in words."""
    kind, inside, shape = item
    if shape is not None:
        return f"{inside} of shape {(*shape,)}".removeprefix("torch.")
    if isinstance(inside, tuple):
        return f"({', '.join(map(_got, inside))})"
    is_traced = isinstance(kind, bool)
    if inside is not None and not is_traced:
        return repr(inside)
    name = inside if is_traced else kind.__name__
    return "None" if name == "NoneType" else name


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
