"""RMSNorm beyond its contract: what it says when it refuses, and that torch's own operation does the work."""

import math

import pytest
import torch

from tinyblock import RMSNorm


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((0,), "0"),
        ((-3,), "-3"),
        ((4, 0.0), "0.0"),
        ((4, -1e-5), "-1e-05"),
        ((4, math.nan), "nan"),
        ((4, math.inf), "inf"),
    ],
)
def test_rms_norm_rejects_bad_hyperparameters(arguments, named):
    with pytest.raises(ValueError, match=named):
        RMSNorm(*arguments)


def test_rms_norm_says_its_size_and_eps():
    assert repr(RMSNorm(5, 1e-6)) == "RMSNorm(5, eps=1e-06)"


def test_rms_norm_is_one_operation_of_torch():
    targets = [str(node.target) for node in torch.export.export(RMSNorm(8), (torch.randn(3, 8),)).graph.nodes]
    assert targets == ["p_weight", "x", "aten.rms_norm.default", "output"]
