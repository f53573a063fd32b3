"""The behavioural contract: what a copy of a layer must still compute, however it was edited.

A property calls a layer with seeded inputs, and compares the result with the paper's formula or with that of another
call. Where it fails it raises a `Violation`, which names the call, the input, and the component that is furthest off.
`tinyblock verify` runs the properties, and so do tinyblock's own tests, and test_contract.py beside a copy: this file
imports nothing but torch, so that it can be copied along.

An input "x of shape (2, 7, 24), seed 3" is `torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(3),
dtype=torch.float64)`, rounded to the dtype that is named. Weights of which nothing is said are those of `fill`, and
what is too long to be shown is named by the function below that makes it, such as `mask_of(2, 7, 7)`.
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
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
WIDE = (torch.float64, torch.float32)
HALVES = (torch.bfloat16, torch.float16)
ALLOWED = {torch.float64: 1e-12, torch.float32: 1e-6} | {half: 16 * torch.finfo(half).eps for half in HALVES}

REST = ("token_positions", "mask")

Shape = tuple[int, ...]
State = Mapping[str, Tensor]


# The papers' formulas, in float64, with loops and complex numbers: as unlike the layers as can be.


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    return x / ((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps) ** 0.5 * weight


def sigmoid(x: Tensor) -> Tensor:
    return (1 + (x / 2).tanh()) / 2  # where exp(-x) would overflow too


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


def angles_of(positions: Tensor, d_k: int, theta: float) -> Tensor:
    return positions[..., None] * torch.tensor([theta ** (-2 * k / d_k) for k in range(d_k // 2)], dtype=torch.float64)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Multiply consecutive pairs, as complex numbers, by exp(i angle)."""
    turned = torch.complex(x[..., 0::2], x[..., 1::2]) * torch.exp(1j * angles)
    return torch.stack((turned.real, turned.imag), dim=-1).flatten(-2)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attend with one softmax per query; a query that may attend to no key yields zeros."""
    shape = (*q.shape[:-1], k.shape[-2])
    mask = torch.ones(shape, dtype=torch.bool) if mask is None else mask.expand(shape)
    out = [v.new_zeros(0)]
    for index in itertools.product(*map(range, q.shape[:-1])):
        batch, keys = index[:-1], mask[index]
        weights = (k[batch][keys] @ q[index] / math.sqrt(q.shape[-1])).softmax(0)
        out.append(weights @ v[batch][keys] if keys.any() else v.new_zeros(v.shape[-1]))
    return torch.cat(out).reshape(*q.shape[:-1], v.shape[-1])


def self_attention(
    x: Tensor,
    state: State,
    positions: Tensor | None,
    mask: Tensor | None,
    *,
    heads: int,
    theta: float | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Attend causally, one head at a time, with the weights of a layer's state dict."""
    causal = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).tril()
    d_head = state["q_proj.weight"].shape[0] // heads
    group = heads // (state["k_proj.weight"].shape[0] // d_head)
    outputs = []
    for head in range(heads):
        rows = {"q": head, "k": head // group, "v": head // group}
        q, k, v = (x @ state[f"{n}_proj.weight"][row * d_head : (row + 1) * d_head].T for n, row in rows.items())
        if "q_norm.weight" in state:
            q, k = rms_norm(q, state["q_norm.weight"], eps), rms_norm(k, state["k_norm.weight"], eps)
        if theta is not None:
            angles = angles_of(torch.arange(x.shape[-2]) if positions is None else positions, d_head, theta)
            q, k = rotate(q, angles), rotate(k, angles)
        outputs.append(attend(q, k, v, causal if mask is None else causal & mask))
    return torch.cat(outputs, dim=-1) @ state["output_proj.weight"].T


def pre_norm_block(x: Tensor, state: State, *rest: Tensor | None, eps: float = 1e-5, **options: Any) -> Tensor:
    """Apply a block: with SwiGLU where the state has a w3, with the GELU layer of CS336 2024 where it has none."""
    x = x + self_attention(rms_norm(x, state["ln1.weight"], eps), below(state, "attn."), *rest, eps=eps, **options)
    weights: list[Any] = [state[key] for key in ("ffn.w1.weight", "ffn.w2.weight", "ffn.w3.weight") if key in state]
    return x + (swiglu if len(weights) == 3 else feed_forward)(rms_norm(x, state["ln2.weight"], eps), *weights)


def blocks_and_norm(x: Tensor, state: State, *rest: Tensor | None, eps: float = 1e-5, **options: Any) -> Tensor:
    for layer in range(1 + max(int(key.split(".")[1]) for key in state if key.startswith("layers."))):
        x = pre_norm_block(x, below(state, f"layers.{layer}."), *rest, eps=eps, **options)
    return rms_norm(x, state["ln_final.weight"], eps)


def below(state: State, prefix: str) -> State:
    return {key.removeprefix(prefix): weight for key, weight in state.items() if key.startswith(prefix)}


# Inputs, how they are compared, and what is said of them.


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


def made_by(expression: str, tensor: Tensor) -> Tensor:
    """Note how a reader can make a tensor again that is too long to be shown."""
    vars(tensor)["made_by"] = expression
    return tensor


def show(value: Any) -> str:
    if isinstance(value, Tensor):
        whole = str(value.tolist() if value.is_floating_point() else value.int().tolist())
        return whole if len(whole) <= 100 else vars(value).get("made_by", f"{whole[:95]} ...")
    return getattr(value, "__name__", None) or repr(value).partition("\n")[0]


def show_call(function: Any, arguments: tuple[Any, ...] = (), options: Mapping[str, Any] | None = None) -> str:
    named = [f"{name}={show(value)}" for name, value in (options or {}).items()]
    return f"{function.__name__}({', '.join([*map(show, arguments), *named])})"


@contextmanager
def given(*what: Any) -> Iterator[None]:
    """Put the input in front of whatever goes wrong with it, in one line."""
    try:
        yield
    except SkipTest:
        raise
    except Violation as violation:
        raise Violation(f"{', '.join(map(str, what))}: {violation}".removeprefix(": ")) from violation.__cause__
    except Exception as error:
        ours = (os.path.dirname(torch.__file__), __file__)
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)]
        place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
        cause = f"{type(error).__name__}: {textwrap.shorten(str(error), 400, placeholder=' ...')}{place}"
        raise Violation(f"{', '.join(map(str, what))}: {cause}".removeprefix(": ")) from error


@contextmanager
def refused() -> Iterator[None]:
    try:
        yield
    except ValueError:
        return
    raise Violation("was accepted, expected a ValueError")


def close(actual: Any, expected: Tensor, allowed: float | Tensor) -> None:
    """Raise a Violation that shows the worst component, unless every absolute error is allowed."""
    if not isinstance(actual, Tensor) or actual.shape != expected.shape:
        kind = f"shape {tuple(actual.shape)}" if isinstance(actual, Tensor) else f"a {type(actual).__name__}"
        raise Violation(f"got {kind}, expected shape {tuple(expected.shape)}")
    got, wanted = actual.detach().double(), expected.detach().double()
    equal = (got == wanted) | (got.isnan() & wanted.isnan())
    error = (got - wanted).abs().masked_fill(equal, 0).nan_to_num(math.inf)
    excess = error - allowed
    if excess.numel() and excess.max() > 0:
        at = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
        values = f"got {got[at]:.9g}, expected {wanted[at]:.9g}"
        bound = torch.as_tensor(allowed).expand_as(error)[at]
        raise Violation(f"largest error {error[at]:.1e} at {list(at)}: {values}; allowed {bound:.1e}")


def close_on_average(actual: Tensor, expected: Tensor, roundings: int, dtype: torch.dtype, least: float = 0.0) -> None:
    """Raise a Violation unless the root mean square error is that of so many roundings to a half.

    One rounding is off by up to u = eps/2 of a value, and by u / sqrt(3) on average, as each error within it is alike
    probable. Independent ones add up in squares: to sqrt(n / 3) u of the root mean square of the result, where no
    layer enlarges them: `fill` draws weights that keep the length of a vector. Four times that leaves room for a layer
    that does (SiLU's slope is up to 1.1), and for tensors of few components. `least` is the size of the terms where
    they cancel out in the result.
    """
    if expected.numel():
        error, wanted = ((t.detach().double() ** 2).mean().sqrt() for t in (actual.double() - expected, expected))
        allowed = 4 * math.sqrt(roundings / 3) * torch.finfo(dtype).eps / 2 * max(least, wanted.item())
        if not error <= allowed:
            raise Violation(f"root mean square error {error:.1e} of values of {wanted:.1e}; allowed {allowed:.1e}")


