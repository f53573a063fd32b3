"""Measure a model in a test: by a clock that operations advance, beside given rates."""

from contextlib import nullcontext

import pytest
import torch
from lab.timing import Clock
from profiling.measure import measure
from profiling.runs import Settings
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


class Ticks(Clock, TorchDispatchMode):
    """A clock that operations advance.

    takes: the seconds of operations; others take none. If it is empty, each takes one.
    pace: how many times as long everything takes.
    """

    supports_higher_order_operators = True

    def __init__(self):
        super().__init__()
        self.time = 0.0
        self.takes = {}
        self.pace = 1

    def now(self):
        return self.time

    def wait(self):
        """Nothing is launched, so there is nothing to wait for."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "_overloadpacket", function).__name__
        self.time += self.pace * (self.takes.get(name, 0.0) if self.takes else 1.0)
        return function(*args, **(kwargs or {}))


class Calls(nn.Module):
    """Calls a function of its input."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.fixture
def clock():
    return Ticks()


@pytest.fixture
def profile_of(clock):
    """Return a function that measures a module, or a function of x, in a mode.

    x has 2 sequences of 5 tokens of width 4, unless inputs are given. The machine computes
    1,000 FLOPs, copies 4,000 bytes, and calls 100 operations on one number in a second.
    """

    def rates(device, dtypes, _):
        kinds = [f"matmul {str(dtype).removeprefix('torch.')}" for dtype in dtypes]
        samplers = dict.fromkeys(kinds, lambda: clock.pace / 1000)
        samplers["memory copy"] = lambda: 1 / 4000
        return samplers | {"an operation on one number": lambda: 0.01}

    def run(
        model,
        mode="train",
        inputs=None,
        by=clock,
        pace=(1, 1, 1),
        device="cpu",
        compiles=False,
    ):
        """Measure three rounds, each at its pace, by our clock or another one."""
        settings = Settings(
            torch.device(device), torch.float32, mode, compiles, rounds=3
        )
        module = model if isinstance(model, nn.Module) else Calls(model)
        built = (module, inputs) if inputs else module
        paces = iter(pace)

        def progress(doing):
            clock.pace = next(paces) if doing.startswith("round ") else 1

        ticking = clock if by is clock else nullcontext()
        with torch.set_grad_enabled(settings.train), ticking:
            return measure(
                lambda *_: built,
                (2, 5, 4),
                "a model",
                settings,
                by,
                rates,
                progress=progress,
            )

    return run
