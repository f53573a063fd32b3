"""The means to say what a layer promises: cases with formulas, what every layer promises, and how it is registered.

A property calls a layer with seeded inputs, and compares the result with the paper's formula or with that of another
call. Where it fails it raises a `Violation`, which names the call, the input, and the component that is furthest off.

An input "x of shape (2, 7, 24), seed 3" is `torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(3),
dtype=torch.float64)`, rounded to the dtype that is named. Weights of which nothing is said are those of `fill`.
"""

import copy
import functools
import inspect
import math
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

HALVES = (torch.bfloat16, torch.float16)
# The error that is allowed, as a part of the largest component.
ALLOWED = {torch.float64: 1e-12, torch.float32: 1e-6} | {half: 16 * torch.finfo(half).eps for half in HALVES}

Shape = tuple[int, ...]
State = Mapping[str, Tensor]


class Violation(AssertionError):
    """A layer does not do what it promises; the message says at which input, what came out, and what should."""


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def fill(module: nn.Module) -> nn.Module:
    """Draw weights that keep the length of a vector, and gains around 1, the n-th parameter from seed n."""
    for seed, parameter in enumerate(module.parameters()):
        gain = parameter.ndim == 1
        parameter.data.copy_(randn(*parameter.shape, seed=seed) / math.sqrt(parameter.shape[-1]) + gain)
    return module


def show(value: Any) -> str:
    if isinstance(value, Tensor):
        return str(value.tolist()) if value.numel() <= 20 else f"of shape {tuple(value.shape)}"
    return getattr(value, "__name__", None) or repr(value).partition("\n")[0]


def show_call(function: Any, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> str:
    return f"{function.__name__}({', '.join([*map(show, arguments), *(f'{k}={show(v)}' for k, v in options.items())])})"


@contextmanager
def given(*what: Any) -> Iterator[None]:
    """Put the input in front of whatever goes wrong with it, in one line."""
    said = "".join(f"{it}, " for it in what).removesuffix(", ") + ": " * bool(what)
    try:
        yield
    except SkipTest:
        raise
    except Violation as violation:
        raise Violation(f"{said}{violation}") from violation.__cause__
    except Exception as error:
        ours = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)]
        place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
        raise Violation(f"{said}{type(error).__name__}: {' '.join(str(error).split())[:400]}{place}") from error


@contextmanager
def refused(errors: tuple[type[Exception], ...] = (ValueError,), naming: str = "") -> Iterator[None]:
    """Expect one of these errors, with a message that names what could be given."""
    try:
        yield
    except errors as error:
        if naming not in str(error):
            raise Violation(f"was refused, but with {str(error)!r}, which does not name {naming}") from error
    else:
        raise Violation("was accepted, expected an error")


def largest(tensor: Tensor) -> float:
    return tensor.detach().abs().max().item() if tensor.numel() else 0.0


