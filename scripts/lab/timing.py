"""Timings that can be compared: warmed up, synchronized, interleaved, and reported with their spread."""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from timeit import Timer
from typing import TypeVar

import torch

from .records import require_at_least

Key = TypeVar("Key")
Clock = Callable[[], float]


def clock() -> float:
    """Return the time in seconds, once the GPU, if this process uses one, has finished its work."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


@dataclass(frozen=True)
class Spread:
    """A median with the 20th and 80th percentile of its samples, in the unit of the samples.

    Raises:
        ValueError: There are no samples, or the percentiles are in another order.
    """

    median: float
    p20: float
    p80: float
    samples: int

    def __post_init__(self) -> None:
        require_at_least(1, samples=self.samples)
        if self.p20 > self.median or self.median > self.p80:
            raise ValueError(
                f"p20, median and p80 must be in this order, got {self.p20}, {self.median} and {self.p80}"
            )

    @classmethod
    def of(cls, samples: list[float]) -> "Spread":
        if len(samples) < 2:
            [only] = samples
            return cls(median=only, p20=only, p80=only, samples=1)
        p20, _, _, p80 = statistics.quantiles(samples, n=5, method="inclusive")
        median = statistics.median(samples)
        # Of equal samples, interpolation may round one percentile up and the other one down.
        return cls(
            median=median,
            p20=min(p20, median),
            p80=max(p80, median),
            samples=len(samples),
        )


def interleave(
    runs: Mapping[Key, Callable[[], object]],
    rounds: int = 15,
    sample_seconds: float = 0.05,
    warmup_calls: int = 3,
    on_sample: Callable[[], object] = lambda: None,
    agree: Callable[[int], int] = lambda calls: calls,
    clock: Clock = clock,
) -> dict[Key, list[float]]:
    """Time each run once a round and return its seconds per call, one sample a round.

    If the machine slows down, all runs slow down alike, so that the samples of one round can be compared. Every other
    round goes in reverse order.

    Args:
        runs: what to time.
        rounds: the number of samples of each run.
        sample_seconds: a sample repeats the call for at least this long. If that takes several calls, two untimed
            ones come first, because the run before has filled the caches.
        warmup_calls: the calls of each run before anything is timed.
        on_sample: called after each sample.
        agree: gets the number of calls of this process, waits for all processes that time together, and returns one
            number for all of them.
        clock: returns the time in seconds.
    """
    timers = {}
    calls = {}
    for key, run in runs.items():
        timers[key] = Timer("run()", timer=clock, globals={"run": run})
        timers[key].timeit(warmup_calls)
        seconds = timers[key].timeit(warmup_calls) / warmup_calls
        calls[key] = agree(max(1, math.ceil(sample_seconds / seconds)))
    samples: dict[Key, list[float]] = {key: [] for key in runs}
    for round_ in range(rounds):
        order = list(runs)
        if round_ % 2 == 1:
            order.reverse()
        for key in order:
            if calls[key] > 1:
                timers[key].timeit(2)
            agree(calls[key])  # all processes start the sample at the same time
            samples[key].append(timers[key].timeit(calls[key]) / calls[key])
            on_sample()
    return samples


def paired_ratio(numerator: list[float], denominator: list[float]) -> Spread:
    """Return the spread of the ratios round by round: what drifts between rounds cancels."""
    return Spread.of([a / b for a, b in zip(numerator, denominator, strict=True)])
