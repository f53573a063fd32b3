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
and 384). So the wrapper compares sizes itself, by code that it writes from the
annotations. For "*batch query d_k" and "*batch key d_k" it is, in short,

    def scores(q, k):
        batch, query, d_k = q.shape[:-2], q.shape[-2], q.shape[-1]
        if k.shape[:-2] != batch or k.shape[-1] != d_k:
            raise TypeCheckError(...)
        return function(q, k)

The compiler runs these comparisons while it traces. The compiled code has none of them:
a size is a constant or has a guard, and a call with other sizes is traced again. After
the error, torch.compile runs the call in eager mode, which raises the error of jaxtyping.
With fullgraph=True it raises an error of its own, which contains this one.

JAXTYPING_DISABLE=1 leaves all functions unwrapped and beartype unimported. So does
`python -O`, with a warning, because beartype checks nothing there.
"""

import functools
import inspect
import linecache
import re
import sys
import warnings
from abc import ABCMeta
from collections.abc import Callable, Iterable, Iterator
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
    traced = _traced(function, hints)
    signature_of: Any
    check_arguments: Any
    check_result: Any

    def at_first_call(*args: Any, **kwargs: Any) -> Any:
        nonlocal hints, traced, signature_of, check_arguments, check_result
        if unknown:
            hints, _ = _resolve(function, warn=True)
            traced = _traced(function, hints)
        check_arguments, check_result = _checkers(function, hints)
        signature_of = _signature_reader(function, hints)
        return signature_of(*args, **kwargs)

    signature_of = at_first_call
    known: dict[Any, Any] = {}  # signature of a call -> description of its last result

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if is_dynamo_compiling():
            return traced(*args, **kwargs)
        signature = signature_of(*args, **kwargs)
        try:
            last = known.get(signature)
        except TypeError:  # symbolic sizes, as in torch.export, have no hash
            return traced(*args, **kwargs)
        if last is None:
            check_arguments(*args, **kwargs)
        result = function(*args, **kwargs)
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


# Code that is written from annotations -----------------------------------------------


class _Absent:
    """The default of every optional parameter of the reader of signatures."""


class _Code(str):
    def __repr__(self) -> str:  # inspect.Signature shows defaults by repr
        return self


def _written(function: Any, purpose: str, body: str, **names: Any) -> Any:
    """Return a function with the parameters of `function` and with this body.

    Expressions in braces read the parameters and the global variables of `function` (in
    eager mode, jaxtyping then rejects a global variable). So every other name has a $,
    which becomes more underscores than any name there has.
    `names` are what the body uses, and the dict `defaults` of the parameters.
    """
    parameters = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.default is not parameter.empty:
            parameter = parameter.replace(default=_Code(f"$defaults['{name}']"))
        parameters.append(parameter.replace(annotation=parameter.empty))
    names |= {
        "function": function,
        "int": int,
        "isinstance": isinstance,
        "len": len,
        "tuple": tuple,
        "Tensor": Tensor,
        "Absent": _Absent,
        "describe": _describe,
        "join": _join,
        "misfit": _misfit,
    }
    source = (
        f"def $bind({', '.join(f'${name}' for name in names)}):\n"
        f"    def $call{inspect.Signature(parameters)}:\n"
        f"{indent(body, ' ' * 8)}"
        "    return $call\n"
    )
    mark = "__"
    while mark in source:
        mark += "_"
    source = source.replace("$", mark)
    file = f"<{purpose} of {function.__module__}.{function.__qualname__}>"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    made: dict[str, Any] = {}
    exec(compile(source, file, "exec"), inspect.unwrap(function).__globals__, made)
    call = made[f"{mark}bind"](*names.values())
    call.__qualname__ = function.__qualname__  # Python's errors show it
    return call


def _defaults(function: Any) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


# Checks in eager mode ----------------------------------------------------------------


def _signature_reader(
    function: Any, hints: dict[str, Any]
) -> Callable[..., tuple[Any, ...]]:
    """Return a function that takes the arguments of a call and returns its signature.

    It runs at every call. It is written as code, because a loop takes twice as long.
    For a method with x: Float[Tensor, "{self.size}"] and mask: Any = None it is, in
    short,

        def forward(self, x, mask=Absent):
            return (x.__class__, x.dtype, x.shape), f"{self.size}"
    """
    defaults = _defaults(function)
    in_braces = _in_braces(hints.values())
    words_in_braces = re.findall(r"\w+", " ".join(in_braces))
    items = [] if all(map(_is_known, hints.values())) else ["None"]
    lines = ""
    for name in inspect.signature(function).parameters:
        item = (
            f"({name}.__class__, {name}.dtype, {name}.shape) "
            f"if $isinstance({name}, $Tensor) else $describe({name})"
        )
        if name in defaults:
            item = f"{name} if {name} is $Absent else {item}"
        if name in defaults and name in words_in_braces:
            lines += f"$item_{name} = {item}\n"
            lines += f"if {name} is $Absent: {name} = $true_defaults['{name}']\n"
            item = f"$item_{name}"
        if hints.get(name, Any) is not Any:
            items.append(item)
    items += [f'f"{{{expression}}}"' for expression in in_braces]
    return _written(
        function,
        "signature",
        f"{lines}return ({''.join(f'{item}, ' for item in items)})\n",
        defaults=dict.fromkeys(defaults, _Absent),
        true_defaults=defaults,
    )


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


def _checkers(
    function: Any, hints: dict[str, Any]
) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return a function that checks arguments, and one that also checks a result."""
    parameters = []
    for name, parameter in inspect.signature(function).parameters.items():
        annotation = hints.get(name, parameter.empty)
        parameters.append(parameter.replace(annotation=annotation))
    of_arguments = inspect.Signature(parameters)
    free_name = "_result"
    while free_name in of_arguments.parameters:
        free_name += "_"
    result = inspect.Parameter(free_name, inspect.Parameter.POSITIONAL_ONLY)
    of_result = inspect.Signature(
        [result, *parameters], return_annotation=hints.get("return", Any)
    )
    in_braces = _in_braces(hints.values())
    return (
        _checker(function, of_arguments, in_braces),
        _checker(function, of_result, in_braces),
    )


