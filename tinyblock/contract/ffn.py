"""What feed-forward layers guarantee: W2 (SiLU(W1 x) * W3 x) for SwiGLU, and W2 activation(W1 x) for FeedForward."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from . import harness
from .harness import (
    EVERY_LAYER,
    REJECTED,
    Case,
    Layer,
    Shape,
    State,
    context,
    guarantees,
)


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


def feed_forward(
    x: Tensor, w1: Tensor, w2: Tensor, activation: Callable[[Tensor], Tensor] = gelu
) -> Tensor:
    return activation(x @ w1.T) @ w2.T


@guarantees(EVERY_LAYER, of="SwiGLU")
def swiglu_cases(ffn: Layer) -> list[Case]:
    def case(shape: Shape, **about: Any) -> Case:
        def formula(x: Tensor, state: State) -> Tensor:
            return swiglu(x, *(state[f"{name}.weight"] for name in ("w1", "w2", "w3")))

        return Case(ffn.SwiGLU, (5, 7), shape, formula, **about)

    beyond_float16 = case(
        (2, 3, 5), scale=1e3, dtypes=(torch.float64, torch.float32, torch.bfloat16)
    )
    return [case((2, 3, 5)), case((5,)), case((0, 5)), beyond_float16]


@guarantees(EVERY_LAYER, of="FeedForward")
def feed_forward_cases(ffn: Layer) -> list[Case]:
    def case(
        shape: Shape, exact: Callable[[Tensor], Tensor] = gelu, **options: Any
    ) -> Case:
        def formula(x: Tensor, state: State) -> Tensor:
            return feed_forward(x, state["w1.weight"], state["w2.weight"], exact)

        return Case(ffn.FeedForward, (5, 7), shape, formula, options)

    relu = case((2, 3, 5), lambda x: x.clamp(min=0), activation=torch.relu)
    return [
        case((2, 3, 5)),
        case((5,)),
        case((0, 5)),
        relu,
        case((4, 5), silu, activation=nn.SiLU()),
    ]


def guarantees_function(
    name: str, formula: Any, *weights: Shape, arguments: tuple[Any, ...] = ((),)
) -> None:
    calls = [
        ([x, *weights], *more)
        for x in ((2, 3, 5), (5,), (2, 1, 3, 5))
        for more in arguments
    ]
    harness.guarantees_function("ffn", name, formula, *calls)


guarantees_function("silu", silu)
guarantees_function("gelu", gelu)
guarantees_function("glu", glu, (7, 5), (7, 5))
guarantees_function("swiglu", swiglu, (7, 5), (5, 7), (7, 5))
guarantees_function(
    "feed_forward", feed_forward, (7, 5), (5, 7), arguments=((), (torch.relu,))
)


def guarantees_construction(name: str, default: str, widths: dict[int, int]) -> None:
    @guarantees(f"d_ff is {default} ({name})")
    def has_width(ffn: Layer) -> None:
        for d_model, d_ff in widths.items():
            with context(f"w1.weight of {name}({d_model})"):
                weight = getattr(ffn, name)(d_model).state_dict()["w1.weight"]
                harness.close(weight, torch.empty(d_ff, d_model), math.inf)

    invalid = {"d_model": (0, -1), "d_ff": (0, -2)}
    guarantees(f"initial weights ({name})")(
        lambda ffn: harness.draws_weights(getattr(ffn, name), 96, 160)
    )
    guarantees(f"{REJECTED} ({name})")(
        lambda ffn: harness.rejects(getattr(ffn, name), {"d_model": 4}, **invalid)
    )


nearest = {512: 1344, 64: 192, 24: 64, 1: 64, 36: 128, 59: 128, 61: 192}
guarantees_construction("SwiGLU", "the multiple of 64 nearest to 8/3 d_model", nearest)
guarantees_construction("FeedForward", "4 d_model", {12: 48})
