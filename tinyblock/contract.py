"""The behavioural contract: what a copy of a layer must still compute, however it was edited.

A property is a check that calls a layer with seeded inputs and compares what comes out with the paper's formula, or
with what another call gives. One that fails raises a `Violation`, which names the call, the input and the component
that is furthest off. tinyblock's own tests and `tinyblock verify` run these properties; so does test_contract.py
beside a copy. Nothing but torch is imported, so that this file can be copied as well.

An input written "x of shape (2, 7, 24), seed 3" is `torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(3),
dtype=torch.float64)`, rounded to the dtype that is named. Weights are drawn alike (see `fill`).
"""

import ast
import copy
import functools
import importlib
import inspect
import itertools
import math
import os
import pickle
import re
import sys
import textwrap
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import SkipTest

import torch
from torch import Tensor, nn

__all__ = ["LAYERS", "PROPERTIES", "Property", "Violation", "load"]

LAYERS = {
    "rmsnorm": ("RMSNorm", "rms_norm"),
    "ffn": ("SwiGLU", "FeedForward", "swiglu", "feed_forward"),
    "rope": ("RotaryPositionalEmbedding", "apply_rope"),
    "attention": ("CausalMultiHeadSelfAttention", "scaled_dot_product_attention"),
    "block": ("Block",),
    "transformer": ("Transformer",),
}
EPS = 1e-5
ALLOWED = {  # errors relative to the largest component
    torch.float64: 1e-12,
    torch.float32: 1e-6,
    torch.bfloat16: 16 * torch.finfo(torch.bfloat16).eps,
    torch.float16: 16 * torch.finfo(torch.float16).eps,
}
HALVES = (torch.bfloat16, torch.float16)

State = Mapping[str, Tensor]


# The papers' formulas, in float64, with loops and complex numbers: as unlike the layers as can be.