def differs(actual: Tensor, other: Tensor) -> None:
    same = (actual - other).abs().amax(-1) <= 1e-9
    if same.any():
        raise Violation(f"nothing changed at {same.nonzero()[0].tolist()}, expected a change of every token")


def has_dtype(actual: Any, dtype: torch.dtype) -> None:
    if isinstance(actual, Tensor) and actual.dtype != dtype:
        raise Violation(f"got a result of {actual.dtype}, expected {dtype}")


def size(tensor: Tensor) -> float:
    return tensor.detach().abs().max().item() if tensor.numel() else 0.0


def half_ulp(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the error of one rounding, and 2% of it for what float32 lost before."""
    info = torch.finfo(dtype)
    return 0.51 * info.eps * 2.0 ** exact.detach().abs().clamp(min=info.smallest_normal).log2().floor()


def allowed_of(exact: Tensor, dtype: torch.dtype, rounds_once: bool) -> float | Tensor:
    return half_ulp(exact, dtype) + 1e-6 if rounds_once and dtype in HALVES else ALLOWED[dtype] * size(exact)


def public(layer: ModuleType, name: str) -> Any:
    """Return what a copy may have dropped; the property is skipped without it."""
    if not hasattr(layer, name):
        raise SkipTest(f"{name} is not in this copy")
    return getattr(layer, name)


def takes(function: Any, name: str) -> bool:
    parameters = inspect.signature(function).parameters
    return name in parameters or any(it.kind is it.VAR_KEYWORD for it in parameters.values())


def kept(cls: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return those options that a copy has not dropped."""
    return {name: value for name, value in options.items() if takes(cls, name)}


def make(cls: Any, *arguments: Any, **options: Any) -> Any:
    with given(show_call(cls, arguments, options)):
        return cls(*arguments, **options)


@dataclass(frozen=True)
class Case:
    """A layer to be made, an input for it, and the formula (x, state dict, *rest) of what comes out."""

    cls: Any
    arguments: tuple[Any, ...]
    shape: Shape
    formula: Callable[..., Tensor]
    options: Mapping[str, Any] = field(default_factory=dict)
    rest: tuple[Tensor | None, ...] = ()  # token_positions, mask
    scale: float = 1.0
    rounds_once: bool = False
    compiled: bool = False
    roundings: int = 1  # of a half, one after another or side by side, on the way to the result
    dtypes: tuple[torch.dtype, ...] = tuple(ALLOWED)

    def missing(self) -> list[str]:
        """Return what the case gives, and the copy does not take any more."""
        rest = [name for name, tensor in zip(REST, self.rest, strict=False) if tensor is not None]
        return [name for name in self.options if not takes(self.cls, name)] + [
            name for name in rest if not takes(self.cls.forward, name)
        ]

    def module(self, dtype: torch.dtype = torch.float64) -> Any:
        options = copy.deepcopy(dict(self.options))  # with a rope of its own
        return fill(make(self.cls, *self.arguments, **options).to(dtype))

    def x(self, dtype: torch.dtype = torch.float64) -> Tensor:
        return (randn(*self.shape) * self.scale).to(dtype)

    def exact(self, module: nn.Module, x: Tensor) -> Tensor:
        state = {key: weight.double() for key, weight in module.state_dict(keep_vars=True).items()}
        try:
            return self.formula(x.double(), state, *self.rest)
        except KeyError as error:
            raise Violation(f"no {error} in the state dict, which has {', '.join(state)}") from None

    def __str__(self) -> str:
        made, scaled = show_call(self.cls, self.arguments, self.options), "" if self.scale == 1 else f" * {self.scale}"
        return f"{made} of x of shape {self.shape}, seed 0{scaled}{show_rest(self.rest)}"


def call(module: Any, x: Tensor, rest: tuple[Tensor | None, ...]) -> Any:
    """Call by keyword, and only with what there is: a copy may have dropped the rest."""
    return module(x, **{name: tensor for name, tensor in zip(REST, rest, strict=False) if tensor is not None})


def show_rest(rest: tuple[Tensor | None, ...]) -> str:
    named = zip(REST, rest, strict=False)
    return "".join(f", {name} {show(tensor)}" for name, tensor in named if tensor is not None)


# What every layer promises.


def some(cases: list[Any]) -> list[Any]:
    assert cases, "no case is left to check"
    return cases


def each(cases: list[Case], dtypes: Iterable[torch.dtype] = ALLOWED) -> list[tuple[Case, torch.dtype]]:
    return some([(case, dtype) for case in cases for dtype in dtypes if dtype in case.dtypes])


def follows(cases: list[Case], *dtypes: torch.dtype) -> None:
    for case, dtype in each(cases, dtypes):
        with given(case, dtype):
            module = case.module(dtype)
            exact = case.exact(module, case.x(dtype))
            agrees(call(module, case.x(dtype), case.rest), exact, dtype, case.roundings, case.rounds_once)
            with given("after .eval(), under no_grad"), torch.no_grad():
                agrees(call(module.eval(), case.x(dtype), case.rest), exact, dtype, case.roundings, case.rounds_once)


def agrees(
    actual: Any, exact: Tensor, dtype: torch.dtype, roundings: int, rounds_once: bool = False, keeps: bool = True
) -> None:
    has_dtype(actual, dtype if keeps else getattr(actual, "dtype", dtype))
    close(actual, exact, allowed_of(exact, dtype, rounds_once))
    if dtype in HALVES:
        close_on_average(actual, exact, roundings, dtype)


def same_gradients(
    actual: Tensor,
    mine: Mapping[str, Tensor],
    exact: Tensor,
    its: Mapping[str, Tensor],
    roundings: int,
    computed_in: torch.dtype | None = None,
) -> None:
    """Compare the gradients of two results, each with regard to tensors of its own.

    On the way back each product has two, and both factors were rounded: three times the roundings of the result. What
    the scores of attention get is a difference of terms that are as large as the gradient of the result, of size 1.
    """
    dtype = computed_in or actual.dtype
    upstream = randn(*actual.shape, seed=9, dtype=actual.dtype)
    grad = functools.partial(torch.autograd.grad, materialize_grads=True)  # zeros where an empty batch has none
    wanted = grad(exact, list(its.values()), upstream.double())
    for name, got, want in zip(mine, grad(actual, list(mine.values()), upstream), wanted, strict=True):
        with given(f"gradient of {name}, for one of the result of seed 9"):
            if dtype in HALVES:
                close_on_average(got, want, 3 * roundings, dtype, least=1.0)
            close(got, want, 10 * ALLOWED[dtype] * max(1, size(want)))


def differentiates(cases: list[Case]) -> None:
    for case, dtype in each(cases):
        with given(case, dtype):
            module, mine, its = case.module(dtype), case.x(dtype).requires_grad_(), case.x(dtype).requires_grad_()
            weights, exact = dict(module.named_parameters()), case.exact(module, its)
            same_gradients(
                call(module, mine, case.rest), {"x": mine, **weights}, exact, {"x": its, **weights}, case.roundings
            )
    with given(cases[0], "gradcheck"):
        torch.autograd.gradcheck(cases[0].module(), cases[0].x().requires_grad_(), fast_mode=True)


def leaves_inputs_alone(cases: list[Case]) -> None:
    for case, dtype in each(cases):
        with given(case, dtype), torch.no_grad():
            module, x = case.module(dtype), case.x(dtype)
            inputs = {"x": x, **dict(zip(REST, case.rest, strict=False))}
            inputs |= {**dict(module.named_parameters()), **dict(module.named_buffers())}
            before = {name: (tensor, tensor.clone()) for name, tensor in inputs.items() if tensor is not None}
            first = call(module, x, case.rest)
            for name, (tensor, copied) in before.items():
                with given(f"{name} was modified"):
                    close(tensor, copied, 0)
            with given("the same call again"):
                close(call(module, x, case.rest), first, ALLOWED[dtype] * size(first))


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
    for case in [case for case in cases if case.compiled] or some(cases)[:1]:
        module = case.module(torch.float32)
        with given(f"torch.compile of {case}", torch.float32), compiled(module) as (run, graphs):
            for length in (5, 8, 1, 13):
                x = randn(*case.shape[:-2], length, case.shape[-1], dtype=torch.float32)
                mask = torch.ones(length, length, dtype=torch.bool)
                mask[:, :2] = False
                changed = zip(case.rest, (torch.arange(length) + 3, mask), strict=False)
                rest = tuple(None if old is None else new for old, new in changed)
                with given(f"with {length} tokens{show_rest(rest)}"):
                    expected = call(module, x, rest)
                    close(call(run, x, rest), expected, 1e-5 * size(expected))
            if len(graphs) > 3:
                raise Violation(f"{len(graphs)} graphs for 5, 8, 1 and 13 tokens, expected 3: for 5, any number, and 1")


def places_parameters(cases: list[Case]) -> None:
    options = {"device": "meta", "dtype": torch.bfloat16}
    for case in cases:
        if not options.keys() <= inspect.signature(case.cls).parameters.keys():
            raise SkipTest(f"{case.cls.__name__} has no device and dtype in this copy")
        with given(show_call(case.cls, case.arguments, {**case.options, **options})):
            for name, parameter in case.cls(*case.arguments, **case.options, **options).named_parameters():
                if not parameter.is_meta or parameter.dtype != torch.bfloat16:
                    raise Violation(f"{name} is of {parameter.dtype} on {parameter.device}")


def autocasts(cases: list[Case]) -> None:
    """Compute in bfloat16 what torch.autocast says, with weights and inputs that are rounded to it besides."""
    for case in some([case for case in cases if 0 not in case.shape and case.scale == 1]):
        with given(f"torch.autocast('cpu', torch.bfloat16) around {case}", torch.float32), warnings.catch_warnings():
            warnings.simplefilter("error")
            module, mine, its = (case.module(torch.float32), *(case.x(torch.float32).requires_grad_() for _ in "12"))
            with torch.autocast("cpu", torch.bfloat16):
                actual = call(module, mine, case.rest)
            weights, exact = dict(module.named_parameters()), case.exact(module, its)
            agrees(actual, exact, torch.bfloat16, 3 * case.roundings, keeps=False)
            before, after = {"x": mine, **weights}, {"x": its, **weights}
            same_gradients(actual, before, exact, after, 3 * case.roundings, torch.bfloat16)


def follows_on_cuda(cases: list[Case]) -> None:
    if not torch.cuda.is_available():
        raise SkipTest("no CUDA here")
    for case, dtype in each(cases):
        with given(case, dtype, "on CUDA"):
            module = case.module(dtype)
            exact, rest = case.exact(module, case.x(dtype)), tuple(None if t is None else t.cuda() for t in case.rest)
            module, x = module.cuda(), case.x(dtype).cuda()
            for enabled in (True, False):
                with given("gradients " + ("on" if enabled else "off")), torch.set_grad_enabled(enabled):
                    actual = call(module, x, rest)
                    has_dtype(actual, dtype)
                    close(actual.cpu(), exact, (1 if dtype in HALVES else 10) * ALLOWED[dtype] * size(exact))
                    if dtype in HALVES:
                        close_on_average(actual.cpu(), exact, case.roundings, dtype)


LAYER = {
    "equation in float64": lambda cases: follows(cases, torch.float64),
    "equation in float32": lambda cases: follows(cases, torch.float32),
    "equation in bfloat16 and float16": lambda cases: follows(cases, *HALVES),
    "gradients": differentiates,
    "inputs not modified": leaves_inputs_alone,
    "compiles to one graph": compiles,
    "autocast": autocasts,
    "equation on CUDA": follows_on_cuda,
}
WEIGHTS = LAYER | {"device and dtype of the parameters": places_parameters}


# What attention, and all that is made of it, promises.

TABLE = 200  # positions that RoPE has below


def unmasked(cases: list[Case]) -> Iterator[tuple[Case, Any, Tensor, Tensor, float]]:
    """Yield what the checks of a sequence share: case, module, x, result, and the error that is allowed."""
    for case in some([case for case in cases if case.rest[1:] == (None,) and case.scale == 1]):
        module, x = case.module(), case.x()
        with given(case):
            out = call(module, x, case.rest)
        yield case, module, x, out, ALLOWED[torch.float64] * size(out)


def other(x: Tensor, tokens: slice) -> Tensor:
    x = x.clone()
    x[..., tokens, :] = randn(*x[..., tokens, :].shape, seed=7)
    return x


def is_causal(cases: list[Case]) -> None:
    for case, module, x, out, allowed in unmasked(cases):
        with given(f"{case}, and with other tokens (seed 7) from the 4th on: the first three"):
            close(call(module, other(x, slice(3, None)), case.rest)[..., :3, :], out[..., :3, :], allowed)
        with given(f"{case}, and with another first token (seed 7)"):
            differs(call(module, other(x, slice(1)), case.rest), out)


def prefills(cases: list[Case]) -> None:
    for case in cases:
        module, x, out = case.module(), case.x(), torch.empty(0)
        for length in range(x.shape[-2], 0, -1):
            positions, mask = (*case.rest, None, None)[:2]
            with given(f"{case}, and its first {length} tokens alone"):
                rest = positions if positions is None else positions[..., :length]
                narrowed = mask if mask is None else mask[..., :length, :length]
                prefix = call(module, x[..., :length, :], (rest, narrowed))
                out = prefix if length == x.shape[-2] else out
                close(prefix, out[..., :length, :], ALLOWED[torch.float64] * size(out))


def needs_argument(cases: list[Case], name: str) -> None:
    if not takes(cases[0].cls.forward, name):
        raise SkipTest(f"forward of {cases[0].cls.__name__} has no {name} in this copy")


def masks(cases: list[Case]) -> None:
    needs_argument(cases, "mask")
    for case, module, x, out, allowed in unmasked(cases):
        seq, positions = x.shape[-2], case.rest[0]
        with given(f"{case}, and a mask that is True everywhere"):
            close(call(module, x, (positions, torch.ones(seq, seq, dtype=torch.bool))), out, allowed)
        with given(f"{case}, and a mask that hides the first two keys, in a (1, seq) row: the tokens after them"):
            keep = torch.arange(seq)[None] >= 2
            masked = call(module, x, (positions, keep))[..., 2:, :]
            close(call(module, other(x, slice(2)), (positions, keep))[..., 2:, :], masked, allowed)
            differs(masked, out[..., 2:, :])


SEQUENCE = WEIGHTS | {
    "causality": is_causal,
    "prefill against one-shot": prefills,
    "mask narrows causality and never lifts it": masks,
}


def is_relative(cases: list[Case]) -> None:
    needs_argument(cases, "token_positions")
    case, module, x, out, allowed = next(unmasked(cases))
    ahead = torch.arange(x.shape[-2])
    with given(f"{case}, and token_positions 150 further on"):
        close(call(module, x, (ahead + 150,)), out, 10 * allowed)
    with given(f"{case}, and token_positions twice as far apart"):
        differs(call(module, x, (2 * ahead,))[..., 1:, :], out[..., 1:, :])


def marks_positions(cases: list[Case]) -> None:
    """Refuse positions off the table; where none can be read, let their tokens be NaN (in a stack, others too)."""
    needs_argument(cases, "token_positions")
    case, module = cases[0], cases[0].module(torch.float32)
    x, positions = case.x(torch.float32), torch.arange(case.shape[-2]) + TABLE - 3
    with given(f"{case}, and token_positions {show(positions)} in a table of {TABLE}"):
        with refused():
            call(module, x, (positions,))
        with given("compiled, where they cannot be read, NaN"), compiled(module) as (run, _):
            outside, nan = (positions >= TABLE).expand(x.shape[:-1]), call(run, x, (positions,)).isnan().all(-1)
            close(nan & outside if hasattr(module, "layers") else nan, outside, 0)


ROTARY = SEQUENCE | {"relative positions only": is_relative, "positions off the table": marks_positions}


# Properties, and how they are registered.


@contextmanager
def usual_defaults() -> Iterator[None]:
    """Set what the host may have changed: gradients on, the CPU, float32, and no autocast."""
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autocast("cpu", enabled=False))
        if device.type != "cpu":
            stack.enter_context(torch.device("cpu"))
        stack.callback(torch.set_default_dtype, dtype)
        torch.set_default_dtype(torch.float32)
        yield


