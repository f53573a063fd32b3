"""Shape checks at run time: turn a module's jaxtyping annotations into errors.

`typecheck(module)` wraps the module's public functions, and the `__init__` and `forward` of its classes. A call that
violates an annotation raises `jaxtyping.TypeCheckError`, a `TypeError`, which names the function, the argument, its
shape and the expected shape.

- jaxtyping and beartype take tens of microseconds or more, so they check a call once per signature: the type, dtype
  and shape of every tensor, numbers and strings by value, what the annotations read in `{braces}`, and the same of the
  result. A call with anything else, such as a list, a module or a function, is checked every time and not kept alive.
- torch.compile cannot trace jaxtyping (patrick-kidger/jaxtyping issues 196 and 384), so compiled code calls the
  plain function: no graph break, no guard.
- The environment variable JAXTYPING_DISABLE=1 leaves all functions unwrapped and beartype unimported.
"""

import functools
import inspect
import re
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from types import FunctionType, ModuleType
from typing import Any, get_args

import torch
from jaxtyping import TypeCheckError, config, jaxtyped
from torch import Tensor
from torch.compiler import is_dynamo_compiling

__all__ = ["typecheck"]

_BY_VALUE = {
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type,
    torch.dtype,
    torch.device,
}


def typecheck(module: ModuleType, max_signatures: int = 1024) -> None:
    """Check every call of `module`'s public functions and of its classes' `__init__` and `forward`.

    Public names are those in `__all__` or, without `__all__`, those that do not begin with an underscore. Imported
    names stay unchanged, as do nested classes, lambdas, coroutines and decorated generators, such as context
    managers. A second call changes nothing. Pass each module that defines layers, after its import:

        from my_project.layers import attention, rope
        from tinyblock.typecheck import typecheck

        for module in (attention, rope):
            typecheck(module)

    A module that defines nothing to check, such as the package `my_project.layers`, causes a warning. Each function
    remembers at most max_signatures signatures, because a sequence that grows token by token adds one per token.
    """
    if config.jaxtyping_disable:
        return
    exported = getattr(
        module, "__all__", [name for name in vars(module) if not name.startswith("_")]
    )
    checked: dict[Any, Any] = {}
    found = False
    for name, member in list(
        vars(module).items()
    ):  # in the order of definition, which defaults follow
        if (
            name not in exported
            or getattr(member, "__module__", None) != module.__name__
        ):
            continue
        if isinstance(member, FunctionType):
            checked[member] = _checked(
                _replace_defaults(member, checked), max_signatures
            )
            setattr(module, name, checked[member])
            found = True
        elif isinstance(member, type):
            for method in ("__init__", "forward"):
                if isinstance(function := vars(member).get(method), FunctionType):
                    function = _replace_defaults(function, checked)
                    setattr(
                        member,
                        method,
                        _checked(function, max_signatures, is_method=True),
                    )
                    found = True
    if not found:
        message = f"typecheck found nothing to check in {module.__name__}: pass the modules that define the layers"
        warnings.warn(message, stacklevel=2)


def _replace_defaults(function: FunctionType, checked: dict[Any, Any]) -> FunctionType:
    """Replace a default such as `activation=gelu` by its checked function, because pickle looks it up by name."""

    def current(default: Any) -> Any:
        return (
            checked.get(default, default)
            if isinstance(default, FunctionType)
            else default
        )

    function.__defaults__ = tuple(map(current, function.__defaults__ or ())) or None
    function.__kwdefaults__ = {
        name: current(default)
        for name, default in (function.__kwdefaults__ or {}).items()
    } or None
    return function


def _checked(
    function: FunctionType, max_signatures: int, is_method: bool = False
) -> FunctionType:
    if hasattr(function, "__typechecked__") or not function.__name__.isidentifier():
        return function
    inner = inspect.unwrap(function)
    if inspect.iscoroutinefunction(inner) or (
        inner is not function and inspect.isgeneratorfunction(inner)
    ):
        return function
    signature = inspect.signature(function)
    returned = inspect.Parameter("_returned", inspect.Parameter.KEYWORD_ONLY)
    with_result = sorted(
        [*signature.parameters.values(), returned], key=lambda parameter: parameter.kind
    )
    check_arguments = _checker(
        function, _take_arguments, signature.replace(return_annotation=signature.empty)
    )
    check_result = _checker(
        function, _return_result, signature.replace(parameters=with_result)
    )
    call_signature = _signer(function, is_method)
    seen: dict[Any, Any] = {}  # signature of the arguments -> signature of the result
    # Bound methods, because dynamo would guard on a dict in the closure, and recompile whenever it grows.
    get, put, clear, count = seen.get, seen.__setitem__, seen.clear, seen.__len__

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if is_dynamo_compiling():
            return function(*args, **kwargs)
        known: Any = None
        outcome: Any = None
        try:
            call = call_signature(*args, **kwargs)
            known = get(call)
        except (
            Exception
        ):  # no signature: an unknown type, a symbolic size, a missing argument
            call = None
        if known is None:
            check_arguments(*args, **kwargs)
        result = function(*args, **kwargs)
        if isinstance(result, Tensor):
            outcome = result.__class__, result.dtype, result.shape
        else:
            try:
                outcome = _signature(result)
            except TypeError:
                call = None
        if known is None or known != outcome:
            check_result(*args, **kwargs, _returned=result)
            if call is not None:
                if count() >= max_signatures:
                    clear()
                put(call, outcome)
        return result

    wrapper: Any = checked
    # dynamo counts recompilations per code object: with a shared one, the ninth function would reach its limit.
    wrapper.__code__ = wrapper.__code__.replace(co_name=function.__name__)
    wrapper.__typechecked__ = True
    return wrapper


