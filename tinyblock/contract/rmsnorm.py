"""What RMSNorm guarantees: x / sqrt(mean(x^2) + eps) * weight, rounded once to the dtype of x."""

import math
from itertools import product
from typing import Any

import torch
from torch import Tensor

from . import harness
from .harness import (
    EVERY_LAYER,
    HALVES,
    Case,
    Layer,
    Shape,
    State,
    context,
    guarantees,
    randn,
)


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    return x / ((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps) ** 0.5 * weight


@guarantees(EVERY_LAYER)
def cases(rmsnorm: Layer) -> list[Case]:
    def case(shape: Shape, *eps: float, **about: Any) -> Case:
        def formula(x: Tensor, state: State) -> Tensor:
            return rms_norm(x, state["weight"], *eps)

        return Case(
            rmsnorm.RMSNorm,
            (shape[-1], *eps),
            shape,
            formula,
            rounds_once=True,
            **about,
        )

    where_eps_counts = case((5, 33), 3e-6, scale=1e-3), case((2, 8), scale=0.0)
    large_if_squared = case((64, 257), scale=12000.0)
    shapes: list[Shape] = [(6,), (3, 1), (1, 6), (0, 6), (2, 1, 4, 6)]
    return [case((2, 3, 7)), *where_eps_counts, large_if_squared, *map(case, shapes)]


calls: list[Any] = [
    ([(2, 3, 7), (7,)],),
    ([(7,), (7,)], 0.5),
    ([(2, 1, 3, 7), (7,)], 1e-3),
]
harness.guarantees_function("rmsnorm", "rms_norm", rms_norm, *calls, rounds_once=True)


@guarantees("gains of another dtype")
def takes_other_gains(rmsnorm: Layer) -> None:
    """Round once, in the dtype of x, as where gains stay in float32 under autocast."""
    for dtypes, scale in product(
        [(half, torch.float32) for half in HALVES], (1e-3, 1.0, 12000.0)
    ):
        for dtype, gains in (dtypes, dtypes[::-1]):
            x, norm = (randn(64, 257) * scale).to(dtype), rmsnorm.RMSNorm(257).to(gains)
            harness.fill(norm)
            with context(
                f"RMSNorm(257) in {gains} of x of shape (64, 257), seed 0 * {scale}, {dtype}"
            ):
                exact = rms_norm(x.double(), norm.weight.double())
                allowed = (
                    harness.half_ulp(exact, dtype)
                    if dtype in HALVES
                    else 1e-6 * exact.abs()
                )
                harness.close(norm(x), exact, allowed, dtype)


INVALID: Any = {"d_model": (0, -3), "eps": (0.0, -1e-5, math.nan, math.inf)}
guarantees("initial weights")(lambda rmsnorm: harness.draws_weights(rmsnorm.RMSNorm, 7))
guarantees(harness.REJECTED)(
    lambda rmsnorm: harness.rejects(rmsnorm.RMSNorm, {"d_model": 4}, **INVALID)
)
