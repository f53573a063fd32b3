"""What RMSNorm guarantees: x / sqrt(mean(x^2) + eps) * weight, rounded once to the dtype of x."""

import math
from itertools import product
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import harness
from .harness import HALVES, WITH_WEIGHTS, Case, Shape, State, context, guarantees, guarantees_all, randn, require

DEFINES = ("RMSNorm", "rms_norm")


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    return x / ((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps) ** 0.5 * weight


@guarantees_all(WITH_WEIGHTS)
def cases(rmsnorm: ModuleType) -> list[Case]:
    def case(shape: Shape, *eps: float, **about: Any) -> Case:
        def formula(x: Tensor, state: State) -> Tensor:
            return rms_norm(x, state["weight"], *eps)

        return Case(require(rmsnorm, "RMSNorm"), (shape[-1], *eps), shape, formula, rounds_once=True, **about)

    where_eps_counts = case((5, 33), 3e-6, scale=1e-3), case((2, 8), scale=0.0)
    return [case((2, 3, 7), compiled=True), *where_eps_counts, *map(case, [(6,), (3, 1), (1, 6), (0, 6), (2, 1, 4, 6)])]


@guarantees("rms_norm: equation and gradients")
def function(rmsnorm: ModuleType) -> None:
    calls: list[Any] = [([(2, 3, 7), (7,)],), ([(7,), (7,)], 0.5), ([(2, 1, 3, 7), (7,)], 1e-3)]
    harness.function_matches(require(rmsnorm, "rms_norm"), rms_norm, calls, rounds_once=True)


@guarantees("one rounding, without overflow of the squares")
def rounds_once(rmsnorm: ModuleType) -> None:
    def by_module(x: Tensor, weight: Tensor) -> Tensor:
        norm = require(rmsnorm, "RMSNorm")(len(weight)).to(weight.dtype)
        norm.weight.data.copy_(weight)
        return norm(x)

    inputs = {f"x of shape (64, 257), seed 0 * {scale}": randn(64, 257) * scale for scale in (1e-3, 1.0, 200.0)}
    inputs["x of shape (64, 257), all 60000"] = torch.full((64, 257), 6e4, dtype=torch.float64)  # squared, no float16
    dtypes = [pair for half in HALVES for pair in ((half, half), (half, torch.float32), (torch.float32, half))]
    forwards = [by_module, *filter(None, [getattr(rmsnorm, "rms_norm", None)])]
    for forward, (name, x), (dtype, gains) in product(forwards, inputs.items(), dtypes):
        with context(forward.__name__, name, dtype, f"gains of seed 1 * 0.3 + 1 in {gains}"):
            weight = (1 + 0.3 * randn(257, seed=1)).to(gains)
            exact, actual = rms_norm(x.to(dtype).double(), weight.double()), forward(x.to(dtype), weight)
            allowed = harness.half_ulp(exact, dtype) if dtype in HALVES else 1e-6 * exact.abs()
            harness.close(actual, exact, allowed, dtype)


INVALID: Any = {"d_model": (0, -3), "eps": (0.0, -1e-5, math.nan, math.inf)}
guarantees("initial weights")(lambda rmsnorm: harness.draws_weights(require(rmsnorm, "RMSNorm"), 7))
guarantees(harness.REJECTED)(lambda rmsnorm: harness.rejects(require(rmsnorm, "RMSNorm"), {"d_model": 4}, **INVALID))
