"""Shape checks at run time: turn jaxtyping annotations into errors.

`@typecheck` checks a function or a class, and `typecheck(module)` checks the public
functions of a module, and the `__init__` and `forward` of its classes. A call that
violates an annotation raises `jaxtyping.TypeCheckError`, a `TypeError`, which names the
function, the argument, its shape and the expected shape.

jaxtyping and beartype take 12 to 30 microseconds to check a call with one or two
tensors. So the wrapper calls them only if the signature of a call is new. The
signature consists of

- the type, dtype and shape of each tensor,
- the type and value of each number, string, dtype, device or class,
- the type of each function,
- the text of each expression that an annotation has in braces, such as
  `{self.d_model}`.

A signature leaves out parameters that are unannotated or annotated as Any. Calls with
any other argument, such as a list, are checked each time.

Compiled code runs unchecked: torch.compile cannot trace jaxtyping
(patrick-kidger/jaxtyping issues 196 and 384). The wrapper then calls the plain
function, without a graph break or a guard. JAXTYPING_DISABLE=1 leaves all functions
unwrapped and beartype unimported. So does `python -O`, with a warning, because beartype
checks nothing there.
"""

import functools
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, TypeVar, get_args, get_type_hints

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

    Annotations are resolved at the first call, so that a class may name itself.

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


def _checked(function: Any) -> Any:
    """Return a wrapper of `function` that checks each call whose signature is new."""
    signature_of: Any
    check_arguments: Any
    check_result: Any

    def resolve_annotations(*args: Any, **kwargs: Any) -> Any:
        nonlocal signature_of, check_arguments, check_result
        hints = get_type_hints(function, include_extras=True)
        axes = " ".join(map(_axes, hints.values()))
        in_braces = sorted(set(re.findall(r"\{([^{}]+)\}", axes)))
        check_arguments, check_result = _checkers(function, hints, in_braces)
        signature_of = _signature_reader(function, hints, in_braces)
        return signature_of(*args, **kwargs)

    signature_of = resolve_annotations  # until the first call
    known: dict[Any, Any] = {}  # signature of a call -> description of its last result

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if is_dynamo_compiling():
            return function(*args, **kwargs)
        signature = signature_of(*args, **kwargs)
        try:
            last = known.get(signature)
        except TypeError:  # symbolic sizes, as in torch.export, have no hash
            return function(*args, **kwargs)
        if last is None:
            check_arguments(*args, **kwargs)
        try:
            result = function(*args, **kwargs)
        except RuntimeError as error:
            _note_dtypes(error, args, kwargs)
            raise
        if isinstance(result, Tensor):  # without a call, which would take time
            found: Any = (result.__class__, result.dtype, result.shape)
        else:
            found = _describe(result)
        if found is None or found != last:
            check_result(result, *args, **kwargs)
            if None not in signature:
                _remember(known, signature, found)
        return result

    # dynamo counts recompilations per code object. If all functions shared one, the
    # ninth would exceed the limit.
    wrapper: Any = checked
    wrapper.__code__ = wrapper.__code__.replace(co_name=function.__name__)
    wrapper.__typechecked__ = True
    return wrapper


def _remember(known: dict[Any, Any], signature: Any, found: Any) -> None:
    if len(known) >= _MAX_SIGNATURES:
        known.clear()
    known[signature] = found


def _axes(annotation: Any) -> str:
    """Return the texts in an annotation that name axes, such as "seq {self.d_model}"."""
    if hasattr(annotation, "dim_str"):  # jaxtyping's; a text in Literal names no axes
        return annotation.dim_str
    return " ".join(map(_axes, get_args(annotation)))


def _signature_reader(
    function: FunctionType, hints: dict[str, Any], in_braces: list[str]
) -> Callable[..., tuple[Any, ...]]:
    """Return a function that takes the arguments of a call and returns its signature.

    It runs at every call. It is compiled from text, because a loop takes twice as long.
    """
    items = [f'f"{{{expression}}}"' for expression in in_braces]
    parameters = []
    for name, parameter in inspect.signature(function).parameters.items():
        if hints.get(name, Any) is not Any:
            items.append(
                f"({name}.__class__, {name}.dtype, {name}.shape) "
                f"if isinstance({name}, Tensor) else _describe({name})"
            )
        if parameter.default is not parameter.empty:
            parameter = parameter.replace(default=None)
        parameters.append(parameter.replace(annotation=parameter.empty))
    arguments = str(inspect.Signature(parameters))[1:-1]
    body = "".join(f"{item}, " for item in items)
    reader: Any = eval(f"lambda {arguments}: ({body})", globals())
    plain: Any = inspect.unwrap(function)
    reader.__defaults__ = plain.__defaults__
    reader.__kwdefaults__ = plain.__kwdefaults__
    reader.__qualname__ = function.__qualname__  # Python's errors show it
    return reader


def _describe(value: Any) -> tuple[Any, ...] | None:
    """Return what annotations read of a value, or None if that may change."""
    kind = value.__class__
    if kind in _TYPES_BY_VALUE:
        return kind, value
    if kind in (FunctionType, BuiltinFunctionType):
        return (kind,)
    return None  # an array, or a list, of which beartype checks one random item


def _checkers(
    function: FunctionType, hints: dict[str, Any], in_braces: list[str]
) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return a function that checks arguments, and one that also checks a result."""
    parameters = []
    for name, parameter in inspect.signature(function).parameters.items():
        annotation = hints.get(name, parameter.empty)
        parameters.append(parameter.replace(annotation=annotation))
    of_arguments = inspect.Signature(parameters)
    result = inspect.Parameter("_result", inspect.Parameter.POSITIONAL_ONLY)
    of_result = inspect.Signature(
        [result, *parameters], return_annotation=hints.get("return", Any)
    )
    return (
        _checker(function, of_arguments, in_braces),
        _checker(function, of_result, in_braces),
    )


def _checker(
    function: FunctionType, signature: inspect.Signature, in_braces: list[str]
) -> Callable[..., None]:
    """Return a function that checks what it is called with against `signature`."""
    from beartype import BeartypeConf, beartype  # JAXTYPING_DISABLE=1 works without it

    @functools.wraps(function)  # so that errors name it
    def first(*args: Any, **kwargs: Any) -> Any:  # the result, where that is checked
        return args[0] if args else None

    vars(first)["__signature__"] = signature
    int_is_float = BeartypeConf(is_pep484_tower=True)  # as in theta=10000
    checked_first = jaxtyped(first, typechecker=beartype(conf=int_is_float))

    def check(*args: Any, **kwargs: Any) -> None:
        __tracebackhide__ = True
        run = checked_first
        if "torch._dynamo" in sys.modules:
            # After an error in a compiled frame, dynamo would trace the check.
            run = torch.compiler.disable(run)
        try:
            run(*args, **kwargs)
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


def _note_dtypes(
    error: RuntimeError, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Add the innermost layer and its dtypes to torch's error about dtypes."""
    if "dtype" not in str(error) or hasattr(error, "__notes__"):
        return
    tensors = [
        value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)
    ]
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    layer = args[0] if args else None
    weights = {weight.dtype for weight in getattr(layer, "parameters", list)()}
    if weights and dtypes - weights:
        error.add_note(
            f"the input of {type(layer).__name__} must have the dtype of its weights, "
            f"{weights}, got {dtypes}: convert one of them with .to"
        )
