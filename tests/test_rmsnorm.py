"""What of RMSNorm is no part of the contract in tinyblock/contract.py."""

import pytest
import torch

from tinyblock import RMSNorm


@pytest.mark.parametrize(
    ("arguments", "named"), [((0,), "0"), ((-3,), "-3"), ((4, 0.0), "0.0"), ((4, -1e-5), "-1e-05")]
)
def test_rms_norm_rejects_bad_hyperparameters(arguments, named):
    with pytest.raises(ValueError, match=named):
        RMSNorm(*arguments)


@pytest.mark.parametrize("eps", [float("nan"), float("inf")])
def test_rms_norm_rejects_eps_that_is_not_finite(eps):
    with pytest.raises(ValueError, match=str(eps)):
        RMSNorm(4, eps)


def test_rms_norm_reset_parameters_after_meta():
    norm = RMSNorm(5, device="meta").to_empty(device="cpu")
    norm.reset_parameters()
    assert torch.equal(norm.weight, torch.ones(5))
    assert repr(norm) == "RMSNorm(5, eps=1e-05)"
