"""Shape checks at run time: turn jaxtyping annotations into errors.

`@typecheck` checks a function or a class, and `typecheck(module)` checks the public
functions of a module, and the `__init__` and `forward` of its classes. A call that
violates an annotation raises `jaxtyping.TypeCheckError`, a `TypeError`, which names the
function, the argument, its shape, the expected shape, and the axis that does not fit.

jaxtyping and beartype decide what is wrong. A wrapper around each function asks them in
one of two ways.

In eager mode, they take 12 to 30 microseconds for one or two tensors. So the wrapper
asks them only if the signature of a call is new. The signature consists of

- the class of each argument, and a class itself where the annotation is `type[X]`,
- the dtype and shape of each array, and the same of each item of a tuple,
- the value of an argument whose annotation has a Literal,
- each size that an annotation has in braces, such as `{self.d_model}`.

It leaves out parameters that are unannotated or annotated as Any, and a default, which
is right whatever it is. A signature must hold all that an annotation asks for. So
functions are checked at each call if an annotation has more than classes, arrays,
tuples, Literal, Callable, and unions of these: a list, a Protocol, or a validator of
values, for example.

Code that torch.compile or torch.export traces cannot call jaxtyping (its issues 196 and
384). But the compiler itself can, while it traces (torch._dynamo.comptime), with
tensors that have shapes but no values. A size is a number, or a symbol that gets a
guard when it is compared. So the compiled code has no checks, and a call with other
sizes is traced, and checked, again. A wrong call breaks the graph, so that Python runs
the wrapper, which raises the error. With fullgraph=True, where a graph must not break,
torch.compile raises an error of its own, which contains this one.

JAXTYPING_DISABLE=1 leaves all functions unwrapped and beartype unimported. So does
`python -O`, with a warning, because beartype checks nothing there.
"""

import ast
import collections.abc
import contextlib
import functools
import inspect
import itertools
import operator
import re
import warnings
from abc import ABCMeta
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from types import FunctionType, ModuleType, NoneType, SimpleNamespace, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import torch
from jaxtyping import AnnotationError, Shaped, TypeCheckError, config, jaxtyped
from torch import SymBool, SymFloat, SymInt, Tensor
from torch.compiler import is_dynamo_compiling
from torch.fx.node import map_aggregate

__all__ = ["typecheck"]

_Target = TypeVar("_Target")
# A sequence that grows token by token adds one signature per token.
_MAX_SIGNATURES = 1024
_UNIONS = (Union, UnionType)
# The metaclasses of classes to which a value belongs by its type alone. A Protocol or
# nn.Parameter, for example, also looks into the value.
_PLAIN_METACLASSES = {type, ABCMeta, type(Tensor)}
_VARIADIC = {
    inspect.Parameter.VAR_POSITIONAL: "_typecheck_args",
    inspect.Parameter.VAR_KEYWORD: "_typecheck_kwargs",
}
# Annotations whose parts are not checked by themselves.
_WHOLE = (Literal, collections.abc.Callable, type)
_BY_VALUE = (bool, int, str, bytes, Enum, type)  # what Literal and type[X] read
_NUMBERS = (int, float, SymInt, SymFloat)  # of which a size may be
_EMPTY = inspect.Parameter.empty
_UNKNOWN = object()  # a value that the compiler does not know


class _Missing:
    """In place of an argument that is not passed, and has no default."""


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
                f"target must be a module, a class, or an annotated function, got {target!r}"
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
        inspect.isgeneratorfunction(plain) or inspect.iscoroutinefunction(plain)
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
    # Variables, because the compiler looks at all that the wrapper uses, and
    # understands functions, but no objects.
    function, in_eager_mode = check.function, check.call
    trace_arguments, trace_result = check.trace_arguments, check.trace_result

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if not is_dynamo_compiling():
            return in_eager_mode(*args, **kwargs)
        # At a graph break, the compiler cuts a function in two, but no try block. So
        # Python runs the wrapper, and `function` is compiled by itself.
        try:
            from torch._dynamo.comptime import comptime

            before = trace_arguments(comptime, *args, **kwargs)
            result = function(*args, **kwargs)
            trace_result(comptime, before, result, *args, **kwargs)
            return result
        except Exception:
            raise

    return wrapper


