"""Shape checks at run time: turn jaxtyping annotations into errors.

A call that violates an annotation raises `jaxtyping.TypeCheckError`, a `TypeError`:

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
which raises the error.

If an annotation is more than classes, arrays of torch.Tensor, tuples and unions of these,
None, Any, Literal, and Callable, jaxtyping and beartype check each call of the function
in eager mode, and compiled code leaves this annotation unchecked.

These names are not part of torch's public interface. If one goes, compiled code lacks

- `torch._dynamo.comptime`, and of what it shows, the VariableTracker with `python_type`,
  `items`, `as_proxy`, and `node.meta["example_value"]`: the checks,
- `torch._dynamo.decorators.skip`: one graph in place of several, after a graph break,
- `torch._guards.TracingContext`: the caller's line in an error,
- `free_unbacked_symbols`: right calls with sizes that depend on values.
"""

import functools
import inspect
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

__all__ = ["typecheck"]

_Target = TypeVar("_Target")
# A sequence that grows token by token adds one description per token.
_MAX_DESCRIPTIONS = 1024
# A value belongs to a class of these metaclasses by its type alone. A Protocol or
# nn.Parameter, for example, also looks into the value.
_PLAIN: set[Any] = {type.__instancecheck__, ABCMeta.__instancecheck__}
_ALSO_TAKES: dict[Any, tuple[type, ...]] = {float: (int,), complex: (float, int)}
_OF_SYMBOL: Any = {SymInt: int, SymFloat: float, SymBool: bool}
_LITERALS = (bool, int, str, bytes, Enum, NoneType)
_EMPTY = inspect.Parameter.empty
_BROADCAST = re.compile(r"[*#]{2}\w+")  # as in "*#batch"
# The frames of these are not the caller's.
_NOT_THE_CALLER = ("<typecheck of", __file__, f"{Path(torch.__file__).parent}{os.sep}")


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
    wrappers = []  # first all of them, so that an error leaves the target as it was
    for owner, name, function in functions:
        wrappers.append((owner, name, _checked(function, owner)))
    for owner, name, wrapper in wrappers:
        setattr(owner, name, wrapper)
    return target


