"""Shape checks at run time: turn a module's jaxtyping annotations into errors.

`typecheck(module)` wraps the module's public functions, and the `__init__` and
`forward` of its classes. A call that violates an annotation raises
`jaxtyping.TypeCheckError`, a `TypeError`, which names the function, the argument, its
shape and the expected shape.

jaxtyping and beartype take tens of microseconds or more to check a call. So the
wrapper calls them only if the signature of a call is new. The signature consists of

- the type, dtype and shape of each tensor that is an argument,
- the type and value of each number, string, dtype or device that is an argument,
- the value of each expression that an annotation reads in braces, such as
  `{self.d_model}`,
- the type of the result, and its dtype and shape or its value.

A signature leaves out parameters that are unannotated or annotated as Any. Some calls
have no signature, so that each of them is checked: calls with any other argument, such
as a list or a function, and calls where an expression in braces reads a tensor, which
may change in place. The wrapper keeps no reference to such arguments.

In addition:

- Compiled code runs unchecked: torch.compile cannot trace jaxtyping
  (patrick-kidger/jaxtyping issues 196 and 384). The wrapper then calls the plain
  function, without a graph break or a guard.
- If torch raises a RuntimeError because an argument of `forward` and the weights
  differ in dtype, the wrapper raises another RuntimeError, which names the layer and
  both dtypes.
- The environment variable JAXTYPING_DISABLE=1 leaves all functions unwrapped and
  beartype unimported.
- `python -O` leaves all functions unwrapped, too, because beartype checks nothing
  there. This causes a warning.
- A function that jaxtyping's import hook or pytest hook has wrapped is checked twice,
  by the hook and by `typecheck`.
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
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

__all__ = ["typecheck"]


def typecheck(module: ModuleType, max_signatures: int = 1024) -> None:
    """Check every call of a module's public functions and classes.

    It checks `__init__` and `forward` of each class. Public names are those in
    `__all__` or, without `__all__`, those that do not begin with an underscore.
    Imported names stay unchanged, as do nested classes, lambdas, coroutines and
    decorated generators, such as context managers. A second call changes nothing. Pass
    each module that defines layers, after its import:

        from my_project.layers import attention, rope
        from tinyblock import typecheck

        for module in (attention, rope):
            typecheck(module)

    A module that defines nothing to check, such as the package `my_project.layers`,
    causes a warning, and so does `python -O`. Each function remembers at most
    max_signatures signatures, because a sequence that grows token by token adds one per
    token.

    Raises:
        TypeError: `module` is not a module.
    """
    _require_module(module)
    warn_if_unchecked()
    if config.jaxtyping_disable or not __debug__:
        return
    functions = _public_functions(module)
    checked: dict[FunctionType, FunctionType] = {}
    for owner, name, function in functions:
        _replace_defaults(function, checked)
        if _can_be_checked(function):
            checked[function] = _checked(function, max_signatures)
            setattr(owner, name, checked[function])
    if not functions:
        warnings.warn(
            f"typecheck found nothing to check in {module.__name__}: "
            "pass the modules that define the layers",
            stacklevel=2,
        )


def _require_module(module: Any) -> None:
    if not isinstance(module, ModuleType):
        got = getattr(module, "__name__", type(module).__name__)
        raise TypeError(
            "module must be a Python module, such as my_project.layers.rope, "
            f"got {got}: pass the module that defines the layers"
        )


@functools.cache  # one warning per process
def warn_if_unchecked() -> None:
    """Warn under `python -O`, and name the line that called or imported the caller."""
    if not __debug__ and not config.jaxtyping_disable:
        warnings.warn(
            "python -O turns all shape checks off, because beartype checks nothing "
            "there: run python without -O, or set JAXTYPING_DISABLE=1 to silence "
            "this warning",
            stacklevel=3,
        )


def _public_functions(
    module: ModuleType,
) -> list[tuple[ModuleType | type, str, FunctionType]]:
    """Return (owner, name, function) for each function to check, as they are defined."""
    found: list[tuple[ModuleType | type, str, FunctionType]] = []
    without_underscore = [name for name in vars(module) if not name.startswith("_")]
    public_names = getattr(module, "__all__", None) or without_underscore
    for name, member in vars(module).items():
        is_own = getattr(member, "__module__", None) == module.__name__
        if name not in public_names or not is_own:
            continue
        if isinstance(member, FunctionType):
            found.append((module, name, member))
        elif isinstance(member, type):
            for method in ("__init__", "forward"):
                function = vars(member).get(method)
                if isinstance(function, FunctionType):
                    found.append((member, method, function))
    return found


def _replace_defaults(
    function: FunctionType, checked: dict[FunctionType, FunctionType]
) -> None:
    """Replace each default that is a function, such as gelu, by the checked function."""
    # A layer keeps its default, and pickle stores a function by its name. It requires that
    # the module has the same object under that name, which is the checked function now.
    plain: Any = inspect.unwrap(function)

    def current(default: Any) -> Any:
        if isinstance(default, FunctionType):
            return checked.get(default, default)
        return default

    if plain.__defaults__:
        plain.__defaults__ = tuple(map(current, plain.__defaults__))
    for name, default in (plain.__kwdefaults__ or {}).items():
        plain.__kwdefaults__[name] = current(default)


def _checked(function: FunctionType, max_signatures: int) -> FunctionType:
    """Return a wrapper of `function` that checks each call whose signature is new."""
    signature_of = _signature_reader(function)
    num_braces = len(_brace_expressions(function))
    check_arguments = _argument_checker(function)
    check_result = _result_checker(function)
    result_of, remember = _memory(max_signatures)

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if is_dynamo_compiling():
            return function(*args, **kwargs)
        try:
            call_signature = signature_of(*args, **kwargs)
            known_result = result_of(call_signature)
        except Exception:  # a list, a symbolic size, a missing argument, ...
            call_signature = known_result = None
        if known_result is None:
            check_arguments(*args, **kwargs)
        try:
            result = function(*args, **kwargs)
        except RuntimeError as error:
            _raise_if_dtypes_differ(error, function, args, kwargs)
            raise
        if isinstance(result, Tensor):
            result_signature: Any = (result.__class__, result.dtype, result.shape)
        else:
            result_signature = _signature_or_none(result)
        if result_signature is None or result_signature != known_result:
            check_result(*args, **kwargs, _returned=result)
            if result_signature is not None and _is_lasting(call_signature, num_braces):
                remember(call_signature, result_signature)
        return result

    wrapper: Any = checked
    # dynamo counts recompilations per code object. With a shared one, the ninth function
    # would reach its limit.
    wrapper.__code__ = wrapper.__code__.replace(co_name=function.__name__)
    wrapper.__typechecked__ = True
    return wrapper


def _memory(
    max_entries: int,
) -> tuple[Callable[[Any], Any], Callable[[Any, Any], None]]:
    """Return a function that finds the value of a key, or None, and one that stores it.

    These two hide the dict, because torch 2.5 compiles a function again whenever a dict
    in its closure has grown.
    """
    entries: dict[Any, Any] = {}

    def remember(key: Any, value: Any) -> None:
        if len(entries) >= max_entries:
            entries.clear()
        entries[key] = value

    return entries.get, remember


def _can_be_checked(function: FunctionType) -> bool:
    """Return whether the annotations describe what a call returns, and nothing checks it."""
    if hasattr(function, "__typechecked__"):  # by an earlier call
        return False
    if function.__name__ == "<lambda>":
        return False
    plain = inspect.unwrap(function)
    if inspect.iscoroutinefunction(plain):
        return False
    is_decorated = plain is not function
    return not (is_decorated and inspect.isgeneratorfunction(plain))


# What may be part of a signature by its value: it is immutable, and annotations depend
# on nothing else of it.
_TYPES_BY_VALUE = {
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


def _signature(value: Any) -> tuple[Any, ...]:
    """Return what annotations can read of a value by type, or raise a TypeError.

    Lists and tuples have no signature: beartype checks one randomly chosen item, so one
    pass proves little.
    """
    if type(value) in _TYPES_BY_VALUE:
        return type(value), value
    raise TypeError(f"no signature for a {type(value).__name__}")


def _signature_or_none(value: Any) -> tuple[Any, ...] | None:
    return _signature(value) if type(value) in _TYPES_BY_VALUE else None


def _is_lasting(call_signature: tuple[Any, ...] | None, num_braces: int) -> bool:
    """Return whether a signature stays valid, so that the call may be remembered.

    Its first `num_braces` items are values of expressions in braces. A tensor among
    them may change in place, and would still be found equal to itself.
    """
    if call_signature is None:
        return False
    in_braces = call_signature[:num_braces]
    return all(type(value) in _TYPES_BY_VALUE for value in in_braces)


def _signature_reader(function: FunctionType) -> Callable[..., Any]:
    """Return a function that takes the arguments of a call and returns its signature.

    The signature is all that the check depends on: the values of the expressions that
    annotations have in braces, and what annotations describe of each argument. Calls of
    one signature are checked once.
    """
    # This source code is compiled below, and runs on every call. Tensors and None do not
    # call `_signature`, which would cost time.
    argument_source = (
        "({0}.__class__, {0}.dtype, {0}.shape) if isinstance({0}, Tensor) "
        "else None if {0} is None else _signature({0})"
    )
    sources = _brace_expressions(function)
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.annotation not in (parameter.empty, Any, "Any"):
            sources.append(argument_source.format(name))
    return _compiled_reader(function, sources)


def _brace_expressions(function: FunctionType) -> list[str]:
    """Return the expressions that the annotations of `function` read in `{braces}`."""
    shapes = []
    for annotation in inspect.unwrap(function).__annotations__.values():
        shapes += _shapes(annotation)
    return sorted(set(re.findall(r"\{([^{}]+)\}", " ".join(shapes))))


def _shapes(annotation: Any) -> list[str]:
    """Return the texts of an annotation that name axes, such as "seq {self.d_model}"."""
    if isinstance(annotation, str):  # postponed
        return [annotation]
    if hasattr(annotation, "dim_str"):  # jaxtyping's
        return [annotation.dim_str]
    shapes = []
    for part in get_args(annotation):
        if not isinstance(part, str):  # a text in Literal names no axes
            shapes += _shapes(part)
    return shapes


def _compiled_reader(
    function: FunctionType, expressions: list[str]
) -> Callable[..., Any]:
    """Return a function that takes the arguments of a call and evaluates expressions.

    It returns a tuple, and is compiled from text, because it runs on every call.
    """
    # The text has None for each default, and the defaults follow when it is compiled.
    bare = []
    defaults = []
    keyword_defaults = {}
    for name, parameter in inspect.signature(function).parameters.items():
        parameter = parameter.replace(annotation=parameter.empty)
        if parameter.default is parameter.empty:
            bare.append(parameter)
            continue
        bare.append(parameter.replace(default=None))
        if parameter.kind is parameter.KEYWORD_ONLY:
            keyword_defaults[name] = parameter.default
        else:
            defaults.append(parameter.default)
    parameters = str(inspect.Signature(bare)).removeprefix("(").removesuffix(")")
    values = "".join(f"({expression}), " for expression in expressions)
    read: Any = eval(f"lambda {parameters}: ({values})", globals())
    read.__defaults__ = tuple(defaults)
    read.__kwdefaults__ = keyword_defaults
    return read


def _argument_checker(function: FunctionType) -> Callable[..., None]:
    """Return a function that takes the arguments of a call and checks them."""
    signature = inspect.signature(function)
    arguments_only = signature.replace(return_annotation=signature.empty)
    return _checker(function, _ignore, arguments_only)


def _result_checker(function: FunctionType) -> Callable[..., None]:
    """Return a function that takes the arguments of a call and checks `_returned`."""
    # The result is passed as one more keyword argument. `_get_returned` returns it, so that
    # the annotation of the function's result is checked.
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    result = inspect.Parameter("_returned", inspect.Parameter.KEYWORD_ONLY)
    parameters.append(result)
    # Python's order of kinds: **kwargs are last.
    parameters.sort(key=lambda parameter: parameter.kind)
    with_result = signature.replace(parameters=parameters)
    return _checker(function, _get_returned, with_result)


def _ignore(*args: Any, **kwargs: Any) -> None:
    pass


def _get_returned(*args: Any, _returned: Any, **kwargs: Any) -> Any:
    return _returned


def _checker(
    function: FunctionType, stub: Callable[..., Any], signature: inspect.Signature
) -> Callable[..., None]:
    """Return `stub`, checked against `signature`, with errors that name `function`."""
    # Imported here, because JAXTYPING_DISABLE=1 works without it.
    from beartype import BeartypeConf, beartype

    # jaxtyping reads name, annotations and globals (for postponed annotations) of a twin,
    # and never runs `function`.
    # Its import hook may have wrapped the stub as well.
    stub_code = inspect.unwrap(stub).__code__
    twin: Any = FunctionType(stub_code, inspect.unwrap(function).__globals__)
    functools.update_wrapper(twin, function)
    twin.__signature__ = signature
    int_is_float = BeartypeConf(is_pep484_tower=True)  # as in theta=10000
    jaxtyped_twin = jaxtyped(twin, typechecker=beartype(conf=int_is_float))

    def check(*args: Any, **kwargs: Any) -> None:
        __tracebackhide__ = True
        if not _binds(signature, args, kwargs):
            function(*args, **kwargs)  # raises Python's own error
        run = jaxtyped_twin
        if "torch._dynamo" in sys.modules:
            # Where an error has ended a compiled frame, this runs in eager mode, and dynamo
            # would trace it.
            run = torch.compiler.disable(run)
        try:
            run(*args, **kwargs)
        except TypeCheckError as error:
            message = str(error)
        else:
            return
        kwargs.pop("_returned", None)
        raise TypeCheckError(_completed(message, function, args, kwargs))

    return check


def _binds(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _completed(
    message: str, function: FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str:
    """Complete jaxtyping's message by values of expressions and the result's annotation."""
    # jaxtyping checks arguments and result apart, and prints "-> Any" for both.
    message = message.replace(" -> Any.\n", f"{_arrow_and_result(function)}.\n")
    for expression in _brace_expressions(function):
        # An expression that cannot be evaluated stays as it is.
        with suppress(Exception):
            read = _compiled_reader(function, [expression])
            [value] = read(*args, **kwargs)
            in_braces = "{" + expression + "}"
            message = message.replace(in_braces, f"{expression}={value}")
    return message


def _arrow_and_result(function: FunctionType) -> str:
    """Return the end of a signature as text, such as " -> Float[Tensor, 'seq']"."""
    annotation: Any = inspect.signature(function).return_annotation
    if annotation is inspect.Signature.empty:
        return ""
    is_postponed = isinstance(annotation, str)
    text = annotation if is_postponed else inspect.formatannotation(annotation)
    return " -> " + text.replace("jaxtyping.", "")


def _raise_if_dtypes_differ(
    error: RuntimeError,
    function: FunctionType,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Name layer and dtypes in a RuntimeError, if `error` is about a dtype."""
    __tracebackhide__ = True
    if error.__cause__ is not None:
        return  # it was raised below, and names an inner layer
    if type(error) is not RuntimeError:
        return  # such as the subclass for running out of memory
    if not re.search("dtype|data ?type|scalar type|Input type", str(error)):
        return
    if any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
        return  # autocast converts tensors
    layer = args[0] if args else None
    if function.__name__ != "forward" or not isinstance(layer, nn.Module):
        return
    dtypes = {weight.dtype for weight in layer.parameters()}
    weight_dtypes = [dtype for dtype in dtypes if dtype.is_floating_point]
    if len(weight_dtypes) != 1:
        return  # a layer that mixes dtypes converts by itself
    [expected] = weight_dtypes
    bound = inspect.signature(function).bind(*args, **kwargs)
    for name, value in bound.arguments.items():
        is_floating = isinstance(value, Tensor) and value.is_floating_point()
        if is_floating and value.dtype != expected:
            raise RuntimeError(
                f"{type(layer).__name__}: {name} is {value.dtype}, "
                f"but the weights are {expected}: convert one, "
                f"by {name}.to({expected}) or layer.to({value.dtype})"
            ) from error