def _signature(value: Any) -> tuple[Any, ...]:
    """Return what annotations can read of a `value` that is not a tensor; raise TypeError for other types.

    Lists and tuples have no signature: beartype checks one randomly chosen item, so one pass proves little.
    """
    if type(value) in _BY_VALUE:
        return type(value), value
    raise TypeError(f"no signature for a {type(value).__name__}")


def _signer(function: FunctionType, is_method: bool) -> Callable[..., tuple[Any, ...]]:
    """Return a function of the same arguments that returns the signature of a call."""
    parameters = inspect.signature(function).parameters
    names = [
        name for name in parameters if parameters[name].annotation not in (Any, "Any")
    ][is_method:]
    # Inlined for tensors and None, because this is the cost of a checked call.
    tensor = "({0}.__class__, {0}.dtype, {0}.shape) if isinstance({0}, Tensor)"
    sign = tensor + " else None if {0} is None else _signature({0})"
    return _lambda(
        function, _expressions(function) + [sign.format(name) for name in names]
    )


def _expressions(function: FunctionType) -> list[str]:
    """Return what the jaxtyping annotations read in `{braces}`."""

    def shapes(annotation: Any) -> str:
        if isinstance(annotation, str) or hasattr(
            annotation, "dim_str"
        ):  # postponed, or jaxtyping's
            return getattr(annotation, "dim_str", annotation)
        return " ".join(
            shapes(part) for part in get_args(annotation) if not isinstance(part, str)
        )

    annotations = " ".join(
        map(shapes, inspect.unwrap(function).__annotations__.values())
    )
    return sorted(set(re.findall(r"\{([^{}]+)\}", annotations)))


def _lambda(
    function: FunctionType, expressions: list[str]
) -> Callable[..., tuple[Any, ...]]:
    """Return a function of the same arguments that evaluates the expressions; compiled, as it runs on every call."""
    parameters = list(inspect.signature(function).parameters.values())
    bare = [
        p.replace(annotation=p.empty, default=p.empty if p.default is p.empty else None)
        for p in parameters
    ]
    head = str(inspect.Signature(bare)).strip("()")
    read: Any = eval(
        f"lambda {head}: ({''.join(f'{expression}, ' for expression in expressions)})",
        globals(),
    )
    defaults = {p: p.default for p in parameters if p.default is not p.empty}
    read.__defaults__ = tuple(
        default for p, default in defaults.items() if p.kind is not p.KEYWORD_ONLY
    )
    read.__kwdefaults__ = {
        p.name: default for p, default in defaults.items() if p.kind is p.KEYWORD_ONLY
    }
    return read


def _take_arguments(*args: Any, **kwargs: Any) -> None:
    pass


def _return_result(*args: Any, _returned: Any, **kwargs: Any) -> Any:
    return _returned


def _checker(
    function: FunctionType, stub: Callable[..., Any], signature: inspect.Signature
) -> Callable[..., None]:
    """Return `stub` with the name, the globals and this signature of `function`, checked by jaxtyping and beartype."""
    from beartype import (
        BeartypeConf,
        beartype,
    )  # not above: JAXTYPING_DISABLE=1 works without it

    numbers_widen = BeartypeConf(
        is_pep484_tower=True
    )  # an int such as theta=10000 is a float
    # jaxtyping resolves postponed annotations in these globals.
    twin: Any = functools.wraps(function)(
        FunctionType(stub.__code__, inspect.unwrap(function).__globals__)
    )
    twin.__signature__ = signature
    twin.__kwdefaults__ = None
    full = jaxtyped(twin, typechecker=beartype(conf=numbers_widen))

    def check(*args: Any, **kwargs: Any) -> None:
        __tracebackhide__ = True
        try:
            signature.bind(*args, **kwargs)
        except TypeError:
            try:
                function(*args, **kwargs)
            except (
                TypeError
            ) as error:  # Python's own message, with the name of the function
                raise error from None
        try:
            # When an error ends a compiled frame, this runs in eager mode, and dynamo traces what it calls.
            (torch.compiler.disable(full) if "torch._dynamo" in sys.modules else full)(
                *args, **kwargs
            )
        except TypeCheckError as error:
            message = str(error)
        else:
            return
        kwargs.pop("_returned", None)
        for expression in _expressions(function):
            with suppress(
                Exception
            ):  # an expression that cannot be evaluated stays as it is
                [value] = _lambda(function, [expression])(*args, **kwargs)
                message = message.replace(f"{{{expression}}}", f"{expression}={value}")
        raise TypeCheckError(message)

    return check
