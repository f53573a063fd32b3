"""Times that can be compared: warmed up, synchronized, and taken alternately."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from timeit import Timer
from typing import Any

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
        return cls(
            *torch.tensor(samples, dtype=torch.float64).quantile(levels).tolist()
        )

    @property
    def range(self) -> float:
        """Return the distance from p20 to p80."""
        return self.p80 - self.p20

    @property
    def width(self) -> float:
        """Return the distance from p20 to p80 as a share of the median."""
        return self.range / self.median if self.median else 0.0


class Clock:
    """The host's clock."""

    def now(self) -> float:
        """Return the time in seconds, once the GPU has finished what was launched."""
        self.wait()
        return time.perf_counter()

    def wait(self) -> None:
        """Wait until the GPU has finished what was launched."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()

    def worked(self) -> float:
        """Return the seconds for which this thread had a processor."""
        return time.thread_time()

    def begin(self) -> Any:
        """Return the moment at which a part begins."""
        return self.now()

    def end(self) -> Any:
        """Return the moment at which a part ends."""
        return self.now()

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the time between two moments."""
        return end - begin


class GpuClock(Clock):
    """The host's clock, with parts of a run by the GPU's own: its moments are events."""

    def begin(self) -> torch.cuda.Event:
        torch.cuda._sleep(4_000_000)  # 2 ms, while the host launches the part
        return self.end()

    def end(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Return the time between two moments. The GPU must have reached them."""
        return 1e-3 * begin.elapsed_time(end)


HOST = Clock()


def clock_of(device: torch.device) -> Clock:
    return GpuClock() if device.type == "cuda" else HOST


def wall_sampler(run: Run, least_seconds: float = 0.01, clock: Clock = HOST) -> Sampler:
    """Return a sampler of the time that a caller waits for `run`, and for the GPU.

    A sample repeats the call for at least `least_seconds`.
    """
    timer = Timer("run()", timer=clock.now, globals={"run": run})
    timer.timeit(2)  # allocates, and compiles
    calls = math.ceil(least_seconds / min(timer.repeat(3, number=1))) or 1

    def sample() -> float:
        if calls > 1:
            run()  # the previous candidate has filled the caches
        return timer.timeit(calls) / calls

    return sample


def interleave(
    samplers: Mapping[str, Sampler],
    rounds: int,
    progress: Callable[[str], None] = lambda doing: None,
) -> dict[str, list[float]]:
    """Take one sample of each in every round; every other round goes backward.

    So if the machine slows down, it slows all of them.
    """
    samples: dict[str, list[float]] = {name: [] for name in samplers}
    names = list(samplers)
    for number in range(1, 1 + rounds):
        progress(f"round {number} of {rounds}")
        for name in names:
            samples[name].append(samplers[name]())
        names.reverse()
    return samples
