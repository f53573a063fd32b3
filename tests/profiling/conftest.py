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
    others: the share of its time in which other programs have the processor.
    """

    supports_higher_order_operators = True

    def __init__(self):
        super().__init__()
        self.time = 0.0
        self.takes = {}
        self.pace = 1
        self.others = 0.0

    def now(self):
        return self.time

    def worked(self):
        return (1 - self.others) * self.time

    def wait(self):
        """Nothing is launched, so there is nothing to wait for."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "_overloadpacket", function).__name__
        self.time += self.pace * (self.takes.get(name, 0.0) if self.takes else 1.0)
        return function(*args, **(kwargs or {}))


@pytest.fixture
def clock():
    return Ticks()


@pytest.fixture
def profile_of(clock):
    """Return a function that measures a module, or a function of x, in three rounds.

    x has 2 sequences of 5 tokens of width 4, unless inputs are given. The machine computes
    1,000 FLOPs, copies 4,000 bytes, and calls 100 operations on one number in a second.
    """

    def rates(device, dtypes, _):
        """Return samplers of the seconds of a FLOP, a byte, and a small operation."""
        kinds = [f"matmul {str(dtype).removeprefix('torch.')}" for dtype in dtypes]
        samplers = dict.fromkeys(kinds, lambda: clock.pace / 1000)
        samplers["memory copy"] = lambda: 1 / 4000
        return samplers | {"an operation on one number": lambda: 0.01}

    def run(
        model,
        mode="train",
        inputs=None,
        by=clock,
        paces=(1, 1, 1),
        device="cpu",
        compiles=False,
    ):
        """Measure by our clock, in which each round has its pace, or by another one."""
        settings = Settings(
            torch.device(device), torch.float32, mode, compiles, rounds=len(paces)
        )
        if not isinstance(model, nn.Module):
            function, model = model, nn.Module()
            model.forward = function
        built = model if inputs is None else (model, inputs)
        left = iter(paces)

        def progress(doing):
            clock.pace = next(left) if doing.startswith("round ") else 1

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