def _checker(
    function: Any, signature: inspect.Signature, in_braces: list[str]
) -> Callable[..., None]:
    """Return a function that checks what it is called with against `signature`."""
    from beartype import BeartypeConf, beartype  # JAXTYPING_DISABLE=1 works without it

    @functools.wraps(function)  # so that errors name it
    def first(*args: Any, **kwargs: Any) -> Any:  # the result, where that is checked
        return args[0] if args else None

    vars(first)["__signature__"] = signature
    first.__annotations__ = {}  # jaxtyping 0.3.0 prefers these to the signature
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


# Checks while a compiler traces ------------------------------------------------------


def _traced(function: Any, hints: dict[str, Any]) -> Any:
    """Return `function` between comparisons, which a compiler runs while it traces."""
    defaults = _defaults(function)
    before = ""
    passed = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            passed.append(f"*{name}")
        elif parameter.kind is parameter.VAR_KEYWORD:
            passed.append(f"**{name}")
        else:
            by_name = parameter.kind is parameter.KEYWORD_ONLY
            passed.append(f"{name}={name}" if by_name else name)
            hint = hints.get(name, Any)
            if name in defaults:  # jaxtyping does not check a default
                hint = hint | type(defaults[name])
            before += _comparisons(name, hint, _place(function, name))
    result = hints.get("return", Any)
    after = _comparisons("$result", result, _place(function, "return"))
    if not before + after:
        return function
    body = (
        # Where a size is known only when the compiled code runs, nothing is true of it.
        "from torch.fx.experimental.symbolic_shapes import guard_or_false as $is_true\n"
        f"$axes = {{}}\n{before}"
        f"$result = $function({', '.join(passed)})\n{after}"
        "return $result\n"
    )
    return _written(function, "checks", body, defaults=defaults)


def _comparisons(value: str, hint: Any, place: str) -> str:
    """Return code that raises an error if `value` does not fit.

    It is empty for an annotation that these comparisons do not cover.
    """
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    expected = " | ".join(getattr(each, "__name__", str(each)) for each in options)
    sizes = "".join(f", '{{{text}}}': {text}" for text in _in_braces(options))
    known = f"{{**$axes{sizes}}}"
    wrong = f"\n    raise $misfit({place!r}, {expected!r}, {value}, {known})\n"
    items = get_args(hint)
    if get_origin(hint) is tuple and Ellipsis not in items:
        is_such = f"$isinstance({value}, $tuple) and $len({value}) == {len(items)}"
        code = f"if not ({is_such}):{wrong}"
        for i, item in enumerate(items):
            code += _comparisons(f"{value}[{i}]", item, f"item {i} of {place}")
        return code
    arrays = [each for each in options if _is_array_of_tensor(each)]
    others = [each for each in options if not _is_array_of_tensor(each)]
    if not arrays or any(map(_may_be_tensor, others)):
        return ""
    kinds = [_kind(value, array) for array in arrays]
    code = f"if not ({' or '.join(kinds)}):{wrong}"
    if len(arrays) == 1:
        code += _sizes(arrays[0], wrong)
        kinds = []
    for array, kind in zip(arrays, kinds, strict=False):
        # Where several of a union fit, these comparisons do not choose.
        only = " and not ".join([kind, *(each for each in kinds if each is not kind)])
        code += f"if {only}:\n{indent(_sizes(array, wrong), '    ')}"
    code = f"$shape = {value}.shape\n{code}"  # dynamo takes its time for an attribute
    code = f"if $isinstance({value}, $Tensor):\n{indent(code, '    ')}"
    if not others:
        code += f"else:{wrong}"
    elif others == [type(None)]:
        code += f"elif {value} is not None:{wrong}"
    return code