def _in_eager_mode(check: "_Check") -> Callable[..., Any]:
    """Return a function that calls, and checks a call if its signature is new."""
    function, results = check.function, check.results

    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if not check.is_resolved:
            check.resolve(final=True)
        try:
            signature = check.read_arguments(*args, **kwargs)
        except Exception as error:
            check.explain(error, args, kwargs)
            return function(*args, **kwargs)  # raises Python's own error
        try:
            last = results.get(signature)
        except TypeError:  # symbols, of which torch.export makes sizes, have no hash
            return check.call_with_symbols(args, kwargs)
        if last is None:
            check.judge(signature, args, kwargs)
        result = function(*args, **kwargs)
        try:
            sizes = check.read_after(*args, **kwargs) if check.braces_after else ()
        except Exception as error:
            check.explain(error, args, kwargs)
            raise
        found = (_describe(result, check.result_by_value), sizes)
        if found != last:
            check.judge(signature, args, kwargs, found, result)
        return result

    return call


# The check of a function -------------------------------------------------------------


class _Call:
    """What annotations read of a call beside its arguments.

    jaxtyping gets it as one more argument. It looks like an array whose axes have the
    sizes in braces, so that each of these is the size of an axis that has a name.
    """

    dtype = "size"  # jaxtyping asks for a text, and Shaped takes any

    def __init__(
        self, before: Sequence[Any], after: Sequence[Any] = (), result: Any = _Missing
    ) -> None:
        self.before = before  # the sizes of parameters
        self.after = after  # the sizes of the result, after the call
        self.shape = (*before, *after)
        self.result = result

    def __repr__(self) -> str:
        return "_"


