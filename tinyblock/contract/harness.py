"""The tools of the contract: cases with formulas, properties that every layer has, and how properties are registered.

A property calls a layer with seeded inputs and compares the result with the paper's formula, or with that of another
call. If it fails, it raises a `Violation`, which names the call, the input and the component with the largest error.

An input "x of shape (2, 7, 24), seed 3" is `torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(3),
dtype=torch.float64)`, rounded to the dtype that is named. Weights are those of `fill`, unless the message names others.
"""

import functools
import inspect
import math
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import SkipTest

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

HALVES = (torch.bfloat16, torch.float16)
ALLOWED = {
    torch.float64: 1e-12,
    torch.float32: 1e-6,
}  # error relative to the largest component
DTYPES = (*ALLOWED, *HALVES)
REJECTED = "invalid hyperparameters rejected"
CUDA, AUTOCAST, RECOMPUTED = (
    "on cuda",
    "torch.autocast('cpu', torch.bfloat16)",
    "torch.utils.checkpoint",
)

Shape = tuple[int, ...]
State = Mapping[str, Tensor]


class Violation(AssertionError):
    """A layer violates its contract; the message shows the input, the result and the expected one."""


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def fill(module: nn.Module) -> nn.Module:
    """Draw weights that keep the length of a vector, and gains around 1, the n-th parameter from seed n."""
    for seed, parameter in enumerate(module.parameters()):
        gain = parameter.ndim == 1
        parameter.data.copy_(
            randn(*parameter.shape, seed=seed) / math.sqrt(parameter.shape[-1]) + gain
        )
    return module


def show(value: Any) -> str:
    if isinstance(value, Tensor):
        return (
            str(value.tolist())
            if value.numel() <= 20
            else f"of shape {tuple(value.shape)}"
        )
    return getattr(value, "__name__", None) or repr(value).partition("\n")[0]


def show_call(
    function: Any, arguments: tuple[Any, ...], options: Mapping[str, Any]
) -> str:
    return f"{function.__name__}({', '.join([*map(show, arguments), *(f'{k}={show(v)}' for k, v in options.items())])})"


@contextmanager
def context(*what: Any) -> Iterator[None]:
    """Put the input in front of the message of whatever fails, in one line."""
    prefix = ", ".join(map(str, what)) + ": " * bool(what)
    try:
        yield
    except SkipTest:
        raise
    except Violation as violation:
        raise Violation(f"{prefix}{violation}") from violation.__cause__
    except Exception as error:
        ours = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
        frames = [
            f
            for f in traceback.extract_tb(error.__traceback__)
            if not f.filename.startswith(ours)
        ]
        place = (
            f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"
            if frames
            else ""
        )
        raise Violation(
            f"{prefix}{type(error).__name__}: {' '.join(str(error).split())[:400]}{place}"
        ) from error


@contextmanager
def rejected(
    named: Any, errors: tuple[type[Exception], ...] = (ValueError,)
) -> Iterator[None]:
    """Expect one of these errors, with a value in its message unless that is None."""
    try:
        yield
    except errors as error:
        if named is not None and not re.search(
            rf"(?<![\w.]){re.escape(str(named))}(?!\w|\.\d)", str(error)
        ):
            raise Violation(
                f"was rejected with {str(error)!r}, expected {named} in the message"
            ) from error
    else:
        raise Violation("was accepted, expected an error")


def largest(tensor: Tensor) -> float:
    return tensor.detach().abs().max().item() if tensor.numel() else 0.0


def close(
    actual: Tensor,
    expected: Tensor,
    allowed: float | Tensor,
    dtype: torch.dtype | None = None,
) -> None:
    """Raise a Violation that shows the worst component, unless every absolute error is allowed."""
    if actual.shape != expected.shape:
        raise Violation(
            f"got shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
        )
    if dtype and actual.dtype != dtype:
        raise Violation(f"got a result of {actual.dtype}, expected {dtype}")
    got, wanted = actual.detach().cpu().double(), expected.detach().double()
    error = (got - wanted).abs().nan_to_num(math.inf)
    excess = error - allowed
    if excess.numel() and excess.max() > 0:
        at = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
        bound = torch.as_tensor(allowed).expand_as(error)[at]
        values = f"got {got[at]:.9g}, expected {wanted[at]:.9g}; allowed {bound:.1e}"
        raise Violation(f"largest error {error[at]:.1e} at {list(at)}: {values}")


