"""What the feed-forward layers promise: W2 (SiLU(W1 x) * W3 x) for SwiGLU, and W2 activation(W1 x) for FeedForward."""

import math
from collections.abc import Callable
from itertools import product
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from . import harness
from .harness import ALLOWED, WITH_WEIGHTS, Case, Shape, State, given, promises, promises_all, public

DEFINES = ("SwiGLU", "FeedForward", "swiglu", "feed_forward")
SWIGLU_ROUNDINGS, FEED_FORWARD_ROUNDINGS = 5, 3  # of each matrix product, of the activation, and of the gated product


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


@promises_all(WITH_WEIGHTS, of="SwiGLU")
def swiglu_cases(ffn: ModuleType) -> list[Case]:
    def case(shape: Shape, **about: Any) -> Case:
        def formula(x: Tensor, state: State) -> Tensor:
            return swiglu(x, *(state[f"{name}.weight"] for name in ("w1", "w2", "w3")))

        return Case(public(ffn, "SwiGLU"), (5, 7), shape, formula, roundings=SWIGLU_ROUNDINGS, **about)

    past_float16 = case((2, 3, 5), scale=1e3, dtypes=(torch.float64, torch.float32, torch.bfloat16))
    return [case((2, 3, 5), compiled=True), case((5,)), case((0, 5)), past_float16]


@promises_all(WITH_WEIGHTS, of="FeedForward")
def feed_forward_cases(ffn: ModuleType) -> list[Case]:
    def case(shape: Shape, exact: Callable[[Tensor], Tensor] = gelu, compiled: bool = False, **options: Any) -> Case:
        def formula(x: Tensor, state: State) -> Tensor:
            return feed_forward(x, state["w1.weight"], state["w2.weight"], exact)

        about: Any = {"compiled": compiled, "roundings": FEED_FORWARD_ROUNDINGS}
        return Case(public(ffn, "FeedForward"), (5, 7), shape, formula, options, **about)

    relu = case((2, 3, 5), lambda x: x.clamp(min=0), activation=torch.relu)
    return [case((2, 3, 5), compiled=True), case((5,)), case((0, 5)), relu, case((4, 5), silu, activation=nn.SiLU())]


@promises("silu, gelu: equation")
def activations(ffn: ModuleType) -> None:
    for (name, formula), dtype in product({"silu": silu, "gelu": gelu}.items(), ALLOWED):
        with given(f"{name} of torch.linspace(-12, 12, 401)", dtype):
            x = torch.linspace(-12, 12, 401, dtype=torch.float64).to(dtype)
            actual, exact = public(ffn, name)(x), formula(x.double())
            # In float32, torch evaluates erf and exp to a few units of the last place of 1.
            least = 1e-14 if dtype == torch.float64 else 1e-6
            harness.close(actual, exact, 2 * torch.finfo(dtype).eps * exact.abs() + least, dtype)


def function_follows(ffn: ModuleType, name: str, formula: Any, roundings: int, weights: Any, *more: Any) -> None:
    calls = [([shape, *weights], *more) for shape in [(2, 3, 5), (5,), (2, 1, 3, 5)]]
    harness.function_follows(public(ffn, name), formula, calls, roundings=roundings)


@promises("glu: equation and gradients")
def glu_function(ffn: ModuleType) -> None:
    function_follows(ffn, "glu", glu, SWIGLU_ROUNDINGS - 1, [(7, 5), (7, 5)])


@promises("swiglu: equation and gradients")
def swiglu_function(ffn: ModuleType) -> None:
    function_follows(ffn, "swiglu", swiglu, SWIGLU_ROUNDINGS, [(7, 5), (5, 7), (7, 5)])


@promises("feed_forward: equation and gradients")
def feed_forward_function(ffn: ModuleType) -> None:
    for activation in ((), (torch.relu,)):
        function_follows(ffn, "feed_forward", feed_forward, FEED_FORWARD_ROUNDINGS, [(7, 5), (5, 7)], *activation)


@promises("d_ff is the multiple of 64 nearest to 8/3 d_model (SwiGLU)")
def swiglu_width(ffn: ModuleType) -> None:
    widths = {512: 1344, 64: 192, 24: 64, 1: 64, 36: 128, 59: 128, 61: 192}
    for d_model, d_ff in widths.items():
        state = {"w1.weight": (d_ff, d_model), "w2.weight": (d_model, d_ff), "w3.weight": (d_ff, d_model)}
        harness.has_state(public(ffn, "SwiGLU"), (d_model,), state)


@promises("d_ff is 4 d_model (FeedForward)")
def feed_forward_width(ffn: ModuleType) -> None:
    harness.has_state(public(ffn, "FeedForward"), (12,), {"w1.weight": (48, 12), "w2.weight": (12, 48)})


BAD = (0, 4), (-1, 4), (4, 0), (4, -2)
promises("initial weights (SwiGLU)")(lambda ffn: harness.draws_weights(public(ffn, "SwiGLU"), 96, 160))
promises("initial weights (FeedForward)")(lambda ffn: harness.draws_weights(public(ffn, "FeedForward"), 96, 160))
promises("bad hyperparameters refused (SwiGLU)")(lambda ffn: harness.refuses(public(ffn, "SwiGLU"), *BAD))
promises("bad hyperparameters refused (FeedForward)")(lambda ffn: harness.refuses(public(ffn, "FeedForward"), *BAD))
