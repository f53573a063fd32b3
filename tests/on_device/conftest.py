"""The device of a test: the CPU, at tiny sizes, or a GPU, which `-m cuda` selects."""

from typing import Any

import pytest
import torch

DEVICES: list[Any] = ["cpu"]
if torch.cuda.is_available():
    DEVICES.append(pytest.param("cuda", marks=pytest.mark.cuda))


@pytest.fixture(params=DEVICES)
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("requires a GPU")
    return request.param


@pytest.fixture
def seq(device):
    """A number of tokens, which fills no whole number of a kernel's tiles."""
    return {"cpu": 12, "cuda": 720}[device]


@pytest.fixture
def mask(device, seq):
    """A random mask, in which the first token may attend to nothing."""
    random = torch.rand(seq, seq, generator=torch.Generator().manual_seed(2)) < 0.7
    mask = random | torch.eye(seq, dtype=torch.bool)
    mask[0] = False
    return mask.to(device)
