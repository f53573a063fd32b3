"""Measure a model in a test: by a clock that operations advance, beside given rates."""

from contextlib import nullcontext

import pytest
import torch
from lab.timing import Clock
from profiling.measure import measure
from profiling.runs import Settings
from torch.utils._python_dispatch import TorchDispatchMode


class Ticks(Clock, TorchDispatchMode):
    """A clock that operations advance: some by the seconds of `takes`, others by `other`.

    growth: how much longer each operation takes than the one before it.
    """

    supports_higher_order_operators = True

    def __init__(self):
        super().__init__()
        self.time = 0.0
        self.takes = {}
        self.other = 1.0
        self.growth = self.slower = 1.0

    def now(self):
        return self.time

    def wait(self):
        """Nothing is launched, so there is nothing to wait for."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "_overloadpacket", function).__name__
        self.time += self.slower * self.takes.get(name, self.other)
        self.slower *= self.growth
        return function(*args, **(kwargs or {}))


@pytest.fixture
def clock():
    return Ticks()


@pytest.fixture
def profile_of(clock):
    """Return a function that measures a model in a mode.

    The machine computes 1,000 FLOPs, copies 4,000 bytes, and calls 100 operations on
    one number in a second.
    """

    def rates(device, dtypes, clock):
        matmuls = {
            f"matmul {str(dtype).removeprefix('torch.')}": lambda: 1 / 1000
            for dtype in dtypes
        }
        others = {"memory copy": 1 / 4000, "an operation on one number": 0.01}
        return matmuls | {name: (lambda t=t: t) for name, t in others.items()}

    def run(model, shape, mode="train", clock=clock, **options):
        settings = Settings(
            torch.device("cpu"), torch.float32, mode, rounds=3, **options
        )
        build = (lambda *_: model) if isinstance(model, torch.nn.Module) else model
        ticking = clock if isinstance(clock, Ticks) else nullcontext()
        with torch.set_grad_enabled(settings.train), ticking:
            return measure(build, shape, "a model", settings, clock, rates)

    return run