@dataclass(frozen=True)
class Property:
    """Something that a layer promises, and the layers that are needed to check it."""

    layer: str
    name: str
    needs: frozenset[str]
    check: Callable[..., None]

    def run(self, modules: Mapping[str, ModuleType]) -> None:
        """Check the modules, given by the names of their layers.

        Raises:
            Violation: the property does not hold.
            unittest.SkipTest: it is one of a function or class that the copy does not have.
        """
        with torch.random.fork_rng(devices=()), usual_defaults(), given():
            self.check(**{layer: modules[layer] for layer in self.needs})


_registered: list[Property] = []


def promises(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a property that needs the layers by which the parameters are named, and belongs to the first."""

    def register(check: Callable[..., Any]) -> Callable[..., Any]:
        needs = list(inspect.signature(check).parameters)
        _registered.append(Property(needs[0], name, frozenset(needs), check))
        return check

    return register


def of_copy(cases: list[Case]) -> list[Case]:
    """Leave out the cases of what a copy has dropped."""
    fitting = [case for case in cases if not case.missing()]
    if cases and not fitting:
        missing = min((case.missing() for case in cases), key=len)
        raise SkipTest(f"{cases[0].cls.__name__} has no {' and no '.join(missing)} in this copy")
    return fitting


def promises_all(group: Mapping[str, Callable[[list[Case]], None]], of: str = "") -> Callable[..., Any]:
    """Register the properties of the group for the cases that a function of the layers returns."""

    def register(cases: Callable[..., list[Case]]) -> Callable[..., list[Case]]:
        needs = list(inspect.signature(cases).parameters)
        for name, check in group.items():
            run = functools.partial(lambda check, **modules: check(of_copy(cases(**modules))), check)
            _registered.append(Property(needs[0], f"{name} ({of})" if of else name, frozenset(needs), run))
        return cases

    return register


def promises_function(
    layer: str,
    name: str,
    formula: Callable[..., Tensor],
    calls: list[tuple[Any, ...]],
    roundings: int = 1,
    once: bool = False,
) -> None:
    """Register the equation of a function: value, dtype, inputs left alone, gradients.

    A call is given by the shapes of its tensors and, behind them, what else it takes.
    """

    def check(**modules: ModuleType) -> None:
        function = public(modules[layer], name)
        for call, dtype in itertools.product(calls, ALLOWED):
            shapes, rest = [it for it in call if type(it) is tuple], [it for it in call if type(it) is not tuple]
            mine, its, before = (
                {f"argument {i}": randn(*shape, seed=i, dtype=dtype).requires_grad_() for i, shape in enumerate(shapes)}
                for _ in range(3)
            )
            shown = [f"{shape} seed {i}" for i, shape in enumerate(shapes)]
            with given(f"{name} of {', '.join([*shown, *map(show, rest)])}", dtype):
                actual, exact = function(*mine.values(), *rest), formula(*(t.double() for t in its.values()), *rest)
                for argument, tensor in mine.items():
                    with given(f"{argument} was modified"):
                        close(tensor, before[argument], 0)
                agrees(actual, exact, dtype, roundings, once)
                same_gradients(actual, mine, exact, its, roundings)

    _registered.append(Property(layer, f"{name}: equation and gradients", frozenset({layer}), check))


def promises_weights(layer: str, cls: str, *arguments: int, **options: Any) -> None:
    """Register what weights are drawn: gains of 1, and a normal of variance 2 / (d_in + d_out), cut at three sigma."""

    def check(**modules: ModuleType) -> None:
        made = public(modules[layer], cls)
        more = kept(made, options)
        with given(show_call(made, arguments, more), "after torch.manual_seed(0)"):
            torch.default_generator.manual_seed(0)
            has_initial_weights(made(*arguments, **more))
        if takes(made, "device") and hasattr(made, "reset_parameters"):
            way = ".to_empty(device='cpu'), NaN in every weight, torch.manual_seed(0), reset_parameters()"
            with given(show_call(made, arguments, {**more, "device": "meta"}), way):
                module = made(*arguments, **more, device="meta").to_empty(device="cpu")
                for parameter in module.parameters():
                    parameter.data.fill_(math.nan)
                torch.default_generator.manual_seed(0)
                module.reset_parameters()
                has_initial_weights(module)

    _registered.append(Property(layer, f"{cls}: initial weights", frozenset({layer}), check))


def has_initial_weights(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        weight = parameter.detach().double()
        with given(f"{name} of shape {tuple(weight.shape)}"):
            if weight.ndim == 1:
                close(weight, torch.ones_like(weight), 0)
            else:
                unit = weight / math.sqrt(2 / sum(weight.shape))
                # Cut there, a normal has a variance of 0.97333 and a kurtosis of 2.83. Five standard errors:
                error = 5 / math.sqrt(unit.numel())
                found = {"largest": size(unit), "mean": unit.mean().item(), "deviation": unit.std().item()}
                inside = found["largest"] <= 3 + 1e-6 and abs(found["mean"]) <= error
                if not inside or abs(found["deviation"] / 0.98658 - 1) > 0.68 * error:
                    shown = ", ".join(f"{key} {value:.3f}" for key, value in found.items())
                    raise Violation(f"in units of sqrt(2 / (d_in + d_out)): {shown}; expected 3.000, 0.000, 0.987")


def promises_to_refuse(layer: str, cls: str, calls: list[tuple[Any, ...]]) -> None:
    """Register which arguments are refused; a dictionary at the end is one of options."""

    def check(**modules: ModuleType) -> None:
        made = public(modules[layer], cls)
        for call in calls:
            arguments, options = (call[:-1], call[-1]) if isinstance(call[-1], dict) else (call, {})
            if kept(made, options) == options:
                with given(show_call(made, arguments, options)), refused():
                    made(*arguments, **options)

    _registered.append(Property(layer, f"{cls}: bad hyperparameters refused", frozenset({layer}), check))


def has_state(cls: Any, arguments: tuple[Any, ...], expected: Mapping[str, Shape], **options: Any) -> None:
    with given(show_call(cls, arguments, options)):
        state = {key: tuple(tensor.shape) for key, tensor in cls(*arguments, **options).state_dict().items()}
        if state != expected:
            wrong = {key: shape for key, shape in state.items() if expected.get(key) != shape}
            right = {key: shape for key, shape in expected.items() if state.get(key) != shape}
            raise Violation(f"got {wrong or 'nothing else'}, expected {right or 'nothing else'}")


# RMSNorm.


@promises_all(WEIGHTS)
def rmsnorm_cases(rmsnorm: ModuleType) -> list[Case]:
    def case(shape: Shape, *eps: float, **more: Any) -> Case:
        def formula(x: Tensor, state: State) -> Tensor:
            return rms_norm(x, state["weight"], *eps)

        return Case(public(rmsnorm, "RMSNorm"), (shape[-1], *eps), shape, formula, rounds_once=True, **more)

    small = case((5, 33), 3e-6, scale=1e-3), case((2, 8), scale=0.0)  # where eps counts
    return [case((2, 3, 7), compiled=True), *small, *map(case, [(6,), (1, 6), (0, 6), (2, 1, 4, 6)])]


def rounds_once(forward: Callable[[Tensor, Tensor], Tensor]) -> None:
    inputs = {f"x of shape (64, 257), seed 0 * {scale}": randn(64, 257) * scale for scale in (1e-3, 1.0, 200.0)}
    inputs["x of shape (64, 257), all 60000"] = torch.full((64, 257), 6e4, dtype=torch.float64)  # squared, no float16
    wide = torch.float32
    dtypes = [(x, gains) for half in HALVES for x, gains in [(half, half), (half, wide), (wide, half)]]
    for (name, x), (dtype, gains) in itertools.product(inputs.items(), dtypes):
        with given(name, dtype, f"gains of {gains}"):
            weight = (1 + 0.3 * randn(257, seed=1)).to(gains)
            exact, actual = rms_norm(x.to(dtype).double(), weight.double()), forward(x.to(dtype), weight)
            has_dtype(actual, dtype)
            close(actual, exact, half_ulp(exact, dtype) if dtype in HALVES else ALLOWED[dtype] * exact.abs())


@promises("rounds once, and no square overflows")
def rmsnorm_rounds_once(rmsnorm: ModuleType) -> None:
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        norm = make(public(rmsnorm, "RMSNorm"), len(weight)).to(weight.dtype)
        norm.weight.data.copy_(weight)
        return norm(x)

    rounds_once(forward)


@promises("rms_norm: rounds once, and no square overflows")
def rms_norm_rounds_once(rmsnorm: ModuleType) -> None:
    rounds_once(public(rmsnorm, "rms_norm"))


@promises("keys of the state dict")
def rmsnorm_keys(rmsnorm: ModuleType) -> None:
    has_state(public(rmsnorm, "RMSNorm"), (7,), {"weight": (7,)})


promises_function("rmsnorm", "rms_norm", rms_norm, [((2, 3, 7), (7,)), ((7,), (7,), 0.5), ((2, 1, 3, 7), (7,), 1e-3)])
promises_weights("rmsnorm", "RMSNorm", 7)
promises_to_refuse("rmsnorm", "RMSNorm", [(0,), (-3,), (4, 0.0), (4, -1e-5), (4, math.nan), (4, math.inf)])


# The feed-forward layers.

SWIGLU, PLAIN = 5, 3  # roundings: of each matrix product, of the activation, and of the product with the gate


@promises_all(WEIGHTS, of="SwiGLU")
def swiglu_cases(ffn: ModuleType) -> list[Case]:
    def formula(x: Tensor, state: State) -> Tensor:
        return swiglu(x, *(state[f"{name}.weight"] for name in ("w1", "w2", "w3")))

    shapes = [(2, 3, 5), (5,), (0, 5)]
    made = public(ffn, "SwiGLU"), (5, 7)
    cases = [Case(*made, shape, formula, roundings=SWIGLU, compiled=len(shape) == 3) for shape in shapes]
    large = Case(*made, (2, 3, 5), formula, scale=1e3, roundings=SWIGLU, dtypes=(*WIDE, torch.bfloat16))
    return [*cases, large]


@promises_all(WEIGHTS, of="FeedForward")
def feed_forward_cases(ffn: ModuleType) -> list[Case]:
    def case(shape: Shape, exact: Callable[[Tensor], Tensor] = gelu, compiled: bool = False, **options: Any) -> Case:
        def formula(x: Tensor, state: State) -> Tensor:
            return feed_forward(x, state["w1.weight"], state["w2.weight"], exact)

        return Case(public(ffn, "FeedForward"), (5, 7), shape, formula, options, compiled=compiled, roundings=PLAIN)

    activations = (
        case((2, 3, 5), lambda x: x.clamp(min=0), activation=torch.relu),
        case((2, 3, 5), silu, activation=nn.SiLU()),
    )
    return [case((2, 3, 5), compiled=True), case((5,)), case((0, 5)), *activations]


@promises("silu, gelu: equation")
def activations_follow(ffn: ModuleType) -> None:
    for (name, formula), dtype in itertools.product({"silu": silu, "gelu": gelu}.items(), ALLOWED):
        with given(f"{name} of torch.linspace(-12, 12, 401)", dtype):
            x = torch.linspace(-12, 12, 401, dtype=torch.float64).to(dtype)
            actual, exact = public(ffn, name)(x), formula(x.double())
            has_dtype(actual, dtype)
            # In float32, torch evaluates erf and exp to a few units of the last place of 1.
            close(actual, exact, 2 * torch.finfo(dtype).eps * exact.abs() + (1e-14 if dtype == torch.float64 else 1e-6))


@promises("d_ff is the multiple of 64 nearest to 8/3 d_model (SwiGLU)")
def swiglu_width(ffn: ModuleType) -> None:
    widths = {512: 1344, 64: 192, 24: 64, 1: 64, 36: 128, 59: 128, 61: 192}
    for d_model, d_ff in widths.items():
        inner, outer = (d_ff, d_model), (d_model, d_ff)
        has_state(public(ffn, "SwiGLU"), (d_model,), {"w1.weight": inner, "w2.weight": outer, "w3.weight": inner})


@promises("d_ff is 4 d_model (FeedForward)")
def feed_forward_width(ffn: ModuleType) -> None:
    has_state(public(ffn, "FeedForward"), (12,), {"w1.weight": (48, 12), "w2.weight": (12, 48)})


IN, OUT = (7, 5), (5, 7)
promises_function("ffn", "glu", glu, [(shape, IN, IN) for shape in [(3, 5), (5,), (2, 1, 5)]], SWIGLU - 1)
promises_function("ffn", "swiglu", swiglu, [(shape, IN, OUT, IN) for shape in [(2, 3, 5), (5,), (2, 1, 3, 5)]], SWIGLU)
plain = [((2, 3, 5), IN, OUT), ((5,), IN, OUT), ((2, 1, 3, 5), IN, OUT), ((2, 3, 5), IN, OUT, torch.relu)]
promises_function("ffn", "feed_forward", feed_forward, plain, PLAIN)
promises_weights("ffn", "SwiGLU", 96, 160)
promises_weights("ffn", "FeedForward", 96, 160)
promises_to_refuse("ffn", "SwiGLU", [(0, 4), (-1, 4), (4, 0), (4, -2)])
promises_to_refuse("ffn", "FeedForward", [(0, 4), (-1, 4), (4, 0), (4, -2)])


# RoPE.

ROPE = "RotaryPositionalEmbedding"
POSITIONS = torch.tensor([[3, 9, 2, TABLE - 1, 0, 5, 5], [0, 1, 2, 3, 4, 5, 6]])


@promises_all(LAYER)
def rope_cases(rope: ModuleType) -> list[Case]:
    def case(shape: Shape, *rest: Tensor, **more: Any) -> Case:
        def formula(x: Tensor, state: State, positions: Tensor | None = None) -> Tensor:
            return rotate(x, angles_of(torch.arange(x.shape[-2]) if positions is None else positions, shape[-1], 100.0))

        return Case(public(rope, ROPE), (100.0, shape[-1], TABLE), shape, formula, rest=rest, rounds_once=True, **more)

    positions = torch.tensor([3, 9, 2, TABLE - 1, 0, 5, 5])
    placed = case((2, 7, 6), positions, compiled=True), *(case((0, 7, 6), positions[None][:n]) for n in (0, 1))
    return [case((2, 3, 11, 8), compiled=True), *placed, *map(case, [(1, 2), (5, 6), (0, 5, 6), (2, 0, 6)])]


@promises("table survives")
def rope_survives(rope: ModuleType) -> None:
    """Compare at both ends of a long table, for all of its wavelengths, after what torch does to modules."""
    cls, sizes = public(rope, ROPE), (5e5, 16, 131072)
    positions = torch.cat((torch.arange(0, 131072, 61), torch.arange(131072 - 100, 131072)))
    x = nn.functional.normalize(randn(len(positions), 16), dim=-1)

    def from_meta(_: Any) -> Any:
        module = cls(*sizes, device="meta").to(torch.bfloat16).to_empty(device="cpu")
        module.reset_parameters()
        return module

    ways: dict[str, Callable[[Any], Any]] = {
        "as it was made": lambda module: module,
        ".to(torch.bfloat16)": lambda module: module.to(torch.bfloat16),
        ".half().float()": lambda module: module.half().float(),
        ".double()": lambda module: module.double(),
        'on "meta", then .to(torch.bfloat16).to_empty() and reset_parameters()': from_meta,
        '.to("meta").to_empty()': lambda module: module.to("meta").to_empty(device="cpu"),
        "copy.deepcopy": lambda module: copy.deepcopy(module.bfloat16()),
        "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    }
    for way, dtype in itertools.product(ways, (torch.float32, torch.float64)):
        with given(
            show_call(cls, sizes), way, "unit vectors at every 61st of 131072 positions and the last 100", dtype
        ):
            module, unit = make(cls, *sizes), x.to(dtype)
            module(unit[:1], positions[3:4])  # what was read last must not travel with a copy
            exact = rotate(unit.double(), angles_of(positions, 16, 5e5))
            close(ways[way](module)(unit, positions), exact, 1e-6 if dtype == torch.float32 else 1e-10)


@promises("relative positions only")
def rope_is_relative(rope: ModuleType) -> None:
    q, k = randn(1, 8), randn(1, 8, seed=1)
    places = [(0, 0, 4000), (7, 3, 1), (3, 90, 511), (90, 2, 4000)]
    for theta, (i, j, by) in itertools.product((2.0, 1e4, 1e6), places):
        with given(f"q k^T of shape (1, 8), seeds 0 and 1, {theta=}, at positions {i} and {j}, and {by} further on"):
            module = make(public(rope, ROPE), theta, 8, 4096)
            here, there = (module(q, torch.tensor([i + s])) * module(k, torch.tensor([j + s])) for s in (0, by))
            close(there.sum(), here.sum(), 1e-9)


@promises("norms preserved")
def rope_preserves_norms(rope: ModuleType) -> None:
    for case in rope_cases(rope):
        with given(f"norms after {case}"):
            close(call(case.module(), case.x(), case.rest).norm(dim=-1), case.x().norm(dim=-1), 1e-12 * size(case.x()))


@promises("positions broadcast, in every integer dtype")
def rope_broadcasts(rope: ModuleType) -> None:
    x, module = randn(2, 4, 5, 6), make(public(rope, ROPE), 10.0, 6, TABLE)
    shapes, dtypes = [(5,), (1, 5), (4, 5), (2, 1, 5), (2, 4, 5)], (torch.int64, torch.int32, torch.int16, torch.int8)
    for shape, dtype in itertools.product(shapes, dtypes):
        positions = torch.randint(0, 50, shape, generator=torch.Generator().manual_seed(3)).to(dtype)
        with given(f"x of shape (2, 4, 5, 6), seed 0, token_positions {show(positions)} of {dtype}"):
            exact = rotate(x, angles_of(positions.long(), 6, 10.0))
            close(module(x, positions), exact, 1e-12)
            close(module(x.float(), positions), exact, 1e-6)


@promises("any strides")
def rope_takes_any_strides(rope: ModuleType) -> None:
    module, wide = make(public(rope, ROPE), 10.0, 6, 50), randn(6, 6, 13, dtype=torch.float32)
    views = {"[..., 1:7]": wide[..., 1:7], "[..., :6]": wide[..., :6], "[..., :12:2]": wide[..., :12:2]}
    views |= {"[:, :, :5].mT": wide[:, :, :5].mT, "[0, 0, :6].expand(4, 6)": wide[0, 0, :6].expand(4, 6)}
    for name, x in views.items():
        with given(f"x{name} of x of shape (6, 6, 13), seed 0, float32"):
            close(module(x), rotate(x.double(), angles_of(torch.arange(x.shape[-2]), 6, 10.0)), 1e-6 * size(x))


@promises("positions off the table")
def rope_marks_positions(rope: ModuleType) -> None:
    """Refuse them; where none can be read, under a compiler, let those tokens be NaN, and no other."""
    module = make(public(rope, ROPE), 10.0, 4, 8)
    tables: list[list[int]] = [[0, 1, 8], [0, -1, 2], [10**9, 0, 0]]
    for positions, dtype in itertools.product(map(torch.tensor, tables), (torch.float32, torch.float64)):
        with given(f"token_positions {positions.tolist()} in a table of 8", dtype), refused():
            module(torch.zeros(3, 4, dtype=dtype), positions)
    with given("9 tokens in a table of 8"), refused():
        module(torch.zeros(9, 4))
    x, positions = torch.ones(6, 4), torch.tensor([0, 7, 8, -1, 3, 10**12])
    exact = rotate(x.double(), angles_of(positions, 4, 10.0))
    with given(f"compiled, token_positions {positions.tolist()} in a table of 8"), compiled(module) as (run, _):
        close(run(x, positions), exact.masked_fill(((positions < 0) | (positions > 7))[:, None], math.nan), 1e-6)


@promises("keys of the state dict: none")
def rope_keys(rope: ModuleType) -> None:
    has_state(public(rope, ROPE), (100.0, 6, 8), {})


FAR = "angles_of(torch.tensor([0, 1, 5, 100, 131071]), 8, 100.0)"
ANGLES = made_by(FAR, angles_of(torch.tensor([0, 1, 5, 100, 131071]), 8, 100.0))
BATCHED = made_by("angles_of(POSITIONS, 8, 100.0)", angles_of(POSITIONS, 8, 100.0))
turns = [((2, 3, 5, 8), ANGLES), ((5, 8), ANGLES), ((2, 7, 8), BATCHED)]
promises_function("rope", "apply_rope", rotate, turns, once=True)
SIZES = [(10.0, 5, 8), (10.0, 0, 8), (10.0, -2, 8), (10.0, 4, 0), (10.0, 4, -1)]
promises_to_refuse("rope", ROPE, [*((theta, 4, 8) for theta in (0.0, -1.0, math.nan, math.inf)), *SIZES])


# Attention.

ATTENTION = "CausalMultiHeadSelfAttention"
HEADS: list[dict[str, Any]] = [{}, {"num_kv_heads": 2}, {"num_kv_heads": 1}, {"d_head": 10, "qk_norm": True}]
HEADS += [{"qk_norm": True, "num_kv_heads": 2, "eps": 1e-3}]
NOTHING = (None, None)  # neither token_positions nor a mask


def mask_of(*shape: int) -> Tensor:
    """Return a mask that is True for about 7 keys in 10, and for none of the fourth query."""
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(2)) < 0.7
    mask[..., 3, :] = False
    return made_by(f"mask_of{shape}", mask)


def roundings_of(rope: bool, qk_norm: bool = False, **_: Any) -> int:
    """Count q, k, v, the weights of the softmax, the heads and the output; and q and k again where they are changed."""
    return 6 + 2 * rope + 2 * qk_norm


@promises_all(SEQUENCE)
def attention_cases(attention: ModuleType) -> list[Case]:
    def case(shape: Shape, options: dict[str, Any], mask: Tensor | None = None, heads: int = 4, **more: Any) -> Case:
        formula = functools.partial(self_attention, heads=heads, eps=options.get("eps", 1e-5))
        made = public(attention, ATTENTION), (shape[-1], heads), shape, formula, options, (None, mask)
        return Case(*made, roundings=roundings_of(rope=False, **options), **more)

    shapes = [(5, 24), (0, 5, 24), (1, 5, 24), (2, 0, 5, 24), (2, 3, 5, 24), (2, 1, 24)]
    return [
        case((2, 7, 24), HEADS[0], compiled=True),
        *(case((2, 7, 24), options) for options in HEADS[1:]),
        *(case(shape, HEADS[1]) for shape in shapes),
        case((2, 7, 24), {}, mask_of(2, 7, 7), compiled=True),
        case((2, 3, 5, 24), {}, made_by("mask_of(3, 5, 5)[..., :1, :]", mask_of(3, 5, 5)[..., :1, :])),
        case((80, 64), {}, heads=1),  # longer than a window or a fixed mask, in a head as wide as in use
        case((2, 7, 24), {}, scale=30.0, dtypes=(torch.float64,)),  # scores past where exp overflows
        case((2, 7, 24), {}, mask_of(2, 7, 7), scale=30.0, dtypes=(torch.float64,)),
    ]


@promises_all(ROTARY, of="with RoPE")
def rotary_attention_cases(attention: ModuleType, rope: ModuleType) -> list[Case]:
    def case(options: dict[str, Any], *rest: Tensor | None, shape: Shape = (2, 7, 24), **more: Any) -> Case:
        table = make(public(rope, ROPE), 100.0, options.get("d_head", 6), TABLE)
        formula = functools.partial(self_attention, heads=4, theta=100.0, eps=options.get("eps", 1e-5))
        made = public(attention, ATTENTION), (24, 4), shape, formula, {**options, "rope": table}
        return Case(*made, rest or NOTHING, roundings=roundings_of(rope=True, **options), **more)

    return [
        case(HEADS[0], compiled=True),
        *map(case, HEADS[1:]),
        case(HEADS[1], POSITIONS, mask_of(2, 7, 7), compiled=True),
        case(HEADS[4], POSITIONS[:1], None, shape=(2, 3, 7, 24)),
        case(HEADS[0], POSITIONS[0], mask_of(7, 7), shape=(7, 24)),
        case(HEADS[1], POSITIONS[0], mask_of(7, 7), shape=(2, 0, 7, 24)),
    ]


@promises("scores in float32 or wider")
def attention_keeps_scores(attention: ModuleType) -> None:
    """Attend by scores of about 512 and their 8ths, which a half cannot hold, though all of q, k and v are exact."""
    cls = public(attention, ATTENTION)
    noise = [randn(2, 9, 64, seed=seed).sign() for seed in (3, 4)]
    q, k = (torch.cat((torch.full((2, 9, 1), 64.0), signs[..., 1:]), dim=-1) for signs in noise)
    x, causal = torch.cat((q, k), dim=-1).double(), torch.ones(9, 9, dtype=torch.bool).tril()
    first, second = torch.eye(128, dtype=torch.float64).split(64)
    weights = {"q_proj": first, "k_proj": second, "v_proj": second, "output_proj": first.T}
    exact = attend(q, k, k, causal) @ first
    how = "x of shape (2, 9, 128): [64, signs of seed 3, 64, signs of seed 4]; q is its first half, k and v the second"
    for dtype in HALVES:
        with given(f"{ATTENTION}(128, 1, d_head=64)", how, dtype), torch.no_grad():
            if "d_head" not in inspect.signature(cls).parameters:
                raise SkipTest(f"{ATTENTION} has no d_head in this copy")
            module = make(cls, 128, 1, d_head=64).to(dtype)
            for name, weight in weights.items():
                getattr(module, name).weight.copy_(weight)
            close_on_average(module(x.to(dtype))[..., 1:64], exact[..., 1:64], 2, dtype)


def attention_state(
    num_kv_heads: int = 4, d_head: int = 6, qk_norm: bool = False, eps: float = 0.0, prefix: str = ""
) -> dict[str, Shape]:
    """Return the keys and shapes of attention, of d_model 24 in 4 heads."""
    state: dict[str, Shape] = {"q_proj.weight": (4 * d_head, 24), "output_proj.weight": (24, 4 * d_head)}
    state |= {f"{name}_proj.weight": (num_kv_heads * d_head, 24) for name in ("k", "v")}
    state |= {f"{name}_norm.weight": (d_head,) for name in ("q", "k") if qk_norm}
    return {prefix + key: shape for key, shape in state.items()}


@promises("positions without a RoPE are refused")
def attention_refuses_positions(attention: ModuleType) -> None:
    with given(f"{ATTENTION}(24, 4), token_positions [0, 1, 2]"), refused():
        public(attention, ATTENTION)(24, 4)(torch.zeros(1, 3, 24), torch.arange(3))


@promises("a RoPE of another head size is refused")
def attention_refuses_rope(attention: ModuleType, rope: ModuleType) -> None:
    with given(f"{ATTENTION}(24, 4, rope={ROPE}(10.0, 4, 8))"), refused():
        public(attention, ATTENTION)(24, 4, rope=public(rope, ROPE)(10.0, 4, 8))


@promises("keys of the state dict")
def attention_keys(attention: ModuleType) -> None:
    names = [f"{name}_proj.weight" for name in ("q", "k", "v", "output")]
    has_state(public(attention, ATTENTION), (24, 4), dict.fromkeys(names, (24, 24)))
    options = kept(public(attention, ATTENTION), {"num_kv_heads": 2, "d_head": 10, "qk_norm": True})
    has_state(public(attention, ATTENTION), (24, 4), attention_state(**options), **options)


keys: list[Shape] = [(2, 2, 5, 8), (2, 2, 7, 8), (2, 2, 7, 4)]
scored = [(*keys, None), (*keys, mask_of(5, 7)), (*keys, mask_of(2, 2, 5, 7)), ((5, 8), (7, 8), (7, 4), mask_of(5, 7))]
promises_function("attention", "scaled_dot_product_attention", attend, scored, once=True)
UNFIT = [(24, 4, {"num_kv_heads": n}) for n in (3, 0)] + [(24, 4, {"eps": eps}) for eps in (0.0, math.nan, math.inf)]
promises_weights("attention", ATTENTION, 192, 4, num_kv_heads=2, d_head=32, qk_norm=True)
promises_to_refuse("attention", ATTENTION, [(24, 5), (24, 0), (0, 4), (24, -4), (24, 4, {"d_head": 0}), *UNFIT])


# The block, of both editions of CS336.

ADDED = 2  # roundings around a layer: of the norm before it and of the sum behind it

OLD = "2024: GELU, no RoPE"
OPTIONS: dict[str, Any] = {"num_kv_heads": 2, "d_head": 8, "qk_norm": True, "eps": 1e-3}


@promises_all(ROTARY)
def block_cases(block: ModuleType, rope: ModuleType) -> list[Case]:
    def case(*rest: Tensor | None, shape: Shape = (2, 7, 24), compiled: bool = False, **options: Any) -> Case:
        table = make(public(rope, ROPE), 100.0, options.get("d_head", 6), TABLE)
        formula = functools.partial(pre_norm_block, heads=4, theta=100.0, eps=options.get("eps", 1e-5))
        made = public(block, "Block"), (24, 4, 40), shape, formula, {**options, "rope": table}, rest or NOTHING
        return Case(*made, compiled=compiled, roundings=roundings_of(rope=True, **options) + SWIGLU + 2 * ADDED)

    options = kept(public(block, "Block"), OPTIONS)
    every = case(POSITIONS, mask_of(2, 7, 7), **options, compiled=True)
    shapes = [(5, 24), (0, 5, 24), (2, 1, 3, 24), (2, 1, 24)]
    return [case(compiled=True), case(**options), every, *(case(shape=shape) for shape in shapes)]


@promises_all(SEQUENCE, of=OLD)
def old_block_cases(block: ModuleType, ffn: ModuleType) -> list[Case]:
    formula, options = functools.partial(pre_norm_block, heads=4), {"ffn": public(ffn, "FeedForward")}
    made = public(block, "Block"), (24, 4, 40), (2, 7, 24), formula, options, NOTHING
    return [Case(*made, compiled=True, roundings=roundings_of(rope=False) + PLAIN + 2 * ADDED)]


def block_state(d_ff: int, prefix: str = "", inner: tuple[str, ...] = ("w1", "w3"), **options: Any) -> dict[str, Shape]:
    """Return the keys and shapes of the reference block of CS336, of d_model 24, or of one with options."""
    state = attention_state(**options, prefix="attn.")
    state |= {"ln1.weight": (24,), "ln2.weight": (24,), "ffn.w2.weight": (24, d_ff)}
    return {prefix + key: shape for key, shape in (state | {f"ffn.{n}.weight": (d_ff, 24) for n in inner}).items()}


@promises("keys of the state dict")
def block_keys(block: ModuleType) -> None:
    has_state(public(block, "Block"), (24, 4, 40), block_state(40))
    options = kept(public(block, "Block"), OPTIONS)
    has_state(public(block, "Block"), (24, 4), block_state(64, **options), **options)


@promises(f"keys of the state dict ({OLD})")
def old_block_keys(block: ModuleType, ffn: ModuleType) -> None:
    has_state(public(block, "Block"), (24, 4), block_state(96, inner=("w1",)), ffn=public(ffn, "FeedForward"))


promises_weights("block", "Block", 96, 4, 160, num_kv_heads=2, qk_norm=True)
promises_to_refuse("block", "Block", [(24, 5), (24, 0), (0, 4), (24, 4, 0), (24, 4, {"eps": -1.0})])


# The stack of blocks.


@promises_all(ROTARY)
def transformer_cases(transformer: ModuleType) -> list[Case]:
    def case(*rest: Tensor | None, compiled: bool = False, **options: Any) -> Case:
        theta, eps = options.get("theta", 1e4), options.get("eps", 1e-5)
        formula = functools.partial(blocks_and_norm, heads=4, theta=theta, eps=eps)
        made = public(transformer, "Transformer"), (2, 24, 4), (2, 7, 24), formula
        roundings = 2 * (roundings_of(rope=True, **options) + SWIGLU + 2 * ADDED) + 1
        more: Any = {"compiled": compiled, "roundings": roundings}
        return Case(*made, {"max_seq_len": TABLE, **options}, rest or NOTHING, **more)

    options = kept(public(transformer, "Transformer"), {"theta": 100.0, **OPTIONS})
    return [case(compiled=True), case(**options), case(POSITIONS, mask_of(2, 7, 7), **options)]


@promises_all(SEQUENCE, of=OLD)
def old_transformer_cases(transformer: ModuleType, ffn: ModuleType) -> list[Case]:
    options = {"max_seq_len": TABLE, "theta": None, "ffn": public(ffn, "FeedForward")}
    formula = functools.partial(blocks_and_norm, heads=4)
    made = public(transformer, "Transformer"), (2, 24, 4, 40), (2, 7, 24), formula, options, NOTHING
    return [Case(*made, compiled=True, roundings=2 * (roundings_of(rope=False) + PLAIN + 2 * ADDED) + 1)]


def has_blocks(transformer: ModuleType, num_layers: int, d_ff: int, shapes: Any, **options: Any) -> None:
    state: dict[str, Shape] = {"ln_final.weight": (24,)}
    for layer in range(num_layers):
        state |= block_state(d_ff, f"layers.{layer}.", **shapes)
    has_state(public(transformer, "Transformer"), (num_layers, 24, 4, d_ff), state, max_seq_len=9, **options)


@promises("keys of the state dict")
def transformer_keys(transformer: ModuleType) -> None:
    has_blocks(transformer, 3, 40, {})
    options = kept(public(transformer, "Transformer"), OPTIONS)
    has_blocks(transformer, 1, 64, options, **options)


@promises(f"keys of the state dict ({OLD})")
def old_transformer_keys(transformer: ModuleType, ffn: ModuleType) -> None:
    has_blocks(transformer, 3, 40, {"inner": ("w1",)}, theta=None, ffn=public(ffn, "FeedForward"))


@promises("one table for all blocks, and in float32")
def transformer_shares_its_table(transformer: ModuleType) -> None:
    """Look for tables of equal values, whatever they hold, and for what a rounded one does at far positions."""
    cls, options = public(transformer, "Transformer"), {"max_seq_len": 131072}
    formula = functools.partial(blocks_and_norm, heads=4, theta=1e4)
    positions = torch.tensor([0, 1, 1000, 65537, 131000, 131070, 131071])
    case = Case(cls, (3, 24, 4), (2, 7, 24), formula, options, (positions, None))
    needs_argument([case], "token_positions")
    model = make(cls, *case.arguments, **options)

    def tables(of: nn.Module) -> list[tuple[str, Tensor]]:
        named = [(name, table) for name, table in of.named_buffers() if table.is_floating_point() or table.is_complex()]
        return list({table.data_ptr() or id(table): (name, table) for name, table in named}.values())

    ways: dict[str, Callable[[], Any]] = {
        "as it was made": lambda: model,
        "copy.deepcopy": lambda: copy.deepcopy(model),
        ".to(torch.bfloat16)": lambda: copy.deepcopy(model).to(torch.bfloat16),
        ".double()": lambda: copy.deepcopy(model).double(),
        '.to("meta").to_empty()': lambda: copy.deepcopy(model).to("meta").to_empty(device="cpu"),
    }
    if takes(cls, "device"):
        empty = make(cls, *case.arguments, **options, device="meta")
        ways['on "meta", then .half().to_empty()'] = lambda: empty.half().to_empty(device="cpu")
        with given(show_call(cls, case.arguments, {**options, "device": "meta"})):
            if not all(table.is_meta for _, table in tables(empty)):
                raise Violation("the table is not on meta")
    for way, moved in ways.items():
        with given(case, way):
            module = moved()
            for (one, table), (other, second) in itertools.combinations(tables(module), 2):
                if table.shape == second.shape and torch.equal(table, second):
                    raise Violation(f"{one} and {other} are two tables of the same values")
            if "empty" in way and hasattr(module, "reset_parameters"):
                module.reset_parameters()
            x = case.x(torch.float32)
            fill(module.float())
            exact = case.exact(module, x)
            with given("then .float() and the weights of `fill`"):
                close(call(module, x, case.rest), exact, 1e-5 * size(exact))


@promises("a sequence longer than max_seq_len is refused")
def transformer_refuses_length(transformer: ModuleType) -> None:
    for theta in (100.0, None):
        with given(f"10 tokens, max_seq_len=9, {theta=}"), refused():
            make(public(transformer, "Transformer"), 1, 24, 4, max_seq_len=9, theta=theta)(torch.zeros(10, 24))


LENGTH = {"max_seq_len": 9}
WRONG = [(*sizes, LENGTH) for sizes in [(0, 24, 4), (-1, 24, 4), (1, 24, 5), (1, 24, 0), (1, 24, 8), (1, 24, 4, 0)]]
WRONG += [(1, 24, 4, {"max_seq_len": 0}), (1, 24, 4, LENGTH | {"theta": 0.0}), (1, 24, 4, LENGTH | {"eps": -1.0})]
promises_weights("transformer", "Transformer", 2, 96, 4, 160, max_seq_len=9, num_kv_heads=2, qk_norm=True)
promises_to_refuse("transformer", "Transformer", WRONG)

PROPERTIES = tuple(_registered)


# Finding the layers of a copy.

_numbers = itertools.count(1)


def load(target: str | os.PathLike[str]) -> dict[str, ModuleType]:
    """Import the layers of a folder, a .py file, or a module or package given by its dotted name; return them by name.

    A file is known by its name and what it defines, or else by a class of tinyblock's that it defines; what else lies
    in the folder is not imported. A folder with an __init__.py is imported as the package that it is, and any other one
    as a package of a name of its own.

    Raises:
        LookupError: there is no layer, or it cannot be told which file holds it.
        ImportError: a file that holds a layer cannot be imported.
    """
    path, name = Path(target), os.fspath(target)
    if path.is_dir():
        layers = _import_from(path.resolve(), _find(path))
    elif path.is_file() and path.suffix == ".py":
        layers = _import_from(path.resolve().parent, _find(path.parent, path.name))
    elif re.fullmatch(r"\w+(\.\w+)*", name):
        layers = _import_named(name)
    else:
        raise LookupError(f"{name} is not there: give a folder, a .py file, or a name such as my_project.layers")
    if not layers:
        classes = ", ".join(names[0] for names in LAYERS.values())
        raise LookupError(
            f"{name} holds no layer: it defines none of {classes}; give the folder or the file of the copies"
        )
    return layers


def _find(folder: Path, only: str | None = None) -> dict[str, str]:
    """Return the stem of the file of each layer; no file is imported for that."""
    defined: dict[str, dict[str, str]] = {}  # stem: name: source
    for path in [folder / only] if only else sorted(folder.glob("*.py")):
        if path.stem == "contract" or path.stem.startswith("test_"):
            continue
        try:
            tree = ast.parse(path.read_bytes(), path.name)
        except (SyntaxError, ValueError) as error:
            if only or path.stem in LAYERS:
                line = getattr(error, "lineno", "?")
                raise ImportError(f"{path}, line {line}: {type(error).__name__}: {error}") from None
            continue
        kinds = ast.ClassDef, ast.FunctionDef
        defined[path.stem] = {node.name: ast.unparse(node) for node in tree.body if isinstance(node, kinds)}

    def is_ours(source: str) -> bool:  # other people call classes Block as well
        return bool(re.match(r"(@.*\n)*class ", source) and re.search(r"\bd_(model|k)\b", source))

    found: dict[str, str] = {}
    for layer, names in LAYERS.items():
        stems = [stem for stem, its in defined.items() if any(is_ours(its.get(name, "")) for name in names)]
        if any(name in defined.get(layer, {}) for name in names):
            stems = [layer]
        if len(stems) > 1:
            raise LookupError(f"{folder}: {', '.join(stems)} all define {' or '.join(names)}: give the one file")
        if stems:
            [found[layer]] = stems
    return found


def _import_from(folder: Path, stems: Mapping[str, str]) -> dict[str, ModuleType]:
    """Import files of a folder, as part of the package that the folder is or else of one made for it."""
    root = next(parent for parent in (folder, *folder.parents) if not (parent / "__init__.py").is_file())
    parts = folder.relative_to(root).parts
    package = ".".join(parts)
    if not parts or package.count(".") >= len(parts):
        package, root = f"_tinyblock_copy_{next(_numbers)}", Path.cwd()
        sys.modules[package] = module = ModuleType(package)
        module.__path__ = [str(folder)]
    _make_importable(root)
    return _import_all(package, folder, stems)


def _import_named(name: str) -> dict[str, ModuleType]:
    _make_importable(Path.cwd())
    module = _import(name)
    if hasattr(module, "__path__"):
        folder = Path(next(iter(module.__path__)))
        if not folder.is_dir():
            raise LookupError(f"{name} is no folder: it comes from {folder}")
        return _import_all(name, folder, _find(folder))
    path = Path(getattr(module, "__file__", None) or "")
    if path.suffix != ".py" or not path.is_file():
        raise LookupError(f"{name} is no .py file: it comes from {path if path.name else 'Python itself'}")
    return dict.fromkeys(_find(path.parent, path.name), module)


def _make_importable(root: Path) -> None:
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    importlib.invalidate_caches()


def _import_all(package: str, folder: Path, stems: Mapping[str, str]) -> dict[str, ModuleType]:
    layers = {}
    for layer, stem in stems.items():
        layers[layer] = module = _import(f"{package}.{stem}".removesuffix(".__init__"))
        if module.__file__ is None or not (folder / f"{stem}.py").samefile(module.__file__):
            raise LookupError(f"{folder} is the package {package}, but here that is another, with {module.__file__}")
    return layers


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            raise LookupError(f"there is no module {name}: go to the folder of the project, or give a path") from None
        frames = traceback.extract_tb(error.__traceback__)
        theirs = [f for f in frames if f.line and f.filename not in (__file__, importlib.__file__)] or frames[-1:]
        folder = os.path.dirname(theirs[0].filename)
        file, line = [(f.filename, f.lineno) for f in theirs if os.path.dirname(f.filename) == folder][-1]
        if isinstance(error, SyntaxError):
            file, line = error.filename or file, error.lineno
        cause = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ImportError(f"{file}, line {line}: {cause}") from error