def _annotated_functions(
    owner: ModuleType | type,
) -> Iterator[tuple[ModuleType | type, str, FunctionType]]:
    """Yield (owner, name, function) for each public function that is defined there."""
    names = [n for n in vars(owner) if n == "__init__" or not n.startswith("_")]
    # The module in which a class is defined, or the module, which has no __module__.
    home = vars(owner).get("__module__", owner.__name__)
    for name in getattr(owner, "__all__", names):
        member: Any = vars(owner).get(name)
        if getattr(member, "__module__", None) != home:
            continue
        if _is_checkable(member):
            yield owner, name, member
        elif isinstance(owner, ModuleType) and isinstance(member, type):
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
                $seen, $found = {shown}, ()
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

    # These are functions, because the compiler understands no methods of a _Check.
    def run(seen: _Description, found: _Description | None = None) -> None:
        """Check a call before or after it, if its description is not known."""
        __tracebackhide__ = True
        try:
            is_known = (seen, found) in check.known
        except TypeError:  # symbols, of which torch.export makes sizes, have no hash
            is_known = False
        if is_known:
            check.last[0] = seen, found
        else:
            check.learn(seen, found)

    def by_jaxtyping(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        call = check.function if is_compiling() else check.by_jaxtyping
        return call(*args, **kwargs)

    def see(context: Any) -> None:
        check.hide(run, by_jaxtyping)
        check.check_traced(context)

    names: dict[str, Any] = {
        "$function": check.function,
        "$call": check.function,
        "$last": check.last,
        "$check": run,
        "$see": see,
        "$is_compiling": is_dynamo_compiling,
        "$Tensor": Tensor,
        "$describe": _describe,
    }
    seen = check.before.expression(_Part.described)
    found = check.after.expression(_Part.described)
    if check.by_jaxtyping is not None:  # which checks each call
        names["$call"] = by_jaxtyping
        seen = found = "()"  # which needs no check
    parameters, arguments = [], []
    for name, parameter in check.signature.parameters.items():
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
        seen=seen,
        found=found,
        shown=check.before.expression(_Part.shown),
        shown_result=check.after.expression(_Part.shown),
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
#     (class, value, None)    for what a Literal may be, in eager mode,
#     (class, None, None)     for another value, and
#     None                    for a default, and for what is not checked in compiled code.
_Item = tuple[Any, Any, Any]
_Description = tuple[Any, ...]


class _Check:
    """The annotations of a function, and the descriptions of its right calls."""

    def __init__(self, function: Any, owner: Any) -> None:
        self.function = function
        self.name = f"{function.__module__}.{function.__qualname__}"
        self.signature = inspect.signature(function)
        self.before = _Annotations(self, "before")
        self.after = _Annotations(self, "after")
        hints = dict.fromkeys([*self.signature.parameters, "return"], Any)
        for name in hints:
            place = f"annotation of '{name}' in {self.name}"
            try:
                hints[name] = _evaluated(function, name, owner)
                side = self.after if name == "return" else self.before
                side.add(name, hints[name])
            except (NameError, AttributeError) as error:
                warnings.warn(f"typecheck ignores the {place}: {error}", stacklevel=4)
            except (AnnotationError, SyntaxError, TypeError, ValueError) as error:
                raise AnnotationError(f"cannot read the {place}: {error}") from error
        # (seen, None) and (seen, found) of each right call.
        self.known: set[tuple[_Description, _Description | None]] = set()
        self.last: list[Any] = [((), ())]  # those of the call before
        self.by_jaxtyping: Any = None
        if self.before.is_refused or self.after.is_refused:
            self.by_jaxtyping = _by_jaxtyping(function, hints)
        self.is_hidden = False

    def learn(self, seen: _Description, found: _Description | None) -> None:
        """Raise an error unless a call fits, and remember it when it has a result."""
        __tracebackhide__ = True
        message = self.message(seen, found or ())
        if message:
            raise TypeCheckError(message)
        if found is None or _has_symbols((seen, found)):
            return
        if len(self.known) >= 2 * _MAX_DESCRIPTIONS:
            self.known.clear()
        self.known |= {(seen, None), (seen, found)}
        self.last[0] = seen, found

    def check_traced(self, context: Any) -> None:
        """Check a call of which the compiler has traced the arguments, or the result."""
        seen = self.before.traced(context.get_local("_typecheck_seen"))
        found = self.after.traced(context.get_local("_typecheck_found"))
        message = self.message(seen, found)
        if message:
            context.graph_break(f"TypeCheckError: {message}")

    def hide(self, *functions: Any) -> None:
        """Keep the compiler from tracing the checks of eager mode, after a graph break.

        It traces none of them, but still compiles `function`, which the wrapper calls.
        """
        from torch._dynamo.decorators import skip

        for each in (*functions, _describe):
            skip(each)
        if not self.is_hidden:
            self.is_hidden = True
            self.learn = torch.compiler.disable(self.learn)  # type: ignore[method-assign]
            if self.by_jaxtyping is not None:
                self.by_jaxtyping = torch.compiler.disable(self.by_jaxtyping)

    def message(self, seen: _Description, found: _Description) -> str:
        """Return what is wrong with a call, or an empty text."""
        with jaxtyped("context"):  # in which jaxtyping remembers the sizes of axes
            lines = self.lines(seen, found)
        return "\n".join([_callers_line(self.function), *lines]) if lines else ""

    def lines(self, seen: _Description, found: _Description) -> list[str]:
        """Return the lines about the first value that is wrong."""
        has_symbols = _has_symbols((seen, found))
        sizes: dict[str, Any] = {}
        checked: list[tuple[_Part, _Item]] = []
        for side, description in ((self.before, seen), (self.after, found)):
            for brace, size in side.sizes_in(description).items():
                if not isinstance(size, (int, SymInt)):
                    return [f"{{{brace}}} must be an int, got {size!r}"]
                sizes[brace] = size
                _axis_fits(side.braces[brace], size)  # which jaxtyping remembers
            for part, item in zip(side.parts, description, strict=False):
                if item is None:
                    continue
                checked.append((part, item))
                if not _fits(part.options, item, has_symbols):
                    return _explained(checked, sizes)
        return []


# What a call has: its description ----------------------------------------------------


class _Part(NamedTuple):
    """An annotated parameter, or the result."""

    place: str  # in messages
    value: str  # the expression that reads it
    hint: Any  # the annotation
    options: list[Any]  # what it takes
    default: Any

    def described(self) -> str:
        """Return the expression of its item in eager mode."""
        value, options = self.value, self.options
        has_literal = any(map(_is_value, _leaves(options)))
        if len(options) == 1 and isinstance(options[0], _Array):
            # At once, what _describe returns.
            item = f"($Tensor, {value}.dtype, {value}.shape)"
            item += f" if {value}.__class__ is $Tensor else $describe({value}, False)"
        elif all(isinstance(option, type) for option in options):
            item = f"({value}.__class__, None, None)"
        else:
            item = f"$describe({value}, {has_literal})"
        return self.unless_default("None", item)

    def shown(self) -> str:
        """Return the expression of `(value,)` in code that is traced, or of `()`."""
        has_array = any(isinstance(leaf, _Array) for leaf in _leaves(self.options))
        # The compiler does not say whether a tensor is the default.
        if not has_array or isinstance(self.default, Tensor):
            return "()"
        return self.unless_default("()", f"({self.value},)")

    def unless_default(self, default: str, item: str) -> str:
        if self.default is _EMPTY:
            return item
        return f"{default} if {self.value} is $default_{self.value} else {item}"


def _describe(value: Any, by_value: bool) -> _Item:
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


def _describe_traced(variable: Any) -> _Item:
    """Return what _describe does, of what a compiler knows of a value.

    It does not show the value of a Literal.
    """
    kind = variable.python_type()
    if issubclass(kind, Tensor):
        tensor = _stand_in(variable)
        return kind, tensor.dtype, tensor.shape
    if issubclass(kind, tuple):
        return kind, tuple(map(_describe_traced, variable.items)), None
    return kind, None, None


def _traced(of: Callable[[Any], Any], *shown: Any) -> Any:
    """Return a description or a size, or None if nothing is shown of it."""
    try:
        return of(*shown) if shown else None
    except (AttributeError, NotImplementedError):
        return None


def _stand_in(variable: Any) -> Any:
    """Return what a compiler has in place of a tensor, or of a size."""
    proxy = variable.as_proxy()  # or a number
    is_proxy = isinstance(proxy, torch.fx.Proxy)
    return proxy.node.meta["example_value"] if is_proxy else proxy


# What annotations take ---------------------------------------------------------------

# An annotation is read as a list of options, of which a value must fit one: a class, an
# array, a value of a Literal, or a tuple that has a list of options for each item.


class _Annotations:
    """The annotations of the parameters, or of the result."""

    def __init__(self, check: _Check, when: str) -> None:
        self.function = check.name
        self.parameters = check.signature.parameters
        self.when = when  # sizes in braces are read: before or after the call
        self.parts: list[_Part] = []
        self.braces: dict[str, str] = {}  # what is in them -> the axis of this size
        self.is_refused = False

    def add(self, name: str, hint: Any) -> None:
        """Add the annotation of a parameter, or of the result."""
        if hint is Any:
            return
        options = self.read(hint)
        if name == "return":
            self.parts.append(_Part("return value", "$result", hint, options, _EMPTY))
            return
        parameter, value = self.parameters[name], name
        if parameter.kind is parameter.VAR_KEYWORD:
            value = f"(*{name}.values(),)"
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            hint, options = tuple[hint, ...], [(options, ...)]
        self.parts.append(_Part(name, value, hint, options, parameter.default))

    def read(self, hint: Any) -> list[Any]:
        """Return what an annotation takes. All that is not understood is refused here."""
        origin, parts = get_origin(hint), get_args(hint)
        if origin in (Union, UnionType):
            return [option for part in parts for option in self.read(part)]
        if origin is tuple and parts and not any(map(_is_unpacked, parts)):
            return [tuple(p if p is Ellipsis else self.read(p) for p in parts)]
        if origin is Literal:
            return [*parts]
        if hint is Any or hint is None:
            return [object if hint is Any else NoneType]
        if origin is Callable:
            return [Callable]
        if isinstance(hint, type) and hasattr(hint, "dim_str"):  # jaxtyping's
            array = self.array(hint)
            if array is not None:
                return [array]
        elif isinstance(hint, type) and type(hint).__instancecheck__ in _PLAIN:
            return [hint]
        self.is_refused = True
        return [object]

    def array(self, hint: Any) -> "_Array | None":
        """Return an array with an axis in place of each size in braces."""
        is_nested = hint.dtypes != hint.dtype.dtypes  # an array of arrays
        if hint.array_type is not Tensor or is_nested:
            return None
        axes = []
        for axis, dim in zip(hint.dim_str.split(), hint.dims, strict=True):
            # Of an expression, without # and name=. Others have none.
            text = getattr(dim, "elem", "0")
            # This raises a SyntaxError for what Python cannot read.
            compile(f"f'{text}'" if "{" in text else text, axis, "eval")
            brace = re.fullmatch(r"\{([\w.]+)\}", text)
            if brace:
                axis = "#" * dim.broadcastable + self.axis(brace[1])
            elif "{" in text:
                return None
            axes.append(axis)
        if _BROADCAST.search(hint.dim_str):
            import numpy  # noqa: F401  # jaxtyping says nothing if it is missing
        titles = hint.dim_str.replace("#", "").split()
        # Any, because it is asked about descriptions.
        return _Array(hint.dtype[Any, " ".join(axes)], titles)

    def axis(self, brace: str) -> str:
        """Return the name of an axis that stands for a size in braces."""
        if brace.partition(".")[0] not in self.parameters:
            raise AnnotationError(f"no parameter has the name in {{{brace}}}")
        new = f"typecheck_{self.when}_{len(self.braces)}"
        return self.braces.setdefault(brace, new)

    def expression(self, of_part: Callable[[_Part], str]) -> str:
        """Return the expression of a description."""
        items = [*map(of_part, self.parts), *self.braces]
        return f"({''.join(f'{item}, ' for item in items)})"

    def traced(self, local: Any) -> _Description:
        """Return the description, from what a compiler knows of the parts shown."""
        variables = local._i_will_not_complain_if_bc_breaks_VariableTracker().items
        count = len(self.parts)
        items = [_traced(_describe_traced, *v.items) for v in variables[:count]]
        return (*items, *(_traced(_stand_in, v) for v in variables[count:]))

    def sizes_in(self, description: _Description) -> dict[str, Any]:
        """Return the size of each brace."""
        return dict(zip(self.braces, description[len(self.parts) :], strict=False))


def _is_unpacked(hint: Any) -> bool:
    """Return whether an item of a tuple has a star, as in tuple[*Items]."""
    return get_origin(hint) is typing.Unpack or getattr(hint, "__unpacked__", False)


def _leaves(options: list[Any]) -> Iterator[Any]:
    """Yield all options that are no tuples."""
    for option in options:
        if not isinstance(option, tuple):
            yield option
            continue
        for item in option:
            if item is not Ellipsis:
                yield from _leaves(item)


def _fits(options: list[Any], item: _Item, has_symbols: bool) -> bool:
    """Return whether a value is right."""
    return any(_fits_option(option, item, has_symbols) for option in options)


def _is_value(option: Any) -> bool:
    """Return whether this is a value of a Literal."""
    return not isinstance(option, (type, tuple, _Array))


def _fits_option(option: Any, item: _Item, has_symbols: bool) -> bool:
    """Return whether a value is right, if there were no other option."""
    kind, inside, _ = item
    if isinstance(option, _Array):
        return option.fits(item, has_symbols)
    if isinstance(option, tuple):
        pairs = _pairs(option, inside)
        return pairs is not None and all(_fits(*pair, has_symbols) for pair in pairs)
    if _is_value(option):  # of which a compiler shows only the class
        return kind is type(option) and (inside is None or inside == option)
    kind = _OF_SYMBOL.get(kind, kind)
    return issubclass(kind, (option, *_ALSO_TAKES.get(option, ())))


def _pairs(option: Any, items: Any) -> list[tuple[list[Any], _Item]] | None:
    """Return each item with its options, if this is a tuple of such a length."""
    if not isinstance(items, tuple):
        return None
    if option[1:] == (Ellipsis,):
        option = option[:1] * len(items)
    return [*zip(option, items, strict=True)] if len(option) == len(items) else None


class _Array:
    """An array of jaxtyping, without braces in its axes."""

    def __init__(self, hint: Any, titles: list[str]) -> None:
        self.hint = hint
        self.any_shape = hint.dtype[Any, "..."]
        # By its title in a message, which may have braces.
        self.axes = dict(zip(titles, hint.dim_str.split(), strict=True))

    def fits(self, item: _Item, has_symbols: bool) -> bool:
        _, dtype, shape = item
        if shape is None:
            return False
        hint = self.hint
        if _depends_on_values(shape):
            return _takes(self.any_shape, dtype, ())
        if has_symbols:
            # jaxtyping compares *# by numpy, which would turn symbols into numbers.
            hint = hint.dtype[Any, _BROADCAST.sub("...", hint.dim_str)]
        return _takes(hint, dtype, shape)

    def cells(self, item: _Item) -> "_Cells":
        """Return its row, if dtype and rank fit, and no axis has the name of another."""
        _, dtype, shape = item
        if shape is None or not _takes(self.any_shape, dtype, ()):
            return {}
        columns: dict[str, str] = {}
        for title, axis in self.axes.items():
            if title.startswith(("*", "...")):
                for k in range(len(self.axes) - 1 - len(shape), 0):
                    columns[f"{title}[{k}]"] = axis.replace("*", "")
            else:
                columns[title] = axis
        if len(self.axes) < len(self.hint.dims) or len(columns) != len(shape):
            return {}
        cells = map(_Cell, columns.values(), map(_number, shape))
        return dict(zip(columns, cells, strict=True))


def _evaluated(function: Any, name: str, owner: Any) -> Any:
    """Return an annotation, or Any if there is none that can be checked."""
    annotation = function.__annotations__.get(name, Any)
    one: Any = SimpleNamespace(__annotations__={name: annotation})
    names = {owner.__name__: owner} if isinstance(owner, type) else {}
    hint = typing.get_type_hints(one, function.__globals__, names, include_extras=True)
    is_self = re.search(r"\.Self\b", repr(hint))
    of_paramspec = (typing.ParamSpecArgs, typing.ParamSpecKwargs)
    return Any if is_self or isinstance(hint[name], of_paramspec) else hint[name]


def _by_jaxtyping(function: Any, hints: dict[str, Any]) -> Any:
    """Return a copy of a function, of which jaxtyping and beartype check each call."""
    from beartype import BeartypeConf, beartype  # here, because most users need it not
    from beartype.roar import BeartypeException

    copy = FunctionType(
        function.__code__, function.__globals__, closure=function.__closure__
    )
    copy.__defaults__ = function.__defaults__
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__annotations__ = hints
    for name, parameter in inspect.signature(copy).parameters.items():
        if parameter.default is None:  # which is right, also if it is passed
            hints[name] = Union[hints[name], None]  # noqa: UP007  # | takes not all
    int_is_float = BeartypeConf(is_pep484_tower=True)  # as in theta=10000
    try:
        return jaxtyped(copy, typechecker=beartype(conf=int_is_float))
    except BeartypeException as error:
        raise AnnotationError(f"{error}".partition("\n")[0]) from error


def _axis_fits(axis: str, size: Any) -> bool:
    """Return whether jaxtyping takes this size for an axis."""
    return _takes(Shaped[Any, axis], "", (size,))


def _takes(hint: Any, dtype: Any, shape: Any) -> bool:
    """Return whether jaxtyping takes an array, of which it then remembers the sizes."""
    try:
        return isinstance(SimpleNamespace(dtype=dtype, shape=shape), hint)
    except AnnotationError:  # it needs a size that was not there
        if not is_compiling():
            raise
        return True  # The compiler may not have shown it.


def _has_symbols(described: Any) -> bool:
    try:
        hash(described)
    except TypeError:  # of a symbol
        return True
    return False


def _depends_on_values(shape: Any) -> bool:
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return any(isinstance(n, SymInt) and free_unbacked_symbols(n) for n in shape)


# The message: a table of axes ----------------------------------------------------------


class _Cell(NamedTuple):
    """A size in the table."""

    axis: str
    size: int

    def is_bound(self) -> bool:
        """Return whether the name of the axis, if it has one, must have this size."""
        name = self.axis.lstrip("#")
        may_differ = "#" in self.axis and self.size == 1
        return name.isidentifier() and not name.startswith("_") and not may_differ


# The columns are the titles of axes, and the rows the places of tensors.
_Cells = dict[str, _Cell]
_Rows = dict[str, _Cells]


def _rows(place: str, options: list[Any], item: _Item) -> _Rows:
    """Return the rows of the tensors in a value."""
    known = [option for option in options if isinstance(option, (_Array, tuple))]
    if len(known) != 1 or object in options:  # It is not known which one was meant.
        return {}
    if isinstance(known[0], _Array):
        cells = known[0].cells(item)
        return {place: cells} if cells else {}
    rows: _Rows = {}
    for i, pair in enumerate(_pairs(known[0], item[1]) or ()):
        rows |= _rows(f"{place}[{i}]", *pair)
    return rows


def _explained(checked: list[tuple[_Part, _Item]], sizes: Any) -> list[str]:
    """Return the lines about the last value, which is wrong, and the right ones."""
    *right, (part, item) = checked
    rows: _Rows = {}
    for other, its_item in right:
        rows |= _rows(other.place, other.options, its_item)
    for place, cells in _rows(part.place, part.options, item).items():
        column, reason = _mark(cells, rows, sizes)
        rows[place] = cells
        if column:
            return _table(rows, column, reason)
    text = re.sub(r"\b(jaxty|ty)ping\.", "", inspect.formatannotation(part.hint))
    text = text.replace("'", '"').replace("NoneType", "None")
    return [*_table(rows), f"{part.place} must be {text}, got {_got(item)}"]


def _mark(cells: _Cells, rows: _Rows, sizes: dict[str, Any]) -> tuple[str, str]:
    """Return the column that does not fit, and why, or nothing if it is not known."""
    said = {}
    for brace, size in sizes.items():
        said[f"{{{brace}}}"] = _number(size), f"{brace} is {_number(size)}"
    for place, others in rows.items():
        for column, cell in others.items():
            if cell.is_bound():
                reason = f"{column} is {cell.size} in {place}"
                said.setdefault(column, (cell.size, reason))
    for column, cell in cells.items():
        fits = _axis_fits(*cell)  # in "n n+1", this tells jaxtyping of n
        if cell.is_bound():
            size, reason = said.get(column, (cell.size, ""))
            if size != cell.size:
                return column, reason
        elif not fits:
            return column, f"must be {column}"
    return "", ""


def _table(rows: _Rows, wrong: str = "", reason: str = "") -> list[str]:
    """Return a line for each row, with a mark under the wrong column of the last one."""
    widest_first = sorted(rows.values(), key=len, reverse=True)
    columns = [*dict.fromkeys(column for cells in widest_first for column in cells)]
    grid = [["", *columns]]
    for place, cells in rows.items():
        sizes = {column: f"{cell.size}" for column, cell in cells.items()}
        grid.append([place, *(sizes.get(column, "") for column in columns)])
    grid.append(["", *("^" if column == wrong else "" for column in columns)])
    first, *widths = [max(map(len, texts)) for texts in zip(*grid, strict=True)]
    lines = []
    for place, *texts in grid:
        padded = [text.rjust(width) for text, width in zip(texts, widths, strict=True)]
        lines.append("  ".join([place.ljust(first), *padded]).rstrip())
    if wrong:
        lines[-1] += f"  {reason}"
    return [line for line in lines if line]


def _got(item: _Item) -> str:
    """Return a description in words."""
    kind, inside, shape = item
    if shape is not None:
        sizes = tuple(map(_number, shape))
        return f"{inside} of shape {sizes}".removeprefix("torch.")
    if isinstance(inside, tuple):
        return f"({', '.join(map(_got, inside))})"
    if inside is not None:
        return repr(inside)
    return "None" if kind is NoneType else kind.__name__


def _number(size: Any) -> Any:
    """Return a number for a symbol, which becomes constant: the call fails anyway."""
    if isinstance(size, SymInt) and not _depends_on_values([size]):
        return int(size)
    return size


def _callers_line(function: Any) -> str:
    """Return the line of the call, as `file:number: code`."""
    frames = [*traceback.extract_stack()]
    if is_compiling():  # the frames of traced code are not on Python's stack
        from torch._guards import TracingContext

        frames += TracingContext.extract_stack()
    callers = [f for f in frames if not f.filename.startswith(_NOT_THE_CALLER)]
    caller = callers[-1] if callers else frames[0]
    code = caller.line or ""
    if function.__name__ not in code:
        code += f"  # {function.__qualname__}"
    return f"{Path(caller.filename).name}:{caller.lineno}: {code}"