def close_in_half(actual: Tensor, exact: Tensor, formula: Tensor) -> None:
    """Raise a Violation if the root mean square error exceeds three times that of the formula in the same dtype.

    The error of one rounding is allowed in any case, as few components may all be exact in the formula.
    """
    if exact.numel():
        tensors = actual - exact, formula - exact, exact
        error, usual, size = (
            t.detach().double().square().mean().sqrt().item() for t in tensors
        )
        allowed = max(3 * usual, torch.finfo(formula.dtype).eps * size)
        if not error <= allowed:
            raise Violation(
                f"root mean square error {error:.1e} of values of {size:.1e}; allowed {allowed:.1e}"
            )


def half_ulp(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the error of one rounding, and 2% of it for what float32 lost before."""
    info = torch.finfo(dtype)
    return (
        0.51
        * info.eps
        * 2.0 ** exact.detach().abs().clamp(min=info.smallest_normal).log2().floor()
    )


# A copy may drop what it does not need. Checks of that are left out; `verify` reports them.

MISSING: set[str] = set()  # what the last property did not find


@dataclass(frozen=True)
class Layer:
    """A layer's module, or a class. A name that it lacks ends the property that needs it."""

    source: Any

    def __getattr__(self, name: str) -> Any:
        if not hasattr(self.source, name):
            MISSING.add(f"{name} is not in this copy")
            raise SkipTest(f"{name} is not in this copy")
        return getattr(self.source, name)


def supported(function: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the options that a function accepts, and note the others."""
    parameters = inspect.signature(function).parameters
    takes_any = any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    )
    missing = [] if takes_any else [name for name in options if name not in parameters]
    MISSING.update(
        f"{function.__qualname__} has no {name} in this copy" for name in missing
    )
    return {name: value for name, value in options.items() if name not in missing}


def require_parameters(function: Any, *names: str) -> None:
    if len(supported(function, dict.fromkeys(names))) < len(names):
        raise SkipTest(" and ".join(sorted(MISSING)))


@dataclass(frozen=True)
class Case:
    """A layer to build, an input for it, and the formula (x, state dict, **inputs) of the result."""

    cls: Any
    arguments: tuple[Any, ...]
    shape: Shape
    formula: Callable[..., Tensor]
    options: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, Tensor] = field(default_factory=dict)  # token_positions, mask
    scale: float = 1.0
    representative: bool = (
        False  # also compiled and checkpointed; if no case is, the first
    )
    rounds_once: bool = False
    dtypes: tuple[torch.dtype, ...] = DTYPES

    def is_supported(self) -> bool:
        accepted = (
            supported(self.cls, self.options),
            supported(self.cls.forward, self.inputs),
        )
        return accepted == (self.options, self.inputs)

    def build(self, **options: Any) -> Any:
        return self.cls(*self.arguments, **self.options, **options)

    def module(self, dtype: torch.dtype = torch.float64) -> Any:
        """Build the layer with the weights of `fill`; in eval mode if it draws random numbers, as dropout does."""
        module, trial = (fill(self.build().to(dtype)) for _ in range(2))
        before = torch.get_rng_state()
        trial(self.x(dtype), **self.inputs)
        return module if torch.equal(torch.get_rng_state(), before) else module.eval()

    def x(self, dtype: torch.dtype = torch.float64) -> Tensor:
        return (randn(*self.shape) * self.scale).to(dtype)

    def expected(
        self, module: nn.Module, x: Tensor, dtype: torch.dtype = torch.float64
    ) -> Tensor:
        """Evaluate the formula with the weights of the module; in float64 it counts as exact."""
        state = {
            key: weight.to(dtype)
            for key, weight in module.state_dict(keep_vars=True).items()
        }
        return self.formula(x.to(dtype), state, **self.inputs)

    def __str__(self) -> str:
        scaled = "" if self.scale == 1 else f" * {self.scale}"
        inputs = "".join(
            f", {name} {show(tensor)}" for name, tensor in self.inputs.items()
        )
        call = show_call(self.cls, self.arguments, self.options)
        return f"{call} of x of shape {self.shape}, seed 0{scaled}{inputs}"


def representative(cases: list[Case]) -> list[Case]:
    return [case for case in cases if case.representative] or cases[:1]


Check = Callable[[list[Case]], None]


class Call(nn.Module):
    """A function as a layer, whose weights are the function's further arguments. Other inputs are ignored."""

    def __init__(
        self, function: Callable[..., Tensor], shapes: list[Shape], *more: Any
    ) -> None:
        super().__init__()
        self.function, self.more = function, more
        self.weights = nn.ParameterList([torch.empty(shape) for shape in shapes])

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return self.function(x, *self.weights, *self.more)


# Properties of every layer.


def matches_equation(cases: list[Case], *dtypes: torch.dtype, how: str = "") -> None:
    """Compare layers with their formulas: value, dtype and gradients. No input may be modified."""
    if how == CUDA and not torch.cuda.is_available():
        raise SkipTest("CUDA is not available")
    # On CUDA, flash attention of torch 2.9 rejects an empty batch in half precision (pytorch issue 165944).
    no_empty_halves = how == CUDA and torch.__version__.startswith("2.9.")
    for case, dtype in product(cases, dtypes or DTYPES):
        if dtype in case.dtypes and not (
            no_empty_halves and dtype in HALVES and 0 in case.shape
        ):
            with context(case, dtype, *[how] * bool(how)):
                _matches_equation(case, dtype, how)


def _matches_equation(case: Case, dtype: torch.dtype, how: str) -> None:
    module, x = case.module(dtype), case.x(dtype).requires_grad_()
    computed = torch.bfloat16 if how == AUTOCAST else dtype
    exact = with_gradients(case.expected(module, x), module, x, computed)
    rounded = with_gradients(case.expected(module, x, computed), module, x, computed)
    before = {"x": x.detach().clone(), **case.inputs}
    device = "cuda" if how == CUDA else "cpu"
    module, inputs = (
        module.to(device),
        {name: tensor.to(device, copy=True) for name, tensor in before.items()},
    )
    x = inputs.pop("x").requires_grad_()

    def compare(name: str, actual: Tensor, factor: float) -> None:
        if computed in ALLOWED:
            close(
                actual,
                exact[name],
                ALLOWED[computed] * factor * (10 if how == CUDA else 1),
                dtype,
            )
        else:
            close(actual, exact[name], math.inf, None if how == AUTOCAST else dtype)
            close_in_half(actual.cpu(), exact[name], rounded[name])

    def run(x: Tensor) -> Tensor:
        forward: Any = (
            functools.partial(checkpoint, module, use_reentrant=False)
            if how == RECOMPUTED
            else module
        )
        in_autocast = torch.autocast("cpu", torch.bfloat16, enabled=how == AUTOCAST)
        with (
            warnings.catch_warnings(action="error" if how == AUTOCAST else None),
            in_autocast,
        ):
            actual = forward(x, **inputs)
        compare("result", actual, largest(exact["result"]))
        if case.rounds_once and dtype in HALVES and how != CUDA:
            close(actual, exact["result"], half_ulp(exact["result"], dtype) + 1e-6)
        for name, tensor in {"x": x, **inputs}.items():
            with context(f"{name} was modified"):
                close(tensor, before[name], 0)
        return actual

    for name, gradient in with_gradients(run(x), module, x, computed).items():
        if name != "result":
            with context(f"gradient of {name}, for one of the result of seed 9"):
                compare(name, gradient, 10 * max(1, largest(exact[name])))
    with (
        context("after .eval(), under no_grad, for x at an odd offset in memory"),
        torch.no_grad(),
    ):
        module.eval()
        run(torch.cat((x[..., :1], x), dim=-1)[..., 1:])


def with_gradients(
    result: Tensor, module: nn.Module, x: Tensor, dtype: torch.dtype
) -> dict[str, Tensor]:
    inputs = {"x": x, **dict(module.named_parameters())}
    upstream = randn(*result.shape, seed=9, dtype=dtype).to(result.device, result.dtype)
    gradients = torch.autograd.grad(
        result, list(inputs.values()), upstream, materialize_grads=True
    )
    return {"result": result, **dict(zip(inputs, gradients, strict=True))}


@contextmanager
def compiled(module: nn.Module, fullgraph: bool = True) -> Iterator[tuple[Any, Any]]:
    """Yield the module, compiled to graphs of torch's operations, and their counter."""
    with warnings.catch_warnings(
        action="ignore", category=DeprecationWarning
    ):  # those of torch's own imports
        from torch._dynamo.testing import CompileCounter

        counter = CompileCounter()
        torch._dynamo.reset()
        yield torch.compile(module, fullgraph=fullgraph, backend=counter), counter
    torch._dynamo.reset()


def compiles(cases: list[Case]) -> None:
    for case in representative(cases):
        module = case.module(torch.float32)
        with (
            context(f"torch.compile of {case}", torch.float32),
            compiled(module) as (run, counter),
        ):
            for length in (5, 8, 1, 13):
                x = randn(*case.shape[:-2], length, case.shape[-1], dtype=torch.float32)
                mask = (torch.arange(length) >= 2).expand(length, length)
                inputs = {"token_positions": torch.arange(length) + 3, "mask": mask}
                inputs = {name: inputs[name] for name in case.inputs}
                with context(f"with {length} tokens"):
                    expected = module(x, **inputs)
                    close(run(x, **inputs), expected, 1e-5 * largest(expected))
            if counter.frame_count > 3:
                raise Violation(
                    f"{counter.frame_count} graphs for 5, 8, 1 and 13 tokens, expected 3: 5, any number, 1"
                )


def is_placed(cases: list[Case]) -> None:
    """Build parameters and tables on a device, and parameters of a dtype. Boolean tables may be anywhere."""
    for case in cases:
        options = {"device": "meta"} | (
            {"dtype": torch.bfloat16} if [*case.build().parameters()] else {}
        )
        require_parameters(case.cls, *options)
        with context(case, f"built with {options}"):
            module = case.build(**options)
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
                is_cast = tensor.dtype == torch.bfloat16 or not isinstance(
                    tensor, nn.Parameter
                )
                if not ((is_cast and tensor.is_meta) or tensor.dtype == torch.bool):
                    raise Violation(f"{name} is of {tensor.dtype} on {tensor.device}")


def names_its_weights(cases: list[Case]) -> None:
    """Have the keys that the formula reads, and no others."""
    for case in [case for case in cases if math.prod(case.shape)]:
        with context(case):
            state = {
                key: weight.requires_grad_()
                for key, weight in case.module().state_dict().items()
            }
            result = case.formula(case.x().requires_grad_(), state, **case.inputs).sum()
            used = (
                torch.autograd.grad(result, [*state.values()], allow_unused=True)
                if state
                else []
            )
            for key, gradient in zip(state, used, strict=True):
                if gradient is None:
                    raise Violation(f"the state dict has an unexpected {key}")


EVERY_LAYER: dict[str, Check] = {
    "keys of the state dict": names_its_weights,
    "equation and gradients in float64": lambda cases: matches_equation(
        cases, torch.float64
    ),
    "equation and gradients in float32": lambda cases: matches_equation(
        cases, torch.float32
    ),
    "equation and gradients in bfloat16 and float16": lambda cases: matches_equation(
        cases, *HALVES
    ),
    "equation and gradients on CUDA": lambda cases: matches_equation(cases, how=CUDA),
    "autocast": lambda cases: matches_equation(cases, torch.float32, how=AUTOCAST),
    "activation checkpointing": lambda cases: matches_equation(
        representative(cases), torch.float32, how=RECOMPUTED
    ),
    "compiles to one graph": compiles,
    "device and dtype": is_placed,
}


def draws_weights(cls: Any, *arguments: Any, **options: Any) -> None:
    """Draw gains of 1, and other weights from a normal of variance 2 / (d_in + d_out), cut at three sigma."""
    options = supported(cls, options)
    torch.manual_seed(0)
    module = cls(*arguments, **options)
    for how in ("as constructed", "after reset_parameters"):
        for name, parameter in module.named_parameters():
            weight, shape = parameter.detach().double(), tuple(parameter.shape)
            with context(
                show_call(cls, arguments, options),
                "torch.manual_seed(0)",
                how,
                f"{name} of shape {shape}",
            ):
                if weight.ndim == 1:
                    close(weight, torch.ones_like(weight), 0)
                    continue
                # Cut at 3, a normal has a variance of 0.97333 and a kurtosis of 2.83. Five standard errors:
                unit, error = (
                    weight / math.sqrt(2 / sum(shape)),
                    5 / math.sqrt(weight.numel()),
                )
                close(unit.mean(), torch.tensor(0.0), error)
                close(unit.std(), torch.tensor(0.98658), 0.67 * error)
                close(unit.abs().clamp(min=3), torch.full(shape, 3.0), 1e-6)
        for parameter in module.parameters():
            parameter.data.fill_(math.nan)
        Layer(module).reset_parameters()


def rejects(cls: Any, valid: Mapping[str, Any], **invalid: tuple[Any, ...]) -> None:
    """Reject each of the invalid values, in place of the valid one, with the value in the message."""
    for name, values in supported(cls, invalid).items():
        for value in values:
            arguments = {**valid, name: value}
            with context(show_call(cls, (), arguments)), rejected(value):
                cls(**arguments)


def rejects_inputs(
    module: nn.Module,
    named: Any,
    x: Tensor,
    *others: Mapping[str, Tensor],
    by_torch: bool = False,
) -> None:
    """Reject inputs with a value in the message, also in a compiled module, unless torch's own error comes first."""
    errors = (RuntimeError, IndexError, ValueError) if by_torch else (ValueError,)
    with compiled(module, fullgraph=False) as (run, _):
        for inputs in others:
            require_parameters(module.forward, *inputs)
            what = [
                f"{name} {show(tensor)} of {tensor.dtype}"
                for name, tensor in {"x": x, **inputs}.items()
            ]
            with context(f"{type(module).__name__}({module.extra_repr()})", *what):
                with rejected(named):
                    module(x, **inputs)
                with (
                    torch.no_grad(),
                    context("compiled"),
                    rejected(None if by_torch else named, errors),
                ):
                    run(x, **inputs)


@dataclass(frozen=True)
class Property:
    """A property of a layer, and the layers that are needed to check it, this one included."""

    layer: str
    name: str
    needs: tuple[str, ...]
    function: Callable[..., Any]
    check: Check | None = None

    def run(self, layers: Mapping[str, ModuleType]) -> None:
        """Check the layers, given by name; raise a Violation, or SkipTest if nothing can be checked."""
        MISSING.clear()
        if absent := [need for need in self.needs if need not in layers]:
            raise SkipTest(f"this folder has no {' and no '.join(absent)}")
        with torch.random.fork_rng(devices=()), torch.enable_grad(), context():
            cases = self.function(*(Layer(layers[need]) for need in self.needs))
            if self.check is not None:
                cases = [case for case in cases if case.is_supported()]
                if not cases:
                    raise SkipTest(" and ".join(sorted(MISSING)))
                self.check(cases)


PROPERTIES: list[Property] = []  # of the layers whose contracts were imported


def guarantees(
    what: str | Mapping[str, Check], of: str = ""
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a property that a function checks, or a group of properties of the cases that it returns.

    The parameters of the function name the layers that it needs. The properties belong to the first of them.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        needs = tuple(inspect.signature(function).parameters)
        for name, check in (
            {what: None}.items() if isinstance(what, str) else what.items()
        ):
            PROPERTIES.append(
                Property(
                    needs[0], f"{name} ({of})" if of else name, needs, function, check
                )
            )
        return function

    return register


def guarantees_function(
    layer: str,
    name: str,
    formula: Callable[..., Tensor],
    *calls: tuple[Any, ...],
    rounds_once: bool = False,
) -> None:
    """Register the formula of a function, for calls given by the shapes of their tensors and further arguments."""

    def case(function: Any, shapes: list[Shape], *more: Any) -> Case:
        def exact(x: Tensor, state: State) -> Tensor:
            return formula(x, *state.values(), *more)

        return Case(
            Call,
            (function, shapes[1:], *more),
            shapes[0],
            exact,
            rounds_once=rounds_once,
        )

    def cases(module: Layer) -> list[Case]:
        return [case(getattr(module, name), *call) for call in calls]

    PROPERTIES.append(
        Property(
            layer, f"{name}: equation and gradients", (layer,), cases, matches_equation
        )
    )