def rms_norm(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    return x / ((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps) ** 0.5 * weight


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + (-x).exp())


def silu(x: Tensor) -> Tensor:
    return x * sigmoid(x)


def gelu(x: Tensor) -> Tensor:
    return x / 2 * (1 + (x / math.sqrt(2)).erf())


def glu(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    return sigmoid(x @ w1.T) * (x @ w2.T)


def swiglu(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    return (silu(x @ w1.T) * (x @ w3.T)) @ w2.T


def feed_forward(x: Tensor, w1: Tensor, w2: Tensor, activation: Callable[[Tensor], Tensor] = gelu) -> Tensor:
    return activation(x @ w1.T) @ w2.T


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Multiply consecutive pairs, as complex numbers, by exp(i angle)."""
    d_k = x.shape[-1]
    frequencies = torch.tensor([theta ** (-2 * k / d_k) for k in range(d_k // 2)], dtype=torch.float64)
    turned = torch.complex(x[..., 0::2], x[..., 1::2]) * torch.exp(1j * (positions[..., None] * frequencies))
    return torch.stack((turned.real, turned.imag), dim=-1).flatten(-2)


def attend(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    """Attend with one softmax per query; a query that may attend to no key yields zeros."""
    rows = []
    for index in itertools.product(*map(range, q.shape[:-1])):
        batch, keys = index[:-1], allowed[index]
        if keys.any():
            scores = (k[batch][keys] @ q[index] / math.sqrt(q.shape[-1])).exp()
            rows.append(scores / scores.sum() @ v[batch][keys])
        else:
            rows.append(v.new_zeros(v.shape[-1]))
    return torch.stack(rows or [v.new_zeros(v.shape[-1])])[: len(rows)].reshape(*q.shape[:-1], v.shape[-1])


def self_attention(
    x: Tensor,
    state: State,
    positions: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    heads: int,
    theta: float | None = None,
) -> Tensor:
    """Attend causally, one head at a time, with the weights of a layer's state dict."""
    *batch, seq, _ = x.shape
    positions = torch.arange(seq) if positions is None else positions
    allowed = torch.ones(seq, seq, dtype=torch.bool).tril() & (True if mask is None else mask)
    d_head = state["q_proj.weight"].shape[0] // heads
    group = heads // (state["k_proj.weight"].shape[0] // d_head)
    outputs = []
    for head in range(heads):
        rows = {"q": head, "k": head // group, "v": head // group}
        q, k, v = (x @ state[f"{n}_proj.weight"][row * d_head : (row + 1) * d_head].T for n, row in rows.items())
        if "q_norm.weight" in state:
            q, k = rms_norm(q, state["q_norm.weight"]), rms_norm(k, state["k_norm.weight"])
        if theta is not None:
            q, k = rotate(q, positions, theta), rotate(k, positions, theta)
        outputs.append(attend(q, k, v, allowed.expand(*batch, seq, seq)))
    return torch.cat(outputs, dim=-1) @ state["output_proj.weight"].T


def pre_norm_block(x: Tensor, state: State, *positions_and_mask: Tensor | None, **options: Any) -> Tensor:
    """Apply the pre-norm block: SwiGLU where the state has a w3, the GELU layer of CS336 2024 where it has none."""
    normed = rms_norm(x, state["ln1.weight"])
    x = x + self_attention(normed, below(state, "attn."), *positions_and_mask, **options)
    weights: list[Any] = [state[key] for key in ("ffn.w1.weight", "ffn.w2.weight", "ffn.w3.weight") if key in state]
    return x + (swiglu if len(weights) == 3 else feed_forward)(rms_norm(x, state["ln2.weight"]), *weights)


def stack(x: Tensor, state: State, *positions_and_mask: Tensor | None, **options: Any) -> Tensor:
    for layer in itertools.count():
        weights = below(state, f"layers.{layer}.")
        if not weights:
            return rms_norm(x, state["ln_final.weight"])
        x = pre_norm_block(x, weights, *positions_and_mask, **options)
    raise AssertionError


def below(state: State, prefix: str) -> State:
    return {key.removeprefix(prefix): weight for key, weight in state.items() if key.startswith(prefix)}


# Inputs, and what is said of them when a property fails.


class Violation(AssertionError):
    """A copy does not do what its layer promises; the message says at which input, what came out and what should."""


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def fill(module: nn.Module) -> nn.Module:
    """Draw weights of the size that keeps a vector's length, and gains around 1, each from a seed of its own."""
    for seed, parameter in enumerate(module.parameters()):
        weight = randn(*parameter.shape, seed=seed) / math.sqrt(parameter.shape[-1]) + (parameter.ndim == 1)
        parameter.data.copy_(weight)
    return module


def show(value: Any) -> str:
    if isinstance(value, Tensor):
        return textwrap.shorten(str(value.int().tolist()), 100, placeholder=" ...")
    return getattr(value, "__name__", None) or repr(value).partition("\n")[0]


def called(cls: Any, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> str:
    return f"{cls.__name__}({', '.join([*map(show, arguments), *(f'{k}={show(v)}' for k, v in options.items())])})"


@contextmanager
def given(*what: Any) -> Iterator[None]:
    """Put the input in front of whatever goes wrong with it."""
    try:
        yield
    except SkipTest:
        raise
    except Violation as violation:
        raise Violation(f"{', '.join(map(str, what))}: {violation}") from violation.__cause__
    except Exception as error:
        raise Violation(f"{', '.join(map(str, what))}: {explain(error)}") from error


@contextmanager
def refused() -> Iterator[None]:
    try:
        yield
    except ValueError:
        return
    raise Violation("was accepted, expected a ValueError")


def explain(error: BaseException) -> str:
    """Return an exception in one line, with the place in the copy that it comes from."""
    inside = (os.path.dirname(torch.__file__), __file__)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(inside)]
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {textwrap.shorten(str(error), 400, placeholder=' ...')}{place}"


def close(actual: Any, expected: Tensor, allowed: float | Tensor) -> None:
    """Raise a Violation that shows the worst component, unless every absolute error is allowed."""
    if not isinstance(actual, Tensor) or actual.shape != expected.shape:
        got = f"shape {tuple(actual.shape)}" if isinstance(actual, Tensor) else f"a {type(actual).__name__}"
        raise Violation(f"got {got}, expected shape {tuple(expected.shape)}")
    have, exact = actual.detach().double(), expected.detach().double()
    error = (have - exact).abs().masked_fill((have == exact) | (have.isnan() & exact.isnan()), 0).nan_to_num(math.inf)
    excess = error - allowed
    if excess.numel() and excess.max() > 0:
        at = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
        bound = torch.as_tensor(allowed).expand_as(error)[at]
        raise Violation(
            f"largest error {error[at]:.1e} at {list(at)}: got {have[at]:.9g}, expected {exact[at]:.9g}; "
            f"allowed {bound:.1e}"
        )


def scale(tensor: Tensor) -> float:
    return tensor.detach().abs().max().item() if tensor.numel() else 0.0


def half_ulp(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the error of one rounding, and a hundredth of it for what was computed in float32 before."""
    info = torch.finfo(dtype)
    return 0.51 * info.eps * 2.0 ** exact.abs().clamp(min=info.smallest_normal).log2().floor()


def has_dtype(actual: Tensor, dtype: torch.dtype) -> None:
    if actual.dtype != dtype:
        raise Violation(f"got a result of {actual.dtype}, expected {dtype}")


def public(layer: ModuleType, name: str) -> Any:
    """Return what a copy may have dropped; without it, the property is skipped."""
    if not hasattr(layer, name):
        raise SkipTest(f"{name} is not in this copy")
    return getattr(layer, name)


def make(cls: Any, *arguments: Any, **options: Any) -> Any:
    with given(called(cls, arguments, options)):
        return cls(*arguments, **options)


@dataclass(frozen=True)
class Case:
    """A layer to be built, an input for it, and the formula (x, state dict, *rest) of what comes out."""

    cls: Any
    arguments: tuple[Any, ...]
    shape: tuple[int, ...]
    formula: Callable[..., Tensor]
    options: Mapping[str, Any] = field(default_factory=dict)
    rest: tuple[Tensor | None, ...] = ()  # token_positions, mask
    seed: int = 0
    scale: float = 1.0
    compiled: bool = False

    def build(self, dtype: torch.dtype = torch.float64) -> Any:
        options = copy.deepcopy(dict(self.options))  # a rope of its own
        if "dtype" in inspect.signature(self.cls).parameters:
            options["dtype"] = dtype
        return fill(make(self.cls, *self.arguments, **options))

    def x(self, dtype: torch.dtype = torch.float64) -> Tensor:
        return (randn(*self.shape, seed=self.seed) * self.scale).to(dtype)

    def exact(self, module: nn.Module, x: Tensor) -> Tensor:
        state = {key: weight.double() for key, weight in module.state_dict(keep_vars=True).items()}
        try:
            return self.formula(x.double(), state, *self.rest)
        except KeyError as error:
            raise Violation(f"no {error} in the state dict, which has {', '.join(state)}") from None

    def __str__(self) -> str:
        made, scaled = called(self.cls, self.arguments, self.options), "" if self.scale == 1 else f" times {self.scale}"
        rest = [
            f"; {n} {show(t)}" for n, t in zip(("token_positions", "mask"), self.rest, strict=False) if t is not None
        ]
        return f"{made} of x of shape {self.shape}, seed {self.seed}{scaled}{''.join(rest)}"


# The properties that every layer has.


def follows(cases: list[Case], *dtypes: torch.dtype) -> None:
    for case, dtype in itertools.product(cases, dtypes):
        with given(case, dtype):
            module, x = case.build(dtype), case.x(dtype)
            actual, exact = module(x, *case.rest), case.exact(module, x)
            has_dtype(actual, dtype)
            close(actual, exact, ALLOWED[dtype] * scale(exact))


def differentiates(cases: list[Case]) -> None:
    # Of an empty batch, some gradients are zeros that autograd need not return.
    grad = functools.partial(torch.autograd.grad, materialize_grads=True)
    for case, dtype in itertools.product(cases, ALLOWED):
        with given(f"gradients of {case}", dtype):
            module, mine, exact = case.build(dtype), case.x(dtype).requires_grad_(), case.x(dtype).requires_grad_()
            upstream = randn(*case.shape, seed=9, dtype=dtype)
            parameters = dict(module.named_parameters())
            wanted = grad(case.exact(module, exact), [exact, *parameters.values()], upstream.double())
            actual = grad(module(mine, *case.rest), [mine, *parameters.values()], upstream)
            for name, got, want in zip(["x", *parameters], actual, wanted, strict=True):
                with given(f"that of {name}"):
                    close(got, want, 10 * ALLOWED[dtype] * max(1, scale(want)))


def gradcheck(function: Callable[..., Tensor], *inputs: Tensor) -> None:
    torch.autograd.gradcheck(function, tuple(tensor.clone().requires_grad_() for tensor in inputs))


def leaves_alone(cases: list[Case]) -> None:
    for case, dtype in itertools.product(cases, ALLOWED):
        with given(case, dtype), torch.no_grad():
            module, x = case.build(dtype), case.x(dtype)
            touched = {
                "x": x,
                "token_positions": None,
                "mask": None,
                **module.state_dict(),
                **dict(module.named_buffers()),
            }
            touched |= dict(zip(("token_positions", "mask"), case.rest, strict=False))
            before = {name: tensor.clone() for name, tensor in touched.items() if tensor is not None}
            first = module(x, *case.rest)
            for name, tensor in before.items():
                with given(f"{name} was modified"):
                    close(touched[name], tensor, 0)
            with given("the same call again"):
                close(module(x, *case.rest), first, 0)


@contextmanager
def compiled(module: nn.Module) -> Iterator[tuple[Any, list[Any]]]:
    """Yield the compiled module and the list of its graphs; leave no compiled code behind."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    with warnings.catch_warnings():  # those of torch's own imports
        warnings.simplefilter("ignore", DeprecationWarning)
        yield torch.compile(module, fullgraph=True, backend=backend), graphs
    torch._dynamo.reset()


def compiles(cases: list[Case]) -> None:
    lengths = (5, 8, 1, 13)
    for case in filter(lambda case: case.compiled, cases):
        module = case.build(torch.float32)
        with given(f"torch.compile of {case}", torch.float32), compiled(module) as (run, graphs):
            for length in lengths:
                x = randn(*case.shape[:-2], length, case.shape[-1], seed=length, dtype=torch.float32)
                mask = torch.ones(length, length, dtype=torch.bool)
                mask[:, :2] = False
                new = torch.arange(length) + 3, mask
                rest = [None if old is None else tensor for old, tensor in zip(case.rest, new, strict=False)]
                with given(f"with {length} tokens"):
                    expected = module(x, *rest)
                    close(run(x, *rest), expected, 1e-5 * scale(expected))
            if len(graphs) > 3:  # of the first length, of any length, of one token
                raise Violation(
                    f"{len(graphs)} graphs for sequences of {lengths}, expected 3: one for all but the first"
                )


LAYER = {
    "equation in float64": lambda cases: follows(cases, torch.float64),
    "equation in float32 to 1e-6": lambda cases: follows(cases, torch.float32),
    "equation in bfloat16 and float16": lambda cases: follows(cases, *HALVES),
    "gradients": differentiates,
    "inputs not modified": leaves_alone,
    "compiles to one graph": compiles,
}


# The properties of layers along a sequence.


def is_causal(cases: list[Case]) -> None:
    for case in (case for case in cases if case.shape[-2] > 4 and None in case.rest[-1:]):
        module, x = case.build(), case.x()
        with given(f"{case}, with other tokens from the 4th on"):
            later = x.clone()
            later[..., 3:, :] = randn(*later[..., 3:, :].shape, seed=7)
            expected, changed = module(x, *case.rest), module(later, *case.rest)
            close(changed[..., :3, :], expected[..., :3, :], ALLOWED[torch.float64] * scale(expected))
        with given(f"{case}, with another first token"):
            earlier = x.clone()
            earlier[..., 0, :] = randn(*earlier[..., 0, :].shape, seed=7)
            differs(module(earlier, *case.rest), expected)


def differs(actual: Tensor, expected: Tensor) -> None:
    same = (actual - expected).abs().amax(-1) <= 1e-9
    if same.any():
        raise Violation(f"the result of token {same.nonzero()[0].tolist()} is the same, expected a change")


def prefills(cases: list[Case]) -> None:
    for case in cases:
        module, x, whole = case.build(), case.x(), None
        for length in range(x.shape[-2], 0, -1):
            with given(f"{case}, the first {length} tokens alone"):
                positions, mask = (*case.rest, None, None)[:2]
                rest = [positions if positions is None else positions[..., :length]]
                rest += [mask if mask is None else mask[..., :length, :length]]
                prefix = module(x[..., :length, :], *rest)
                whole = prefix if whole is None else whole
                close(prefix, whole[..., :length, :], ALLOWED[torch.float64] * scale(whole))


def masks(cases: list[Case]) -> None:
    for case in (case for case in cases if case.shape[-2] > 4 and None in case.rest[-1:]):
        module, x, seq, positions = case.build(), case.x(), case.shape[-2], case.rest[:-1]
        expected, allowed = module(x, *case.rest), ALLOWED[torch.float64]
        with given(f"{case}, with a mask that is True everywhere"):
            everything = torch.ones(seq, seq, dtype=torch.bool)
            close(module(x, *positions, everything), expected, allowed * scale(expected))
        with given(f"{case}, with a mask (1, seq) that hides the first 2 keys, and these exchanged"):
            keep = torch.arange(seq)[None] >= 2
            other = x.clone()
            other[..., :2, :] = randn(*other[..., :2, :].shape, seed=8)
            masked, changed = module(x, *positions, keep), module(other, *positions, keep)
            close(changed[..., 2:, :], masked[..., 2:, :], allowed * scale(masked))
            differs(masked[..., 2:, :], expected[..., 2:, :])


SEQUENCE = {
    "later tokens change nothing before them": is_causal,
    "prefill against one-shot": prefills,
    "mask narrows causality, and cannot lift it": masks,
}


def is_relative(cases: list[Case]) -> None:
    case = cases[0]
    module, x, ahead = case.build(), case.x(), torch.arange(case.shape[-2])
    expected = module(x)
    with given(f"{case}, with token_positions 150 further on"):
        close(module(x, ahead + 150), expected, 10 * ALLOWED[torch.float64] * scale(expected))
    with given(f"{case}, with token_positions twice as far apart"):
        differs(module(x, 2 * ahead)[..., 2:, :], expected[..., 2:, :])


def marks_positions(cases: list[Case], spreads: bool = False) -> None:
    """Positions off the table are refused; where they cannot be read, their tokens are NaN (in a stack, others too)."""
    case = cases[0]
    module, x = case.build(torch.float32), case.x(torch.float32)
    size = TABLE - 3
    positions = torch.arange(case.shape[-2]) + size
    with given(f"{case}, token_positions {show(positions)} of a table for {TABLE}"):
        with refused():
            module(x, positions)
        with given("compiled"), compiled(module) as (run, _):
            nan = run(x, positions).isnan().all(-1)
            outside = (positions >= TABLE).expand(nan.shape)
            close(nan & outside if spreads else nan, outside, 0)


ROTARY = {
    "relative positions only": is_relative,
    "positions off the table": marks_positions,
}
TABLE = 200  # positions in the tables below


# Registration: a property is a function whose parameters are the layers that it needs, its own first.


@dataclass(frozen=True)
class Property:
    """Something that a layer promises, checked with the modules that hold it and the layers it needs."""

    layer: str
    name: str
    needs: frozenset[str]
    check: Callable[..., None]

    def run(self, modules: Mapping[str, ModuleType]) -> None:
        """Check the modules, given by the names of their layers.

        Raises:
            Violation: the property does not hold.
            unittest.SkipTest: it is about a function or class that the copy does not have.
        """
        with torch.random.fork_rng(devices=()), given(self.layer):
            self.check(**{layer: modules[layer] for layer in self.needs})


_registered: list[Property] = []


def promises(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a check as the property of that name."""

    def register(check: Callable[..., None]) -> Callable[..., None]:
        needs = list(inspect.signature(check).parameters)
        _registered.append(Property(needs[0], name, frozenset(needs), check))
        return check

    return register


def cases(label: str, *groups: Mapping[str, Callable[[list[Case]], None]]) -> Callable[..., Any]:
    """Register every property of the groups for the cases that the function below returns."""

    def register(make_cases: Callable[..., list[Case]]) -> Callable[..., list[Case]]:
        for name, check in {name: check for group in groups for name, check in group.items()}.items():

            def of_cases(check: Callable[[list[Case]], None] = check, **modules: ModuleType) -> None:
                check(make_cases(**modules))

            needs = list(inspect.signature(make_cases).parameters)
            name = f"{name} ({label})" if label else name
            _registered.append(Property(needs[0], name, frozenset(needs), of_cases))
        return make_cases

    return register


def function_follows(
    function: Callable[..., Tensor],
    formula: Callable[..., Tensor],
    *shapes: tuple[int, ...],
    rest: tuple[Any, ...] = (),
) -> None:
    """Check a function of tensors of these shapes, in every dtype: value, dtype, inputs left alone, gradients."""
    for dtype, allowed in ALLOWED.items():
        with given(f"{function.__name__} of {', '.join(f'{s} seed {i}' for i, s in enumerate(shapes))}", dtype):
            inputs = [randn(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]
            actual = function(*inputs, *rest)
            for seed, (tensor, shape) in enumerate(zip(inputs, shapes, strict=True)):
                with given(f"argument {seed} was modified"):
                    close(tensor, randn(*shape, seed=seed, dtype=dtype).double(), 0)
            exact = formula(*(tensor.double() for tensor in inputs), *rest)
            has_dtype(actual, dtype)
            close(actual, exact, allowed * scale(exact))
            if dtype == torch.float64:
                gradcheck(lambda *inputs: function(*inputs, *rest), *inputs)


# RMSNorm.


@cases("", LAYER)
def rmsnorm_cases(rmsnorm: ModuleType) -> list[Case]:
    cls = public(rmsnorm, "RMSNorm")

    def case(shape: tuple[int, ...], eps: float = EPS, **options: Any) -> Case:
        arguments = (shape[-1],) if eps == EPS else (shape[-1], eps)
        return Case(cls, arguments, shape, lambda x, state: rms_norm(x, state["weight"], eps), **options)

    small = case((5, 33), 3e-6, scale=1e-3)  # where eps counts
    return [
        case((2, 3, 7), compiled=True),
        small,
        case((2, 8), scale=0.0),
        *map(case, [(6,), (1, 6), (0, 6), (2, 1, 4, 6)]),
    ]


def rounds_once(forward: Callable[[Tensor, Tensor], Tensor]) -> None:
    weight = 1 + 0.3 * randn(257, seed=1)
    for dtype, times in itertools.product(HALVES, (1e-3, 1.0, 200.0, 6e4)):
        for gains in (dtype, torch.float32):
            size = f"seed 0, times {times}" if times < 6e4 else "all 6e4"
            with given(f"x of shape (64, 257), {size}, gains {gains}", dtype):
                x = (randn(64, 257) * times if times < 6e4 else torch.full((64, 257), times)).to(dtype)
                exact = rms_norm(x.double(), weight.to(gains).double())
                actual = forward(x, weight.to(gains))
                has_dtype(actual, dtype)
                close(actual, exact, half_ulp(exact, dtype))


@promises("rounds once, large float16 too")
def rmsnorm_rounds_once(rmsnorm: ModuleType) -> None:
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        norm = make(public(rmsnorm, "RMSNorm"), len(weight), dtype=weight.dtype)
        norm.weight.data.copy_(weight)
        return norm(x).detach()

    rounds_once(forward)


@promises("rms_norm: equation")
def rms_norm_follows(rmsnorm: ModuleType) -> None:
    function = public(rmsnorm, "rms_norm")
    function_follows(function, rms_norm, (2, 3, 7), (7,))
    rounds_once(function)


@promises("refuses bad hyperparameters")
def rmsnorm_refuses(rmsnorm: ModuleType) -> None:
    refuses(public(rmsnorm, "RMSNorm"), [(0,), (-3,), (4, 0.0), (4, -1e-5), (4, math.nan), (4, math.inf)])


def refuses(cls: Any, calls: list[tuple[Any, ...]], **options: Any) -> None:
    for arguments in calls:
        with given(called(cls, arguments, options)), refused():
            cls(*arguments, **options)


@promises("keys of the state dict")
def rmsnorm_keys(rmsnorm: ModuleType) -> None:
    has_state(public(rmsnorm, "RMSNorm"), (7,), {"weight": (7,)})


def has_state(cls: Any, arguments: tuple[Any, ...], expected: Mapping[str, tuple[int, ...]], **options: Any) -> None:
    with given(called(cls, arguments, options)):
        state = {key: tuple(tensor.shape) for key, tensor in cls(*arguments, **options).state_dict().items()}
        if state != expected:
            wrong = {key: shape for key, shape in state.items() if expected.get(key) != shape}
            right = {key: shape for key, shape in expected.items() if state.get(key) != shape}
            raise Violation(f"got {wrong}, expected {right}")


# The feed-forward layers.


@cases("SwiGLU", LAYER)
def swiglu_cases(ffn: ModuleType) -> list[Case]:
    def formula(x: Tensor, state: State) -> Tensor:
        return swiglu(x, state["w1.weight"], state["w2.weight"], state["w3.weight"])

    shapes = [(2, 3, 5), (5,), (0, 5)]
    return [Case(public(ffn, "SwiGLU"), (5, 7), shape, formula, compiled=len(shape) == 3) for shape in shapes]


@cases("FeedForward", LAYER)
def feed_forward_cases(ffn: ModuleType) -> list[Case]:
    def formula(x: Tensor, state: State, activation: Callable[[Tensor], Tensor] = gelu) -> Tensor:
        return feed_forward(x, state["w1.weight"], state["w2.weight"], activation)

    cls = public(ffn, "FeedForward")
    activations = [(torch.relu, lambda x: x.clamp(min=0)), (nn.SiLU(), silu)]
    return [
        Case(cls, (5, 7), (2, 3, 5), formula, compiled=True),
        *(Case(cls, (5, 7), shape, formula) for shape in [(5,), (0, 5)]),
        *(Case(cls, (5, 7, f), (2, 3, 5), functools.partial(formula, activation=exact)) for f, exact in activations),
    ]


@promises("silu, gelu: equation")
def activations_follow(ffn: ModuleType) -> None:
    for name, formula in {"silu": silu, "gelu": gelu}.items():
        for dtype in ALLOWED:
            with given(f"{name} of torch.linspace(-12, 12, 401)", dtype):
                x = torch.linspace(-12, 12, 401, dtype=torch.float64).to(dtype)
                actual, exact = public(ffn, name)(x), formula(x.double())
                has_dtype(actual, dtype)
                # In float32, torch evaluates erf and exp to a few units of the last place of 1.
                noise = 1e-14 if dtype == torch.float64 else 1e-6
                close(actual, exact, 2 * torch.finfo(dtype).eps * exact.abs() + noise)


@promises("glu: equation")
def glu_follows(ffn: ModuleType) -> None:
    function_follows(public(ffn, "glu"), glu, (3, 5), (7, 5), (7, 5))


@promises("swiglu: equation")
def swiglu_follows(ffn: ModuleType) -> None:
    function_follows(public(ffn, "swiglu"), swiglu, (2, 3, 5), (7, 5), (5, 7), (7, 5))


@promises("feed_forward: equation")
def feed_forward_follows(ffn: ModuleType) -> None:
    function_follows(public(ffn, "feed_forward"), feed_forward, (2, 3, 5), (7, 5), (5, 7))


WIDTHS = {512: 1344, 768: 2048, 1600: 4288, 64: 192, 24: 64, 1: 64, 36: 128, 59: 128, 61: 192}  # of the Llama rule


@promises("d_ff is the multiple of 64 nearest to 8/3 d_model (SwiGLU)")
def swiglu_width(ffn: ModuleType) -> None:
    for d_model, d_ff in WIDTHS.items():
        expected = {"w1.weight": (d_ff, d_model), "w2.weight": (d_model, d_ff), "w3.weight": (d_ff, d_model)}
        has_state(public(ffn, "SwiGLU"), (d_model,), expected, device="meta")


@promises("d_ff is 4 d_model (FeedForward)")
def feed_forward_width(ffn: ModuleType) -> None:
    has_state(public(ffn, "FeedForward"), (12,), {"w1.weight": (48, 12), "w2.weight": (12, 48)})


@promises("refuses bad hyperparameters")
def ffn_refuses(ffn: ModuleType) -> None:
    for name in ("SwiGLU", "FeedForward"):
        if hasattr(ffn, name):
            refuses(getattr(ffn, name), [(0, 4), (-1, 4), (4, 0), (4, -2)])


# RoPE.


@cases("", LAYER)
def rope_cases(rope: ModuleType) -> list[Case]:
    return [
        rope_case(rope, (2, 3, 11, 8), compiled=True),
        rope_case(rope, (2, 7, 6), torch.tensor([3, 9, 2, TABLE - 1, 0, 5, 5]), compiled=True),
        rope_case(rope, (4, 7, 6), torch.tensor([[3, 9, 2, 63, 0, 5, 5]]).expand(4, 7) + torch.arange(4)[:, None]),
        *(rope_case(rope, shape) for shape in [(1, 2), (5, 6), (0, 5, 6), (2, 0, 6)]),
    ]


def rope_case(module: ModuleType, shape: tuple[int, ...], positions: Tensor | None = None, **options: Any) -> Case:
    def formula(x: Tensor, state: State, positions: Tensor | None = None) -> Tensor:
        return rotate(x, torch.arange(shape[-2]) if positions is None else positions, 100.0)

    cls = public(module, "RotaryPositionalEmbedding")
    return Case(
        cls, (100.0, shape[-1], TABLE), shape, formula, rest=() if positions is None else (positions,), **options
    )


def far(d_k: int) -> tuple[Tensor, Tensor]:
    """Return unit vectors for every 61st of 131072 positions and the last 100: all wavelengths, at both ends."""
    positions = torch.cat((torch.arange(0, 131072, 61), torch.arange(131072 - 100, 131072)))
    return positions, torch.nn.functional.normalize(randn(len(positions), d_k), dim=-1)


def on_meta(cls: Any, arguments: tuple[Any, ...]) -> Any:
    module = make(cls, *arguments, device="meta").to(torch.bfloat16).to_empty(device="cpu")
    module.reset_parameters()
    return module


@promises("table survives what torch does to modules")
def rope_survives(rope: ModuleType) -> None:
    cls, arguments, (positions, x) = public(rope, "RotaryPositionalEmbedding"), (5e5, 16, 131072), far(16)
    ways: dict[str, Callable[[Any], Any]] = {
        "fresh": lambda module: module,
        ".to(torch.bfloat16)": lambda module: module.to(torch.bfloat16),
        ".to(torch.bfloat16).float()": lambda module: module.to(torch.bfloat16).float(),
        ".half()": lambda module: module.half(),
        ".double().half()": lambda module: module.double().half(),
        "device='meta', then .to(torch.bfloat16).to_empty and reset_parameters": lambda _: on_meta(cls, arguments),
        '.to("meta").to_empty': lambda module: module.to("meta").to_empty(device="cpu"),
        "copy.deepcopy": lambda module: copy.deepcopy(module.bfloat16()),
        "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    }
    for way, go in ways.items():
        for dtype, allowed in ((torch.float32, 1e-6), (torch.float64, 1e-10)):
            with given(called(cls, arguments, {}), way, f"unit vectors at positions 0 ... 131071, {dtype}"):
                module, unit = make(cls, *arguments), x.to(dtype)
                module(unit[:1], positions[3:4])  # what was read last must not travel with a copy
                close(go(module)(unit, positions), rotate(unit.double(), positions, 5e5), allowed)


@promises("no key in the state dict")
def rope_keys(rope: ModuleType) -> None:
    has_state(public(rope, "RotaryPositionalEmbedding"), (100.0, 6, 8), {})


@promises("relative positions only")
def rope_is_relative(rope: ModuleType) -> None:
    q, k = randn(1, 8), randn(1, 8, seed=1)
    for theta in (2.0, 1e4, 1e6):
        module = make(public(rope, "RotaryPositionalEmbedding"), theta, 8, 4096)
        for query, key, shift in ((0, 0, 4000), (7, 3, 1), (3, 90, 511), (90, 2, 4000)):
            with given(f"q k^T at theta={theta}, positions {query} and {key}, both shifted by {shift}"):
                scores = [
                    (module(q, torch.tensor([query + by])) * module(k, torch.tensor([key + by]))).sum()
                    for by in (0, shift)
                ]
                close(scores[1], scores[0], 1e-9)


@promises("norms preserved")
def rope_preserves_norms(rope: ModuleType) -> None:
    for case in rope_cases(rope):
        with given(f"norms of {case}"):
            close(case.build()(case.x(), *case.rest).norm(dim=-1), case.x().norm(dim=-1), 1e-12 * scale(case.x()))


@promises("rounds once")
def rope_rounds_once(rope: ModuleType) -> None:
    for case, dtype in itertools.product(rope_cases(rope), HALVES):
        with given(case, dtype):
            module, x = case.build(dtype), case.x(dtype)
            exact = case.exact(module, x)
            close(module(x, *case.rest), exact, half_ulp(exact, dtype) + 1e-6)


@promises("positions broadcast, in every integer dtype")
def rope_broadcasts(rope: ModuleType) -> None:
    x = randn(2, 4, 5, 6)
    module = make(public(rope, "RotaryPositionalEmbedding"), 10.0, 6, TABLE)
    for shape, dtype in itertools.product(
        [(5,), (1, 5), (4, 5), (2, 1, 5), (2, 4, 5)], (torch.int64, torch.int32, torch.int16, torch.int8)
    ):
        positions = torch.randint(0, 50, shape, generator=torch.Generator().manual_seed(3)).to(dtype)
        with given(f"x of shape (2, 4, 5, 6), token_positions {show(positions)}, {dtype}"):
            exact = rotate(x, positions.long(), 10.0)
            close(module(x, positions), exact, 1e-12)
            close(module(x.float(), positions), exact, 1e-6)


@promises("any strides")
def rope_takes_any_strides(rope: ModuleType) -> None:
    module, wide = make(public(rope, "RotaryPositionalEmbedding"), 10.0, 6, 50), randn(2, 5, 13, dtype=torch.float32)
    views = {
        "x[..., 1:7]": wide[..., 1:7],
        "x[..., :6]": wide[..., :6],
        "x[..., :12:2]": wide[..., :12:2],
        "x[:, :, :5].mT": randn(2, 6, 5, dtype=torch.float32).mT,
        "x[0, 0, :6].expand(4, 6)": wide[0, 0, :6].expand(4, 6),
    }
    for name, x in views.items():
        with given(f"x of shape (2, 5, 13), float32, seed 0, as {name}"):
            close(module(x), rotate(x.double(), torch.arange(x.shape[-2]), 10.0), 2e-6)


@promises("positions off the table")
def rope_refuses_positions(rope: ModuleType) -> None:
    made = (10.0, 4, 8)
    module = make(public(rope, "RotaryPositionalEmbedding"), *made)
    for positions, dtype in itertools.product(([0, 1, 8], [0, -1, 2], [10**9, 0, 0]), (torch.float32, torch.float64)):
        with given(f"{made} at positions {positions}, {dtype}"), refused():
            module(torch.zeros(3, 4, dtype=dtype), torch.tensor(positions))
    with given(f"{made} of 9 tokens"), refused():
        module(torch.zeros(9, 4))
    x, unread = torch.ones(6, 4), torch.tensor([0, 7, 8, -1, 3, 10**12])
    with (
        given(f"{made} at positions {unread.tolist()}, compiled, where none can be read"),
        compiled(module) as (run, _),
    ):
        expected = rotate(x.double(), unread, 10.0).masked_fill(((unread < 0) | (unread > 7))[:, None], math.nan)
        close(run(x, unread), expected, 1e-6)


@promises("apply_rope: equation")
def apply_rope_follows(rope: ModuleType) -> None:
    positions = torch.tensor([0, 1, 5, 100, 7])
    angles = positions[:, None] * torch.tensor([100.0 ** (-2 * k / 8) for k in range(4)], dtype=torch.float64)
    function = public(rope, "apply_rope")
    function_follows(
        functools.wraps(function)(lambda x: function(x, angles)), lambda x: rotate(x, positions, 100.0), (2, 3, 5, 8)
    )


@promises("refuses bad hyperparameters")
def rope_refuses(rope: ModuleType) -> None:
    sizes = [(10.0, 5, 8), (10.0, 0, 8), (10.0, -2, 8), (10.0, 4, 0), (10.0, 4, -1)]
    bases = [(theta, 4, 8) for theta in (0.0, -1.0, math.nan, math.inf)]
    refuses(public(rope, "RotaryPositionalEmbedding"), sizes + bases)


# Attention.

HEADS: tuple[dict[str, Any], ...] = (
    {},
    {"num_kv_heads": 2},
    {"num_kv_heads": 1},
    {"d_head": 10},
    {"qk_norm": True, "num_kv_heads": 2},
)


def mask_of(*shape: int) -> Tensor:
    """Return a mask of which about 7 in 10 are True, and the fourth row is all False."""
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(2)) < 0.7
    mask[..., 3, :] = False
    return mask


def gradcheck_first(cases: list[Case]) -> None:
    with given(f"gradcheck of {cases[0]}"):
        gradcheck(cases[0].build(), cases[0].x()[:1, :3])


ATTENDS = {**LAYER, **SEQUENCE}


@cases("", ATTENDS)
def attention_cases(attention: ModuleType) -> list[Case]:
    cls, formula = public(attention, "CausalMultiHeadSelfAttention"), functools.partial(self_attention, heads=4)
    return [
        *(Case(cls, (24, 4), (2, 7, 24), formula, options, rest=(None, None)) for options in HEADS),
        *(Case(cls, (24, 4), (*batch, 5, 24), formula, HEADS[1]) for batch in [(), (0,), (1,), (2, 3)]),
        Case(cls, (24, 4), (2, 1, 24), formula),
        Case(cls, (24, 4), (2, 7, 24), formula, HEADS[1], rest=(None, mask_of(2, 7, 7)), compiled=True),
        Case(cls, (24, 4), (2, 3, 5, 24), formula, rest=(None, mask_of(3, 5, 5)[..., :1, :])),
    ]


@cases("with RoPE", ATTENDS, ROTARY)
def rotary_attention_cases(attention: ModuleType, rope: ModuleType) -> list[Case]:
    def case(shape: tuple[int, ...], options: Mapping[str, Any], *rest: Tensor | None, **more: Any) -> Case:
        table = make(public(rope, "RotaryPositionalEmbedding"), 100.0, options.get("d_head", 6), TABLE)
        formula = functools.partial(self_attention, heads=4, theta=100.0)
        cls = public(attention, "CausalMultiHeadSelfAttention")
        return Case(cls, (24, 4), shape, formula, {**options, "rope": table}, rest=rest or (None, None), **more)

    positions = torch.randint(0, TABLE, (2, 7), generator=torch.Generator().manual_seed(1))
    return [
        *(case((2, 7, 24), options) for options in HEADS),
        case((2, 7, 24), HEADS[1], positions, mask_of(2, 7, 7), compiled=True),
        case((2, 3, 7, 24), HEADS[4], positions[:1], None),
        case((7, 24), HEADS[0], positions[0], mask_of(7, 7)),
        case((2, 0, 7, 24), HEADS[1], positions[0], mask_of(7, 7)),
    ]


@promises("positions without a RoPE are refused")
def attention_refuses_positions(attention: ModuleType) -> None:
    module = make(public(attention, "CausalMultiHeadSelfAttention"), 24, 4)
    with given("token_positions [0, 1, 2] without a rope"), refused():
        module(randn(1, 3, 24, dtype=torch.float32), torch.arange(3))


@promises("keys of the state dict")
def attention_keys(attention: ModuleType) -> None:
    cls, projections = public(attention, "CausalMultiHeadSelfAttention"), ("q", "k", "v", "output")
    has_state(cls, (24, 4), {f"{name}_proj.weight": (24, 24) for name in projections})
    expected: dict[str, tuple[int, ...]] = {
        "q_proj.weight": (40, 24),
        "k_proj.weight": (20, 24),
        "v_proj.weight": (20, 24),
    }
    expected |= {"output_proj.weight": (24, 40), "q_norm.weight": (10,), "k_norm.weight": (10,)}
    has_state(cls, (24, 4), expected, num_kv_heads=2, d_head=10, qk_norm=True)


@promises("refuses bad hyperparameters")
def attention_refuses(attention: ModuleType) -> None:
    cls = public(attention, "CausalMultiHeadSelfAttention")
    refuses(cls, [(24, 5), (24, 0), (0, 4), (24, -4)])
    for option, value in (("num_kv_heads", 3), ("num_kv_heads", 0), ("d_head", 0), ("eps", 0.0), ("eps", math.nan)):
        refuses(cls, [(24, 4)], **{option: value})


@promises("refuses a RoPE of another head size")
def attention_refuses_rope(attention: ModuleType, rope: ModuleType) -> None:
    table = make(public(rope, "RotaryPositionalEmbedding"), 10.0, 4, 8)
    refuses(public(attention, "CausalMultiHeadSelfAttention"), [(24, 4)], rope=table)


@promises("scaled_dot_product_attention: equation")
def attention_function_follows(attention: ModuleType) -> None:
    function, shapes = public(attention, "scaled_dot_product_attention"), ((2, 2, 5, 8), (2, 2, 7, 8), (2, 2, 7, 4))
    everything = torch.ones(5, 7, dtype=torch.bool)
    for mask in (None, everything, mask_of(5, 7), mask_of(2, 2, 5, 7)):
        with given(f"mask {None if mask is None else show(mask)}"):

            def formula(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
                return attend(q, k, v, (everything if mask is None else mask).expand(2, 2, 5, 7))

            function_follows(function, formula, *shapes, rest=(mask,))
            for dtype in HALVES:
                q, k, v = (randn(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes))
                exact = formula(q.double(), k.double(), v.double(), mask)
                with given(f"rounding of q, k, v {shapes}, seeds 0, 1, 2", dtype):
                    close(function(q, k, v, mask), exact, half_ulp(exact, dtype) + 1e-6)


# The block, of the 2025 and the 2024 edition of CS336.


@cases("", ATTENDS, ROTARY)
def block_cases(block: ModuleType, rope: ModuleType) -> list[Case]:
    def case(*rest: Tensor | None, shape: tuple[int, ...] = (2, 7, 24), **options: Any) -> Case:
        compiled = options.pop("compiled", False)
        options["rope"] = make(public(rope, "RotaryPositionalEmbedding"), 100.0, options.get("d_head", 6), TABLE)
        formula = functools.partial(pre_norm_block, heads=4, theta=100.0)
        return Case(
            public(block, "Block"), (24, 4, 40), shape, formula, options, rest or (None, None), compiled=compiled
        )

    positions = torch.tensor([[3, 9, 2, 63, 0, 5, 5], [0, 1, 2, 3, 4, 5, 6]])
    return [
        case(),
        case(positions, mask_of(2, 7, 7), num_kv_heads=2, d_head=8, qk_norm=True, compiled=True),
        *(case(shape=shape) for shape in [(5, 24), (0, 5, 24), (2, 1, 3, 24), (2, 1, 24)]),
    ]


@cases("2024: GELU, no RoPE", LAYER, SEQUENCE)
def block_cases_2024(block: ModuleType, ffn: ModuleType) -> list[Case]:
    formula, options = functools.partial(pre_norm_block, heads=4), {"ffn": public(ffn, "FeedForward")}
    return [Case(public(block, "Block"), (24, 4, 40), (2, 7, 24), formula, options, (None, None))]


def block_state(d_model: int, d_ff: int, *kinds: str, prefix: str = "") -> dict[str, tuple[int, ...]]:
    """Return the keys and shapes of the reference block of CS336."""
    state: dict[str, tuple[int, ...]] = {f"attn.{n}_proj.weight": (d_model, d_model) for n in ("q", "k", "v", "output")}
    state |= {"ln1.weight": (d_model,), "ln2.weight": (d_model,), "ffn.w2.weight": (d_model, d_ff)}
    state |= {f"ffn.{kind}.weight": (d_ff, d_model) for kind in kinds}
    return {prefix + key: shape for key, shape in state.items()}


@promises("keys of the state dict")
def block_keys(block: ModuleType) -> None:
    has_state(public(block, "Block"), (24, 4, 40), block_state(24, 40, "w1", "w3"))
    has_state(public(block, "Block"), (24, 4), block_state(24, 64, "w1", "w3"))


@promises("keys of the state dict (2024: GELU, no RoPE)")
def block_keys_2024(block: ModuleType, ffn: ModuleType) -> None:
    feed_forward = public(ffn, "FeedForward")
    has_state(public(block, "Block"), (24, 4, 40), block_state(24, 40, "w1"), ffn=feed_forward)
    has_state(public(block, "Block"), (24, 4), block_state(24, 96, "w1"), ffn=feed_forward)


@promises("refuses bad hyperparameters")
def block_refuses(block: ModuleType) -> None:
    refuses(public(block, "Block"), [(24, 5), (24, 0), (0, 4), (24, 4, 0)])
    refuses(public(block, "Block"), [(24, 4)], eps=-1.0)


# The stack of blocks.


@cases("", ATTENDS, {**ROTARY, "positions off the table": functools.partial(marks_positions, spreads=True)})
def transformer_cases(transformer: ModuleType) -> list[Case]:
    positions = torch.tensor([[3, 9, 2, 63, 0, 5, 5], [0, 1, 2, 3, 4, 5, 6]])
    options = {"num_kv_heads": 2, "d_head": 8, "qk_norm": True}
    plain: dict[str, Any] = {"max_seq_len": TABLE, "theta": 100.0}
    cls, formula = public(transformer, "Transformer"), functools.partial(stack, heads=4, theta=100.0)
    return [
        Case(cls, (2, 24, 4), (2, 7, 24), formula, plain, (None, None), compiled=True),
        Case(cls, (2, 24, 4, 40), (2, 7, 24), formula, plain | options, (positions, mask_of(2, 7, 7))),
    ]


@cases("2024: GELU, no RoPE", LAYER, SEQUENCE)
def transformer_cases_2024(transformer: ModuleType, ffn: ModuleType) -> list[Case]:
    options = {"max_seq_len": 9, "theta": None, "ffn": public(ffn, "FeedForward")}
    formula = functools.partial(stack, heads=4)
    return [Case(public(transformer, "Transformer"), (3, 24, 4, 40), (2, 7, 24), formula, options, (None, None))]


@promises("keys of the state dict")
def transformer_keys(transformer: ModuleType) -> None:
    state: dict[str, tuple[int, ...]] = {"ln_final.weight": (24,)}
    for layer in range(3):
        state |= block_state(24, 40, "w1", "w3", prefix=f"layers.{layer}.")
    has_state(public(transformer, "Transformer"), (3, 24, 4, 40), state, max_seq_len=9)


@promises("one table for all blocks")
def transformer_shares_its_table(transformer: ModuleType) -> None:
    cls = public(transformer, "Transformer")
    model, on_meta = (make(cls, 3, 24, 4, max_seq_len=9, device=device) for device in ("cpu", "meta"))
    moved = {
        "fresh": model,
        "copy.deepcopy": copy.deepcopy(model),
        ".to(torch.bfloat16)": copy.deepcopy(model).to(torch.bfloat16),
        ".double()": copy.deepcopy(model).double(),
        '.to("meta").to_empty': copy.deepcopy(model).to("meta").to_empty(device="cpu"),
        "device='meta', then .half().to_empty": on_meta.half().to_empty(device="cpu"),
    }
    [expected] = {id(table): table for _, table in model.named_buffers(remove_duplicate=False)}.values()
    for way, module in moved.items():
        with given(f"Transformer(3, 24, 4, max_seq_len=9), {way}"):
            tables = {id(table): table for _, table in module.named_buffers(remove_duplicate=False)}
            if len(tables) != 1:
                raise Violation(f"{len(tables)} tables, expected 1")
            for table in tables.values():
                has_dtype(table, torch.float32)
                close(table, expected, 0)


@promises("refuses bad hyperparameters, and sequences that are too long")
def transformer_refuses(transformer: ModuleType) -> None:
    cls = public(transformer, "Transformer")
    refuses(cls, [(0, 24, 4), (-1, 24, 4), (1, 24, 5), (1, 24, 0), (1, 24, 8), (1, 24, 4, 0)], max_seq_len=9)
    for options in ({"max_seq_len": 0}, {"max_seq_len": 9, "theta": 0.0}, {"max_seq_len": 9, "eps": -1.0}):
        refuses(cls, [(1, 24, 4)], **options)
    for theta in (100.0, None):
        with given(f"10 tokens, of max_seq_len=9, theta={theta}"), refused():
            make(cls, 1, 24, 4, max_seq_len=9, theta=theta)(torch.zeros(10, 24))


PROPERTIES = tuple(_registered)


# Finding the layers of a copy.

_SYNTHETIC = itertools.count()


def load(target: str | os.PathLike[str]) -> dict[str, ModuleType]:
    """Import the layers of a folder, a file, or a module or package given by its dotted name; key them by layer.

    A file is known by its name, or else by the classes that it defines; others in the folder are not imported. A folder
    with an __init__.py is imported as the package that it is; any other under a name of its own.

    Raises:
        LookupError: there is no layer.
        ImportError: a file of the copy cannot be imported.
    """
    path = Path(target)
    if path.is_dir():
        names = _find(path)
        layers = _import_folder(path, names)
    elif path.is_file():
        names = _find(path.parent, path)
        layers = _import_folder(path.parent, names)
    elif re.fullmatch(r"\w+(\.\w+)*", str(target)):
        layers = _import_dotted(str(target))
    else:
        raise LookupError(f"{target} is not there: give a folder, a file, or a name such as my_project.layers")
    if not layers:
        wanted = ", ".join(names[0] for names in LAYERS.values())
        raise LookupError(f"{target} has no layer: nothing in it defines {wanted}")
    return layers


def _find(folder: Path, only: Path | None = None) -> dict[str, str]:
    """Return the stem of the file of each layer, without importing any."""
    found: dict[str, str] = {}
    paths = [only] if only else sorted(folder.glob("*.py"))
    defined: dict[str, set[str]] = {}
    for path in paths:
        if path.stem == "contract" or path.stem.startswith("test_"):
            continue
        try:
            tree = ast.parse(path.read_bytes(), str(path))
        except (SyntaxError, ValueError) as error:
            if path.stem in LAYERS or only:
                raise ImportError(f"{path}, line {getattr(error, 'lineno', 0)}: {error}") from None
            continue
        defined[path.stem] = {n.name for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef)}
    for layer, names in LAYERS.items():
        stems = [stem for stem, its in defined.items() if its & set(names)]
        if layer in stems:
            stems = [layer]
        if len(stems) > 1:
            raise LookupError(f"{folder}: {' and '.join(stems)} both define {names[0]}: name one of the files")
        if stems:
            found[layer] = stems[0]
    return found


def _import_folder(folder: Path, stems: Mapping[str, str]) -> dict[str, ModuleType]:
    folder = folder.resolve()
    if not stems:
        return {}
    root = folder
    while (root / "__init__.py").is_file():
        root = root.parent
    parts = folder.relative_to(root).parts
    if not parts:
        package = f"_tinyblock_copy_{next(_SYNTHETIC)}"
        module = ModuleType(package)
        module.__path__ = [str(folder)]
        sys.modules[package] = module
        root = Path.cwd()
    else:
        package = ".".join(parts)
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    importlib.invalidate_caches()
    return {layer: _import(f"{package}.{stem}", folder) for layer, stem in stems.items()}


def _import(name: str, folder: Path) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        inside = [frame for frame in frames if Path(frame.filename).is_relative_to(folder)] or frames
        raise ImportError(
            f"{inside[-1].filename}, line {inside[-1].lineno}: {type(error).__name__}: {error}"
        ) from error


def _import_dotted(name: str) -> dict[str, ModuleType]:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and f"{name}.".startswith(f"{error.name}."):
            raise LookupError(f"there is no module {name}: run in the folder of the project, or give a path") from None
        raise
    if hasattr(module, "__path__"):
        folder = Path(next(iter(module.__path__)))
        return {layer: _import(f"{name}.{stem}", folder) for layer, stem in _find(folder).items()}
    path = Path(str(module.__file__))
    return dict.fromkeys(_find(path.parent, path), module)
