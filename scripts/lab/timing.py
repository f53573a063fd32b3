"""Times that can be compared: warmed up, synchronized, and taken in turns."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from timeit import Timer

import torch

Run = Callable[[], object]
# Runs something, and returns the seconds of one run.
Sampler = Callable[[], float]


@dataclass(frozen=True)
class Spread:
    """The median of samples, and their 20th and 80th percentile."""

    median: float
    p20: float
    p80: float

    @classmethod
    def of(cls, samples: list[float]) -> "Spread":
        levels = torch.tensor([0.5, 0.2, 0.8], dtype=torch.float64)
        return cls(*torch.tensor(samples).double().quantile(levels).tolist())

    @property
    def range(self) -> float:
        """Return the distance from p20 to p80."""
        return self.p80 - self.p20

    @property
    def width(self) -> float:
        """Return the distance from p20 to p80 as a share of the median."""
        return self.range / self.median if self.median else 0.0


def clock() -> float:
    """Return the time in seconds, once the GPU has finished what was launched."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def wall_sampler(run: Run, least_seconds: float = 0.01) -> Sampler:
    """Return a sampler of the time that a caller waits for `run`, and for the GPU.

    A sample repeats the call for at least `least_seconds`.
    """
    timer = Timer("run()", timer=clock, globals={"run": run})
    timer.timeit(2)  # allocates, and compiles
    calls = math.ceil(least_seconds / min(timer.repeat(3, number=1))) or 1

    def sample() -> float:
        if calls > 1:
            run()  # the previous candidate has filled the caches
        return timer.timeit(calls) / calls

    return sample


def interleave(samplers: Mapping[str, Sampler], rounds: int) -> dict[str, list[float]]:
    """Take one sample of each in every round; every other round goes backward.

    So if the machine slows down, it slows all of them.
    """
    samples: dict[str, list[float]] = {name: [] for name in samplers}
    names = list(samplers)
    for _ in range(rounds):
        for name in names:
            samples[name].append(samplers[name]())
        names.reverse()
    return samples