def close(actual: Tensor, expected: Tensor, allowed: float | Tensor, dtype: torch.dtype | None = None) -> None:
    """Raise a Violation that shows the worst component, unless every absolute error is allowed."""
    if actual.shape != expected.shape:
        raise Violation(f"got shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
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


def close_on_average(actual: Tensor, exact: Tensor, roundings: int, dtype: torch.dtype, least: float = 0.0) -> None:
    """Raise a Violation unless the root mean square error is that of so many roundings to a half.

    One is off by up to u = eps/2 of a value, by u / sqrt(3) on average, and independent ones add up in squares. Four
    times that leaves room for what enlarges errors. `least` is the size of the terms, where they cancel out.
    """
    if exact.numel():
        error, wanted = ((t.detach().double() ** 2).mean().sqrt() for t in (actual.cpu().double() - exact, exact))
        allowed = 4 * math.sqrt(roundings / 3) * torch.finfo(dtype).eps / 2 * max(least, wanted.item())
        if not error <= allowed:
            raise Violation(f"root mean square error {error:.1e} of values of {wanted:.1e}; allowed {allowed:.1e}")


def half_ulp(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the error of one rounding, and 2% of it for what float32 lost before."""
    info = torch.finfo(dtype)
    return 0.51 * info.eps * 2.0 ** exact.detach().abs().clamp(min=info.smallest_normal).log2().floor()


# A copy may have dropped what it does not need; the properties of that are skipped.


def public(layer: ModuleType, name: str) -> Any:
    if not hasattr(layer, name):
        raise SkipTest(f"{name} is not in this copy")
    return getattr(layer, name)


def accepted(function: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    takes_any = any(it.kind is it.VAR_KEYWORD for it in parameters.values())
    return {name: value for name, value in options.items() if takes_any or name in parameters}


def dropped(function: Any, *names: str) -> str:
    """Say which of the parameters a copy has dropped, if any."""
    absent = [name for name in names if not accepted(function, {name: None})]
    return f"{function.__qualname__} has no {' and no '.join(absent)} in this copy" if absent else ""


def require(function: Any, *names: str) -> None:
    if said := dropped(function, *names):
        raise SkipTest(said)


@dataclass(frozen=True)
class Case:
    """A layer to be made, an input for it, and the formula (x, state dict, **inputs) of what comes out."""

    cls: Any
    arguments: tuple[Any, ...]
    shape: Shape
    formula: Callable[..., Tensor]
    options: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, Tensor] = field(default_factory=dict)  # token_positions, mask
    scale: float = 1.0
    compiled: bool = False
    rounds_once: bool = False
    roundings: int = 1  # of a half, one after another or side by side, on the way to the result
    dtypes: tuple[torch.dtype, ...] = tuple(ALLOWED)

    def dropped(self) -> str:
        return dropped(self.cls, *self.options) or dropped(self.cls.forward, *self.inputs)

    def module(self, dtype: torch.dtype = torch.float64) -> Any:
        return fill(self.cls(*self.arguments, **copy.deepcopy(dict(self.options))).to(dtype))  # with a rope of its own

    def x(self, dtype: torch.dtype = torch.float64) -> Tensor:
        return (randn(*self.shape) * self.scale).to(dtype)

    def exact(self, module: nn.Module, x: Tensor) -> Tensor:
        state = {key: weight.double() for key, weight in module.state_dict(keep_vars=True).items()}
        return self.formula(x.double(), state, **self.inputs)

    def __str__(self) -> str:
        made = show_call(self.cls, self.arguments, self.options)
        scaled = "" if self.scale == 1 else f" * {self.scale}"
        inputs = "".join(f", {name} {show(tensor)}" for name, tensor in self.inputs.items())
        return f"{made} of x of shape {self.shape}, seed 0{scaled}{inputs}"


class Call(nn.Module):
    """A function as a layer, whose weights are the function's further arguments."""

    def __init__(self, function: Callable[..., Tensor], shapes: list[Shape], *more: Any) -> None:
        super().__init__()
        self.function, self.more = function, more
        self.weights = nn.ParameterList([torch.empty(shape) for shape in shapes])

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.weights, *self.more)


def function_follows(function: Any, formula: Any, calls: list[tuple[Any, ...]], **about: Any) -> None:
    """Compare a function with its formula; a call is given by the shapes of its tensors, and what else it takes."""
    for (shape, *shapes), *more in calls:
        exact = functools.partial(lambda x, state, more: formula(x, *state.values(), *more), more=more)
        follows([Case(Call, (function, shapes, *more), shape, exact, **about)])


# What every layer promises.


def follows(cases: list[Case], *dtypes: torch.dtype, device: str = "cpu", autocast: bool = False) -> None:
    """Compare layers with their formulas: value, dtype and gradients; and see that they modify no input."""
    if device == "cuda" and not torch.cuda.is_available():
        raise SkipTest("no CUDA here")
    how = [f"on {device}"] * (device != "cpu") + ["torch.autocast('cpu', torch.bfloat16)"] * autocast
    for case, dtype in product(cases, dtypes or ALLOWED):
        if dtype in case.dtypes:
            with given(case, dtype, *how):
                _follows(case, dtype, device, autocast)


def _follows(case: Case, dtype: torch.dtype, device: str, autocast: bool) -> None:
    # Under autocast the weights and inputs are rounded besides.
    computed, roundings = (torch.bfloat16, 3 * case.roundings) if autocast else (dtype, case.roundings)
    allowed = ALLOWED[computed] * (1 if device == "cpu" or dtype in HALVES else 10)
    once = case.rounds_once and dtype in HALVES and device == "cpu"
    module, x = case.module(dtype), case.x(dtype).requires_grad_()
    exact = case.exact(module, x)
    upstream = randn(*exact.shape, seed=9, dtype=computed)
    wanted = gradients(exact, module, x, upstream)
    before = {"x": x.detach().clone(), **case.inputs}
    module, inputs = module.to(device), {name: tensor.to(device, copy=True) for name, tensor in before.items()}
    x = inputs.pop("x").requires_grad_()

    def run() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            actual = module(x, **inputs)
        bound = half_ulp(exact, dtype) + 1e-6 if once else allowed * largest(exact)
        close(actual, exact, bound, None if autocast else dtype)
        if computed in HALVES:
            close_on_average(actual, exact, roundings, computed)
        for name, tensor in {"x": x, **inputs}.items():
            with given(f"{name} was modified"):
                close(tensor, before[name], 0)
        return actual

    # On the way back each product has two, and both factors were rounded: three times the roundings of the result. What
    # the scores of attention get is a difference of terms that are as large as the gradient of the result, of size 1.
    for name, gradient in gradients(run(), module, x, upstream).items():
        with given(f"gradient of {name}, for one of the result of seed 9"):
            if computed in HALVES:
                close_on_average(gradient, wanted[name], 3 * roundings, computed, least=1.0)
            close(gradient, wanted[name], 10 * allowed * max(1, largest(wanted[name])))
    with given("after .eval(), under no_grad"), torch.no_grad():
        module.eval()
        run()


def gradients(result: Tensor, module: nn.Module, x: Tensor, upstream: Tensor) -> dict[str, Tensor]:
    inputs = {"x": x, **dict(module.named_parameters())}
    upstream = upstream.to(result.device, result.dtype)
    found = torch.autograd.grad(result, list(inputs.values()), upstream, materialize_grads=True)
    return dict(zip(inputs, found, strict=True))


def autocasts(cases: list[Case]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        follows([case for case in cases if case.scale == 1], torch.float32, autocast=True)


@contextmanager
def compiled(module: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Yield the module, compiled as far as graphs of torch's operations, and their counter."""
    with warnings.catch_warnings():  # those of torch's own imports
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch._dynamo.testing import CompileCounter

        counter = CompileCounter()
        torch._dynamo.reset()
        yield torch.compile(module, fullgraph=True, backend=counter), counter
    torch._dynamo.reset()


def compiles(cases: list[Case]) -> None:
    for case in [case for case in cases if case.compiled] or cases[:1]:
        module = case.module(torch.float32)
        with given(f"torch.compile of {case}", torch.float32), compiled(module) as (run, counter):
            for length in (5, 8, 1, 13):
                x = randn(*case.shape[:-2], length, case.shape[-1], dtype=torch.float32)
                mask = (torch.arange(length) >= 2).expand(length, length)
                inputs = {"token_positions": torch.arange(length) + 3, "mask": mask}
                inputs = {name: inputs[name] for name in case.inputs}
                with given(f"with {length} tokens"):
                    expected = module(x, **inputs)
                    close(run(x, **inputs), expected, 1e-5 * largest(expected))
            if counter.frame_count > 3:
                raise Violation(f"{counter.frame_count} graphs for 5, 8, 1 and 13 tokens, expected 3: 5, any number, 1")


def places_parameters(cases: list[Case]) -> None:
    options = {"device": "meta", "dtype": torch.bfloat16}
    for case in cases:
        require(case.cls, *options)
        with given(case, "made with device='meta', dtype=torch.bfloat16"):
            for name, it in case.cls(*case.arguments, **case.options, **options).named_parameters():
                if (it.device.type, it.dtype) != ("meta", torch.bfloat16):
                    raise Violation(f"{name} is of {it.dtype} on {it.device}")


EVERY_LAYER: dict[str, Callable[[list[Case]], None]] = {
    "equation and gradients in float64": lambda cases: follows(cases, torch.float64),
    "equation and gradients in float32": lambda cases: follows(cases, torch.float32),
    "equation and gradients in bfloat16 and float16": lambda cases: follows(cases, *HALVES),
    "equation and gradients on CUDA": lambda cases: follows(cases, device="cuda"),
    "autocast": autocasts,
    "compiles to one graph": compiles,
}
WITH_WEIGHTS = EVERY_LAYER | {"device and dtype of the parameters": places_parameters}


def draws_weights(cls: Any, *arguments: Any, **options: Any) -> None:
    """Draw gains of 1, and other weights from a normal of variance 2 / (d_in + d_out), cut at three sigma."""
    options = accepted(cls, options)
    torch.manual_seed(0)
    module = cls(*arguments, **options)
    for how in ("when it was made", "after reset_parameters"):
        for name, parameter in module.named_parameters():
            weight, shape = parameter.detach().double(), tuple(parameter.shape)
            with given(show_call(cls, arguments, options), "torch.manual_seed(0)", how, f"{name} of shape {shape}"):
                if weight.ndim == 1:
                    close(weight, torch.ones_like(weight), 0)
                    continue
                # Cut at 3, a normal has a variance of 0.97333 and a kurtosis of 2.83. Five standard errors:
                unit, error = weight / math.sqrt(2 / sum(shape)), 5 / math.sqrt(weight.numel())
                close(unit.mean(), torch.tensor(0.0), error)
                close(unit.std(), torch.tensor(0.98658), 0.67 * error)
                close(unit.abs().clamp(min=3), torch.full(shape, 3.0), 1e-6)
        if not hasattr(module, "reset_parameters"):
            return
        for parameter in module.parameters():
            parameter.data.fill_(math.nan)
        module.reset_parameters()


def refuses(cls: Any, *calls: tuple[Any, ...], **options: Any) -> None:
    """Refuse each of the calls; a dictionary at the end of one is of options, beside those of all."""
    for call in calls:
        arguments, named = (call[:-1], options | call[-1]) if isinstance(call[-1], dict) else (call, options)
        if accepted(cls, named) == named:
            with given(show_call(cls, arguments, named)), refused():
                cls(*arguments, **named)


def has_state(cls: Any, arguments: tuple[Any, ...], expected: Mapping[str, Shape], **options: Any) -> None:
    with given(show_call(cls, arguments, options)):
        state = {key: tuple(tensor.shape) for key, tensor in cls(*arguments, **options).state_dict().items()}
        if state != expected:
            wrong, wanted = dict(state.items() - expected.items()), dict(expected.items() - state.items())
            raise Violation(f"got {wrong}, expected {wanted}")


@dataclass(frozen=True)
class Property:
    """Something that a layer promises, and the layers that are needed to check it, this one among them."""

    layer: str
    name: str
    needs: tuple[str, ...]
    check: Callable[..., None]

    def run(self, layers: Mapping[str, ModuleType]) -> None:
        """Check the layers, given by their names; raise a Violation, or unittest.SkipTest where something is absent."""
        if absent := [need for need in self.needs if need not in layers]:
            raise SkipTest(f"it needs {' and '.join(absent)} in this folder too")
        with torch.random.fork_rng(devices=()), torch.enable_grad(), given():
            self.check(*(layers[need] for need in self.needs))


PROPERTIES: list[Property] = []  # of the promise files that were imported


def promises(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a property, which needs the layers by which the parameters are named, and belongs to the first."""

    def register(check: Callable[..., Any]) -> Callable[..., Any]:
        needs = tuple(inspect.signature(check).parameters)
        PROPERTIES.append(Property(needs[0], name, needs, check))
        return check

    return register


def promises_all(group: Mapping[str, Callable[[list[Case]], None]], of: str = "") -> Callable[..., Any]:
    """Register the properties of the group, for the cases that a function returns, but those of what a copy dropped."""

    def register(make_cases: Callable[..., list[Case]]) -> Callable[..., list[Case]]:
        def run(check: Callable[[list[Case]], None], *layers: ModuleType) -> None:
            cases = make_cases(*layers)
            if not (fitting := [case for case in cases if not case.dropped()]):
                raise SkipTest(cases[0].dropped())
            check(fitting)

        needs = tuple(inspect.signature(make_cases).parameters)
        for name, check in group.items():
            named = f"{name} ({of})" if of else name
            PROPERTIES.append(Property(needs[0], named, needs, functools.partial(run, check)))
        return make_cases

    return register
