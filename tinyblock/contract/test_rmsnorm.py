"""RMSNorm: y = x / sqrt(mean(x^2) + eps) * weight.

It computes in float32 or wider, and rounds once to the dtype of x.
"""

import functools
import math

import pytest
import torch

from .checks import EPS, HALVES, Case, case_of, check_close, for_each, name_of
from .every_layer import EveryLayer, check_rounds_once, numbers


def rms_norm(x, weight, eps=EPS):
    mean_square = (x * x).sum(-1, keepdim=True) / x.shape[-1]
    return x / (mean_square + eps) ** 0.5 * weight


def of_weights(x, weights, d_model, eps):
    return rms_norm(x, weights.get_of("weight", d_model), eps)


case = functools.partial(case_of, "rmsnorm", "RMSNorm", of_weights, d_model=6, eps=EPS)


class TestRMSNorm(EveryLayer):
    cases = {
        "two batch axes": case(),
        "no batch axis": case(axes=(), is_common=False),
        "empty batch": case(axes=(0,), is_common=False),
        "where eps matters": case(axes=(5,), d_model=33, eps=3e-6, x_scale=1e-3),
        "squares beyond float16": case(axes=(2, 32), d_model=257, x_scale=12000.0),
        "function": Case(
            "rmsnorm",
            "rms_norm",
            rms_norm,
            shape=(2, 3, 7),
            options={"eps": 0.5},
            weights=[(7,)],
        ),
    }
    typical = ["two batch axes"]
    rejected = {"eps": (0.0, math.nan, math.inf), "d_model": (0,)}

    @numbers
    @pytest.mark.parametrize("half", HALVES, ids=name_of)
    def test_rounds_once(self, half, device):
        for_each(self.every(), lambda case: check_rounds_once(case, half, device))

    @pytest.mark.parametrize(
        ("dtype", "of_gains"),
        [
            # As under autocast.
            pytest.param(torch.float16, torch.float32, marks=numbers),
            pytest.param(torch.bfloat16, torch.float32, marks=numbers),
            (torch.float32, torch.bfloat16),
            (torch.bfloat16, torch.float16),
            (torch.float32, torch.float64),
            (torch.float64, torch.float32),
        ],
        ids=name_of,
    )
    def test_gains_of_another_dtype(self, dtype, of_gains, device):
        """The dtype of the result is the dtype of x, and there is one rounding."""

        def check(case):
            norm = case.build(device, of_gains)
            if not any(gains.requires_grad for gains in norm.parameters()):
                pytest.skip("an adapter copies its norm weights, in a dtype of its own")
            x, _ = case.arguments(device, dtype)
            result = norm(x)
            case.check_dtype(result, dtype)
            exact = case.exact(norm, x)
            # The norm of the error of one rounding is about 0.2 eps, of two 0.28 eps.
            one_rounding = 0.25 * torch.finfo(dtype).eps
            wide = torch.promote_types(dtype, torch.float32)
            roundings_in_wide = 8 * torch.finfo(wide).eps
            allowed = (one_rounding + roundings_in_wide) * exact.norm()
            check_close("result", result, exact, allowed)

        names = ("where eps matters", "squares beyond float16")
        for_each({name: self.cases[name] for name in names}, check)