def _is_array_of_tensor(hint: Any) -> bool:
    return _is_array(hint) and hint.array_type is Tensor


def _may_be_tensor(hint: Any) -> bool:
    kind = hint.array_type if _is_array(hint) else get_origin(hint) or hint
    return (
        type(kind) not in _PLAIN_METACLASSES
        or issubclass(kind, Tensor)
        or issubclass(Tensor, kind)
    )


def _kind(value: str, array: Any) -> str:
    """Return a condition on the number of axes and on the dtype."""
    count = len(array.dims)
    rank = f"== {count}" if array.index_variadic is None else f">= {count - 1}"
    condition = f"$len($shape) {rank}"
    dtypes = array.dtypes  # texts, or patterns, or an object that stands for any dtype
    if isinstance(dtypes, (list, tuple)) and {*map(type, dtypes)} == {str}:
        names = tuple(f"torch.{dtype}" for dtype in dtypes)
        condition += f' and f"{{{value}.dtype}}" in {names}'  # a text needs no guard
    return f"({condition})"


def _sizes(array: Any, wrong: str) -> str:
    """Return code that compares each size of $shape, in the order of jaxtyping.

    The first size of a name is the size of all. The dict $axes holds what is known.
    """
    dims = array.dims
    variadic = array.index_variadic
    code = "pass\n"
    for i, dim in enumerate(dims):
        if i == variadic or not hasattr(dim, "broadcastable"):  # it has no name
            continue
        index = i if variadic is None or i < variadic else i - len(dims)
        size = f"$shape[{index}]"
        if hasattr(dim, "name"):
            known = f"$axes.setdefault('{dim.name}', {size})"
            conditions = [f"$is_true({size} != {known})"]
        else:
            expression = str(dim.size) if hasattr(dim, "size") else dim.elem
            conditions = _is_not(size, expression)
        if dim.broadcastable:
            conditions.insert(0, f"not $is_true({size} == 1)")
        code += f"if {' and '.join(conditions)}:{wrong}"
    if variadic is not None and hasattr(dims[variadic], "name"):
        shape = f"$shape[{variadic}:{variadic + 1 - len(dims) or ''}]"
        name = f"'*{dims[variadic].name}'"
        may_broadcast = dims[variadic].broadcastable
        code += f"$joined = $join($axes.get({name}), {shape}, {may_broadcast})\n"
        code += f"if $joined is None:{wrong}"
        code += f"$axes[{name}] = $joined\n"
    return code


_TERM = r"\{[^{}:!=]+\}|\w+"
_EXPRESSION = re.compile(rf"\(*({_TERM})\)*([-+*/%]+\(*({_TERM})\)*)*")


def _is_not(size: str, expression: str) -> list[str]:
    """Return conditions, of which one is false if `expression` has no value."""
    if not _EXPRESSION.fullmatch(expression):
        return ["False"]
    conditions = []

    def as_code(match: re.Match[str]) -> str:
        term = match[0]
        if term.isdigit():
            return term
        if term[0] == "{":
            conditions.append(f"$isinstance({term[1:-1]}, $int)")
            return f"({term[1:-1]})"
        conditions.append(f"'{term}' in $axes")
        return f"$axes['{term}']"

    code = re.sub(_TERM, as_code, expression)
    return [*conditions, f"$is_true({size} != {code})"]


_Shape = tuple[int, ...]


def _join(
    known: tuple[bool, _Shape] | None, shape: _Shape, may_broadcast: bool
) -> tuple[bool, _Shape] | None:
    """Return what an axis name such as *batch stands for after one more shape, or None.

    The result says whether all shapes so far may broadcast, and to which shape.
    """
    from torch.fx.experimental.symbolic_shapes import guard_or_false

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
        if guard_or_false(a != b):
            if may_grow and guard_or_false(a == 1):
                a = b
            elif not (may_broadcast and guard_or_false(b == 1)):
                return None
        joined.append(a)
    return may_grow and may_broadcast, tuple(joined)


def _misfit(
    place: str, expected: str, value: Any, axes: dict[str, Any]
) -> TypeCheckError:
    """Return an error, by operations that dynamo traces."""
    got = type(value).__name__
    if isinstance(value, Tensor):
        got = f"{value.dtype}".removeprefix("torch.") + _shape_text(value.shape)
    known = []
    for axis, size in axes.items():
        if isinstance(size, tuple):
            size = _shape_text(size[1])
        elif isinstance(size, int):
            size += 0  # dynamo cannot format a symbolic argument, but can format a sum
        known.append(f"{axis.strip('{}')}={size}")
    where = f" where {', '.join(known)}" if known else ""
    return TypeCheckError(f"{place} must be {expected}{where}, got {got}")


def _shape_text(shape: _Shape) -> str:
    return f"[{','.join([f'{size}' for size in shape])}]"