class _Check:
    """The checks of one function's calls by jaxtyping and beartype."""

    def __init__(self, function: Any, owner: Any) -> None:
        self.function = function
        self.owner = owner
        self.name = f"{function.__module__}.{function.__qualname__}"
        self.header = _loosened(inspect.signature(function))
        self.results: dict[Any, Any] = {}  # signature -> description of the last result
        # What parameters and the result have in braces -> the axis of this size in a
        # _Call. They are read before and after the call.
        self.braces_before: dict[str, str] = {}
        self.braces_after: dict[str, str] = {}
        self.call = _in_eager_mode(self)
        self.resolve()
        self.traced_hints = self.hints_for_compiler()
        self.trace_arguments, self.trace_result = self.tracing()

    def resolve(self, final: bool = False) -> None:
        """Read the annotations, and write what reads the arguments and the result.

        A name may be missing at first, but if it is missing at the `final` time, the
        user is warned.
        """
        found = _resolve(self.function, self.owner, warn=final)
        self.is_resolved = final or found.keys() == self.function.__annotations__.keys()
        self.hints = {
            name: _simplified(hint, functools.partial(self.put, name))
            for name, hint in found.items()
        }
        self.can_remember = self.is_resolved and all(
            _is_plain(hint, (tuple,)) for hint in self.hints.values()
        )
        self.checkers: dict[Any, Callable[..., None]] = {}
        self.read_arguments = self.reading()
        self.read_after = self.written(_sizes(self.braces_after), _typecheck_size=_size)
        self.result_by_value = _has(self.hints.get("return"), _is_read_by_value)

    def put(self, name: str, axis: str) -> str:
        """Return what takes the place of an axis that has braces in the annotation of a name.

        It has the name of an axis of _Call in place of each size, because the size may
        change in the call, or be a symbol, which has no text.
        """
        sizes = self.braces_after if name == "return" else self.braces_before
        try:
            tree: Any = ast.parse(f"f'{axis}'", mode="eval")  # as jaxtyping reads it
        except SyntaxError as error:
            place = _place(self.function, name)
            raise AnnotationError(
                f"{place} has the wrong axis '{axis}': {error.msg}"
            ) from error
        text = ""
        for part in tree.body.values:
            if isinstance(part, ast.FormattedValue):
                size = ast.unparse(part.value)
                number = len(self.braces_before) + len(self.braces_after)
                # The last _ tells typecheck_1_ from the beginning of typecheck_10_.
                text += sizes.setdefault(size, f"typecheck_{number}_")
            else:
                text += part.value
        return text

    # What a call has ---------------------------------------------------------------

    def written(self, body: str, *first: str, **names: Any) -> Any:
        """Return a function with this body, and the same parameters after `first`.

        It is written as code, because a loop over the arguments takes longer, and so
        that braces read the arguments by their names. `names` are those of the body.
        Names that are no parameters begin with _typecheck.
        """
        head = [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in first
        ]
        for name, parameter in self.header.parameters.items():
            default = parameter.default
            if default is not _EMPTY:
                default = _Code(_default(name))
                names[default] = parameter.default
            head.append(parameter.replace(annotation=_EMPTY, default=default))
        parameters = str(inspect.Signature(head))[1:-1]
        # `names` are variables of a closure, because compiled code compares the globals
        # of a function, and each of their names, at each call.
        make = eval(f"lambda {', '.join(names)}: lambda {parameters}: {body}", {})
        return make(*names.values())

    def reading(self) -> Callable[..., tuple[Any, ...]]:
        """Return a function that returns the signature of a call.

        It is a pair: what the annotations read of each argument, and the sizes in braces.
        """
        items = []
        for name, parameter in self.header.parameters.items():
            hint = self.hints.get(name, Any)
            if hint is Any:
                continue
            value = name
            if parameter.kind is parameter.VAR_KEYWORD:
                value = f"(*{name}.values(),)"
            item = f"_typecheck_describe({value}, {_has(hint, _is_read_by_value)})"
            if parameter.default is not _EMPTY:  # it is right, whatever it is
                item = f"{name} is {_default(name)} or {item}"
            items.append(item)
        names = {"_typecheck_describe": _describe, "_typecheck_size": _size}
        return self.written(
            _tuple([_tuple(items), _sizes(self.braces_before)]), **names
        )

    def explain(
        self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Raise an error about braces, unless the arguments do not fit the function."""
        try:
            inspect.signature(self.function).bind(*args, **kwargs)
        except TypeError:
            return
        sizes = ", ".join(
            f"{{{size}}}" for size in (*self.braces_before, *self.braces_after)
        )
        raise AnnotationError(f"cannot read {sizes} of {self.name}: {error}") from error

    # How it is judged --------------------------------------------------------------

    def judge(
        self,
        signature: tuple[Any, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        found: tuple[Any, ...] = ((), ()),
        *result: Any,
    ) -> None:
        """Check the arguments of a call, and the result if it is there.

        `found` describes the result: what its annotation reads, and the sizes in braces.
        """
        __tracebackhide__ = True
        try:
            values = self.header.bind(*args, **kwargs).arguments
        except TypeError:
            return  # the function raises Python's own error
        _, before = signature
        _, after = found
        self.run(self.hints, values, _Call(before, after, *result))
        if result and self.can_remember:
            if len(self.results) >= _MAX_SIGNATURES:
                self.results.clear()
            self.results[signature] = found

    def run(self, hints: dict[str, Any], values: dict[str, Any], call: _Call) -> None:
        """Let jaxtyping check these values, and the result if the call has one."""
        __tracebackhide__ = True
        parameters = []
        for name, parameter in self.header.parameters.items():
            if name not in values:
                continue
            hint = hints.get(name, _EMPTY)
            if values[name] is parameter.default:  # it is always right
                hint = _EMPTY
            elif parameter.kind not in _VARIADIC:
                hint = _narrowed(hint, values[name])
            parameters.append(parameter.replace(annotation=hint, default=_EMPTY))
        result_hint: Any = Any
        if call.result is not _Missing:
            result_hint = _narrowed(hints.get("return", Any), call.result)
        # Compiled code reads no sizes of annotations that are resolved after it is made.
        axes = [*self.braces_before.values()][: len(call.before)]
        axes += [*self.braces_after.values()][: len(call.after)]
        key = (*parameters, result_hint, *axes)
        if len(self.checkers) >= _MAX_SIGNATURES:  # of tuples that grow, for example
            self.checkers.clear()
        if key not in self.checkers:
            own = inspect.Parameter(
                "_typecheck_call",
                inspect.Parameter.POSITIONAL_ONLY,
                annotation=Shaped[Any, " ".join(axes)],
            )
            signature = inspect.Signature(
                [own, *parameters], return_annotation=result_hint
            )
            self.checkers[key] = _checker(self.function, signature)
        bound: Any = inspect.BoundArguments(inspect.Signature(parameters), values)
        try:
            self.checkers[key](call, *bound.args, **bound.kwargs)
        except TypeCheckError as error:
            raise TypeCheckError(self.message(error)) from None

    def message(self, error: BaseException) -> str:
        """Return jaxtyping's message, with the axis that does not fit."""
        message = re.sub(r"'_typecheck_call': _,?\s*", "", str(error))
        message = re.sub(r"\(_typecheck_call: [^/]*/(, )?", "(", message)
        while error.__cause__ is not None:
            error = error.__cause__
        # beartype: "... not instance of ..., as the size of dimension d is 4 which ..."
        _, found, reason = str(error).rpartition(", as ")
        for size, axis in (*self.braces_before.items(), *self.braces_after.items()):
            reason = reason.replace(axis, size)
            message = message.replace(axis, size)
        if found and '"' not in reason:  # it is about an axis, and quotes no values
            reason = reason[0].upper() + reason[1:]
            message = message.replace("\n-----", f"\n{reason}\n-----", 1)
        return message

    # While a compiler traces -------------------------------------------------------

    def hints_for_compiler(self) -> dict[str, Any]:
        """Return the annotations that it can compare."""
        hints = {}
        for name, hint in self.hints.items():
            hint = _simplified(hint, validates=False)
            if not _has(hint, _is_array) or _has(hint, _names_other_arrays):
                continue
            if _is_plain(hint, (tuple, list, dict)):
                hints[name] = hint
        for name, parameter in self.header.parameters.items():
            # The compiler does not say whether a tensor is the default.
            if isinstance(parameter.default, Tensor):
                hints.pop(name, None)
        return hints

    def tracing(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Return functions that a compiler traces before and after the call.

        They return the sizes in braces. On their way, they call comptime, to which the
        compiler shows their local variables: the parameters, and these.
        """

        def see_arguments(context: Any) -> None:
            self.see(context, _seen(context, "_typecheck_sizes"))

        def see_result(context: Any) -> None:
            before = _seen(context, "_typecheck_before")
            after = _seen(context, "_typecheck_sizes")
            self.see(context, before, after, _seen(context, "_typecheck_result"))

        before_the_call = self.written(
            _traced(self.braces_before),
            "_typecheck_comptime",
            _typecheck_see=see_arguments,
        )
        after_the_call = self.written(
            _traced(self.braces_after),
            "_typecheck_comptime",
            "_typecheck_before",
            "_typecheck_result",
            _typecheck_see=see_result,
        )
        return before_the_call, after_the_call

    def see(self, context: Any, before: Any, after: Any = (), *result: Any) -> None:
        """Check a call of which the compiler has traced the arguments or the result."""
        self.hide()
        values = {
            name: _seen(context, name)
            for name in self.header.parameters
            if name in self.traced_hints
        }
        try:
            self.judge_symbols(values, before, after, *result)
        except TypeCheckError as error:
            context.graph_break(f"TypeCheckError: {error}")

    def hide(self) -> None:
        """Keep the compiler from tracing the checks of eager mode, after a graph break.

        It traces none of them, but still compiles `function`, which `call` calls.
        """
        from torch._dynamo.decorators import skip

        if "judge" not in vars(self):
            vars(self)["judge"] = torch.compiler.disable(self.judge)
        reads = (self.read_arguments, self.read_after, _describe, _size)
        for each in (self.call, *reads):
            skip(each)

    def call_with_symbols(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function between checks, as the wrapper does while it is traced."""
        __tracebackhide__ = True

        def comptime(_: Any) -> None:  # no compiler sees the variables
            pass

        values = self.header.bind(*args, **kwargs).arguments
        before = self.trace_arguments(comptime, *args, **kwargs)
        self.judge_symbols(values, before)
        result = self.function(*args, **kwargs)
        after = self.trace_result(comptime, before, result, *args, **kwargs)
        self.judge_symbols(values, before, after, result)
        return result

    def judge_symbols(
        self, values: dict[str, Any], before: Any, after: Any = (), *result: Any
    ) -> None:
        """Check a call of which a compiler knows some sizes as symbols.

        `before` and `after` have the sizes in braces, before and after the call.
        """
        __tracebackhide__ = True
        if not all(map(_is_known, (before, after, *result))):
            return
        values = {name: value for name, value in values.items() if _is_known(value)}
        hints = {n: h for n, h in self.traced_hints.items() if n in (*values, "return")}
        call = _Call(before, after, *map_aggregate(result, _number))
        if not all(isinstance(size, _NUMBERS) for size in call.shape):
            return
        try:
            with _symbols_broadcast():
                self.run(hints, map_aggregate(values, _number), call)
        except AnnotationError:  # it needs a size that is not known here
            return
        except TypeCheckError as error:
            sizes = [*call.shape]
            for leaf in _leaves((values, result)):
                sizes.extend(leaf.shape if isinstance(leaf, Tensor) else ())
            raise TypeCheckError(_with_numbers(f"{error}", sizes)) from None


def _loosened(signature: inspect.Signature) -> inspect.Signature:
    """Return a signature that takes any call.

    A decorator may take or pass some of the arguments. Python raises for other errors.
    """
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


class _Code(str):
    """A text that inspect.Signature writes as it is."""

    __repr__ = str.__str__


def _default(name: str) -> str:
    return f"_typecheck_default_{name}"


def _tuple(items: Iterable[str]) -> str:
    return "(" + "".join(f"{item}, " for item in items) + ")"


def _sizes(sizes: Iterable[str]) -> str:
    return _tuple(f"_typecheck_size({size})" for size in sizes)


def _size(value: Any) -> Any:
    """Return a size as a number, because a tensor has other values later."""
    return value if isinstance(value, _NUMBERS) else operator.index(value)


def _traced(sizes: Iterable[str]) -> str:
    """Return the code that shows variables to the compiler, and returns sizes."""
    read = _tuple(sizes)
    return f"(_typecheck_sizes := {read}, _typecheck_comptime(_typecheck_see))[0]"


def _describe(value: Any, by_value: bool) -> tuple[Any, ...]:
    """Return what an annotation reads of an argument or a result."""
    kind = value.__class__
    if isinstance(value, Tensor):
        return kind, value.dtype, value.shape
    if isinstance(value, tuple):
        return kind, *map(_describe, value, itertools.repeat(by_value))
    if by_value and isinstance(value, _BY_VALUE):
        return kind, value
    if hasattr(kind, "shape") and hasattr(kind, "dtype"):  # such as an array of numpy
        return kind, str(value.dtype), str(value.shape)
    return (kind,)


def _checker(function: Any, signature: inspect.Signature) -> Callable[..., None]:
    """Return a function that checks a `_Call` and arguments, and the call's result."""
    # Here, because JAXTYPING_DISABLE=1 works without them. jaxtyping compares "*#batch"
    # by numpy, and where it is missing, rejects right calls without a word about it.
    import numpy  # noqa: F401
    from beartype import BeartypeConf, beartype

    @functools.wraps(function)  # so that errors name it
    def returned(call: _Call, /, *args: Any, **kwargs: Any) -> Any:
        return call.result

    vars(returned)["__signature__"] = signature
    returned.__annotations__ = {}  # jaxtyping 0.3.0 prefers these to the signature
    int_is_float = BeartypeConf(is_pep484_tower=True)  # as in theta=10000
    return jaxtyped(returned, typechecker=beartype(conf=int_is_float))


# What annotations say ----------------------------------------------------------------


def _resolve(function: Any, owner: Any, warn: bool) -> dict[str, Any]:
    """Return the annotations, without those that name what is not there."""
    variables = inspect.unwrap(function).__globals__
    names = {owner.__name__: owner} if isinstance(owner, type) else {}
    for scope in (owner, function):  # class Layer[T]; def f[T](x: T)
        names |= {each.__name__: each for each in getattr(scope, "__type_params__", ())}
    hints: dict[str, Any] = {}
    for name, annotation in function.__annotations__.items():
        one: Any = SimpleNamespace(__annotations__={name: annotation})
        place = _place(function, name)
        try:
            hints |= get_type_hints(one, variables, names, include_extras=True)
        except (NameError, AttributeError) as error:
            if warn:
                warnings.warn(f"typecheck cannot check {place}: {error}", stacklevel=5)
        except Exception as error:
            raise AnnotationError(f"{place} has a wrong annotation: {error}") from error
        else:  # by its text, because Python 3.10 has Self in typing_extensions only
            if re.search(r"\.Self\b", repr(hints[name])):
                hints[name] = Any
    return hints


def _place(function: Any, name: str) -> str:
    part = "the result" if name == "return" else f"parameter '{name}'"
    return f"{part} of {function.__module__}.{function.__qualname__}"


def _is_array(hint: Any) -> bool:
    return isinstance(hint, type) and hasattr(hint, "dim_str")  # jaxtyping's


def _names_other_arrays(hint: Any) -> bool:
    """Return whether it asks for a class of arrays that a compiler may take for Tensors."""
    kind = hint.array_type if _is_array(hint) else hint
    return kind is not Tensor and hasattr(kind, "shape") and hasattr(kind, "dtype")


def _is_read_by_value(hint: Any) -> bool:
    return get_origin(hint) in (Literal, type)


def _has(hint: Any, test: Callable[[Any], bool]) -> bool:
    """Return whether the test holds for the annotation or a part of it."""
    return test(hint) or any(_has(part, test) for part in get_args(hint))


def _is_plain(hint: Any, containers: tuple[type, ...]) -> bool:
    """Return whether it asks for classes, dtypes, shapes, and values of Literal only."""
    if hint in (Any, Ellipsis):
        return True
    if get_origin(hint) in _WHOLE:
        return True
    if get_origin(hint) in (*_UNIONS, *containers):
        return all(_is_plain(part, containers) for part in get_args(hint))
    return type(hint.array_type if _is_array(hint) else hint) in _PLAIN_METACLASSES


def _simplified(
    hint: Any,
    put: Callable[[str], str] = str,
    validates: bool = True,
    inside: tuple[Any, ...] = (),
) -> Any:
    """Return the annotation in plain terms: without names, notes, and braces.

    `put` returns what takes the place of an axis that has braces, by default the axis
    itself. Without `validates`, validators of values are left out, too.
    """
    meaning = _meaning(hint, validates)
    if meaning is not hint:
        if hint in inside:  # an alias that names itself
            return hint
        return _simplified(meaning, put, validates, (*inside, hint))
    if _is_array(hint):
        return _with_names(hint, put)
    origin, parts = get_origin(hint), get_args(hint)
    if origin in _WHOLE:
        return hint
    changed = tuple(_simplified(part, put, validates, inside) for part in parts)
    if changed == parts:
        return hint
    return _union(changed) if origin in _UNIONS else origin[changed]


def _union(parts: Iterable[Any]) -> Any:
    """Return A | B, and not Union[A, B].

    These are equal, and beartype 0.23 takes equal annotations for one. Where it has met
    A | B, also in another module, it may reject Union[A, B].
    """
    return functools.reduce(operator.or_, parts)


def _meaning(hint: Any, validates: bool) -> Any:
    """Return what a TypeVar, a NewType, an alias, or Annotated stands for."""
    origin, parts = get_origin(hint), get_args(hint)
    if isinstance(hint, TypeVar):
        return _union(hint.__constraints__ or (hint.__bound__ or Any,))
    if hasattr(hint, "__supertype__"):  # a NewType
        return hint.__supertype__
    if type(hint).__name__ == "TypeAliasType":  # type Name = ..., since Python 3.12
        return hint.__value__
    if type(origin).__name__ == "TypeAliasType":  # type Name[T] = ...
        return origin.__value__[parts]
    if origin is Annotated:
        has_validator = any(type(n).__module__.startswith("beartype.") for n in parts)
        return hint if validates and has_validator else parts[0]
    return hint


def _with_names(array: Any, put: Callable[[str], str]) -> Any:
    """Return an annotation with names in place of the sizes in braces."""
    axes = array.dim_str.split()
    for i, dim in enumerate(array.dims):
        text = getattr(dim, "elem", "")  # without # and name=
        if "{" in text or "}" in text:
            axes[i] = axes[i].removesuffix(text) + put(text)
    if axes == array.dim_str.split():
        return array
    # Its dtype restricts the dtypes again, as in Float[Float32[Tensor, "n"], "m"].
    dtype: Any = type(array.dtype.__name__, (array.dtype,), {"dtypes": array.dtypes})
    return dtype[array.array_type, " ".join(axes)]


def _narrowed(hint: Any, value: Any) -> Any:
    """Return what the annotation asks of this value, with an item for each of a tuple.

    Otherwise, beartype checks one random item, and does not say which axis is wrong.
    """
    parts = get_args(hint)
    if get_origin(hint) in _UNIONS and value is not None:
        return _union(_narrowed(part, value) for part in parts if part is not NoneType)
    if get_origin(hint) is not tuple or not isinstance(value, tuple):
        return hint
    if parts[1:] == (Ellipsis,):
        parts = parts[:1] * len(value)
    if len(parts) != len(value):
        return hint
    return tuple[tuple(map(_narrowed, parts, value))]  # type: ignore[misc]


# What a compiler knows ---------------------------------------------------------------


def _seen(context: Any, name: str) -> Any:
    """Return what the compiler knows of a variable, such as a tensor without values."""
    variable = context.get_local(name)
    with contextlib.suppress(NotImplementedError):  # it may know nothing
        kind = variable.python_type()
        if issubclass(kind, Tensor):
            return variable.as_fake()
        if variable.is_python_constant():
            return variable.as_python_constant()
        if kind in (int, float, bool, list, dict) or issubclass(kind, tuple):
            return map_aggregate(variable.as_proxy(), _example)
    return _UNKNOWN


def _example(proxy: Any) -> Any:
    is_proxy = isinstance(proxy, torch.fx.Proxy)
    return proxy.node.meta["example_value"] if is_proxy else proxy


def _leaves(value: Any) -> list[Any]:
    """Return what is in a value of tuples, lists, and dicts."""
    leaves: list[Any] = []
    map_aggregate(value, leaves.append)
    return leaves


def _is_known(value: Any) -> bool:
    """Return whether no part of it is unknown, such as a size that depends on values."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return not any(
        free_unbacked_symbols(leaf)
        if isinstance(leaf, (Tensor, SymInt))
        else leaf is _UNKNOWN
        for leaf in _leaves(value)
    )


def _number(value: Any) -> Any:
    """Return a number of the same type for a symbol, and any other value as it is."""
    if isinstance(value, (SymInt, SymFloat, SymBool)):
        return value.node.hint or value.node.pytype()
    return value


def _with_numbers(message: str, sizes: Iterable[Any]) -> str:
    """Return a message in which each size that is a symbol has its number in the example."""
    for size in sizes:
        message = re.sub(rf"\b{re.escape(f'{size}')}\b", f"{_number(size)}", message)
    return message


@contextlib.contextmanager
def _symbols_broadcast() -> Iterator[None]:
    """Let jaxtyping broadcast by torch, as it has no setting for this.

    numpy would turn symbols into numbers, so that each size makes one more graph.
    """
    import numpy

    by_numpy = numpy.broadcast_shapes
    numpy.broadcast_shapes = _broadcast_shapes
    try:
        yield
    finally:
        numpy.broadcast_shapes = by_numpy


def _broadcast_shapes(*shapes: Any) -> Any:
    try:
        return torch.broadcast_shapes(*shapes)
    except RuntimeError as error:
        raise ValueError(error) from error
