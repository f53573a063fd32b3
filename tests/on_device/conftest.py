"""Where the layers are tried: on CUDA, or by `--device cpu --quick` through the same code at tiny sizes."""

import os
from dataclasses import dataclass

import pytest
import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before cuBLAS starts: else it cannot be deterministic


def pytest_addoption(parser):
    parser.addoption("--device", help="cuda, or cpu to walk the same code (default: CUDA where there is one)")
    parser.addoption("--quick", action="store_true", help="tiny sizes")


@pytest.fixture
def device(request):
    name = request.config.getoption("device", None) or "cuda"
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA here: --device cpu walks the same code")
    return torch.device(name)


@dataclass(frozen=True)
class Sizes:
    d_model: int
    heads: int
    kv_heads: int
    seq: int
    longest: int


@pytest.fixture
def sizes(request):
    return Sizes(64, 4, 2, 16, 32) if request.config.getoption("quick", False) else Sizes(512, 8, 2, 256, 4096)
