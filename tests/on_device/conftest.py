"""A GPU, and sizes at which its kernels differ from each other."""

import pytest
import torch

SEQ = 720  # fills no whole number of a kernel's tiles

if not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def device():
    return "cuda"


@pytest.fixture
def seq():
    return SEQ


@pytest.fixture
def mask():
    """A random mask, in which the first token may attend to nothing."""
    random = torch.rand(SEQ, SEQ, generator=torch.Generator().manual_seed(2)) < 0.7
    mask = random | torch.eye(SEQ, dtype=torch.bool)
    mask[0] = False
    return mask.to("cuda")
