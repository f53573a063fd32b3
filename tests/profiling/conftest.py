"""Measure a model in a test: with rates that are given, and little time."""

from functools import partial

import pytest
import torch
from lab.timing import wall_sampler
from profiling.measure import measure
from profiling.subject import Settings

CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def rates():
    """Return a function that replaces the measured rates by what it is given."""

    def replace(patch, flops_per_s=1e9, bytes_per_s=1e9, small_operations_per_s=1e9):
        def samplers(device, dtypes):
            matmuls = {
                f"matmul {str(dtype).removeprefix('torch.')}": lambda: 1 / flops_per_s
                for dtype in dtypes
            }
            copy = {"memory copy": lambda: 1 / bytes_per_s}
            small = {"an operation on one number": lambda: 1 / small_operations_per_s}
            return matmuls | copy | small

        patch.setattr("profiling.times.rate_samplers", samplers)
        patch.setattr("lab.machine._commit", lambda: "unknown")  # git is slow

    return replace


@pytest.fixture
def profile_of(rates, monkeypatch):
    """Return a function that measures a model once, in a mode."""
    rates(monkeypatch)
    once = partial(wall_sampler, least_seconds=0.0)  # a sample is one run
    for module in ("parts", "times"):
        monkeypatch.setattr(f"profiling.{module}.wall_sampler", once)

    def run(model, shape, mode="train", trace=None, **options):
        settings = Settings(CPU, torch.float32, mode, rounds=1, **options)
        build = (lambda *_: model) if isinstance(model, torch.nn.Module) else model
        with torch.set_grad_enabled(settings.train):
            return measure(build, shape, "a model", settings, trace)

    return run
