"""What feed-forward layers guarantee: W2 (SiLU(W1 x) * W3 x) for SwiGLU, and W2 activation(W1 x) for FeedForward."""

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from . import harness
from .harness import REJECTED, WITH_WEIGHTS, Case, Shape, State, context, guarantees, guarantees_all, require

DEFINES = ("SwiGLU", "FeedForward", "swiglu", "feed_forward")


def sigmoid(x: Tensor) -> Tensor:
    return (1 + (x / 2).tanh()) / 2  # also where exp(-x) would overflow


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


@guarantees_all(WITH_WEIGHTS, of="SwiGLU")
def swiglu_cases(ffn: ModuleType) -> list[Case]:
    def case(shape: Shape, **about: Any) -> Case:
        def formula(x: Tensor, state: State) -> Tensor:
            return swiglu(x, *(state[f"{name}.weight"] for name in ("w1", "w2", "w3")))

        return Case(require(ffn, "SwiGLU"), (5, 7), shape, formula, **about)

    beyond_float16 = case((2, 3, 5), scale=1e3, dtypes=(torch.float64, torch.float32, torch.bfloat16))
    return [case((2, 3, 5), compiled=True), case((5,)), case((0, 5)), beyond_float16]


@guarantees_all(WITH_WEIGHTS, of="FeedForward")
def feed_forward_cases(ffn: ModuleType) -> list[Case]:
    def case(shape: Shape, exact: Callable[[Tensor], Tensor] = gelu, compiled: bool = False, **options: Any) -> Case:
        def formula(x: Tensor, state: State) -> Tensor:
            return feed_forward(x, state["w1.weight"], state["w2.weight"], exact)

        return Case(require(ffn, "FeedForward"), (5, 7), shape, formula, options, compiled=compiled)

    relu = case((2, 3, 5), lambda x: x.clamp(min=0), activation=torch.relu)
    return [case((2, 3, 5), compiled=True), case((5,)), case((0, 5)), relu, case((4, 5), silu, activation=nn.SiLU())]


def guarantees_function(name: str, formula: Any, *weights: Shape, arguments: tuple[Any, ...] = ((),)) -> None:
    @guarantees(f"{name}: equation and gradients")
    def function(ffn: ModuleType) -> None:
        calls = [([x, *weights], *more) for x in ((2, 3, 5), (5,), (2, 1, 3, 5)) for more in arguments]
        harness.function_matches(require(ffn, name), formula, calls)


guarantees_function("silu", silu)
guarantees_function("gelu", gelu)
guarantees_function("glu", glu, (7, 5), (7, 5))
guarantees_function("swiglu", swiglu, (7, 5), (5, 7), (7, 5))
guarantees_function("feed_forward", feed_forward, (7, 5), (5, 7), arguments=((), (torch.relu,)))


@guarantees("d_ff is the multiple of 64 nearest to 8/3 d_model (SwiGLU)")
def swiglu_width(ffn: ModuleType) -> None:
    for d_model, d_ff in {512: 1344, 64: 192, 24: 64, 1: 64, 36: 128, 59: 128, 61: 192}.items():
        has_width(require(ffn, "SwiGLU"), d_model, d_ff)


@guarantees("d_ff is 4 d_model (FeedForward)")
def feed_forward_width(ffn: ModuleType) -> None:
    has_width(require(ffn, "FeedForward"), 12, 48)


def has_width(cls: Any, d_model: int, d_ff: int) -> None:
    for name, weight in cls(d_model).state_dict().items():
        with context(f"{name} of {cls.__name__}({d_model})"):
            harness.close(
                weight, torch.empty(d_model, d_ff) if name == "w2.weight" else torch.empty(d_ff, d_model), math.inf
            )


def guarantees_construction(name: str) -> None:
    invalid = {"d_model": (0, -1), "d_ff": (0, -2)}
    guarantees(f"initial weights ({name})")(lambda ffn: harness.draws_weights(require(ffn, name), 96, 160))
    guarantees(f"{REJECTED} ({name})")(lambda ffn: harness.rejects(require(ffn, name), {"d_model": 4}, **invalid))


guarantees_construction("SwiGLU")
guarantees_construction("FeedForward")
