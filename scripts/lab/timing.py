"""Timings that can be compared: warmed up, synchronized, interleaved, and reported with their spread."""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from timeit import Timer

import torch


def clock() -> float:
    """Return the time in seconds, once the accelerator has done all that it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


@dataclass(frozen=True)
class Spread:
    """A median with the 20th and 80th percentile of its samples, in the unit of the samples."""

    median: float
    p20: float
    p80: float
    samples: int

    @classmethod
    def of(cls, samples: list[float]) -> "Spread":
        if len(samples) < 2:
            return cls(samples[0], samples[0], samples[0], len(samples))
        p20, _, _, p80 = statistics.quantiles(samples, n=5, method="inclusive")
        return cls(statistics.median(samples), p20, p80, len(samples))


def interleave(
    runs: Mapping[str, Callable[[], object]],
    rounds: int = 15,
    sample_seconds: float = 0.05,
    warmup_calls: int = 3,
    on_sample: Callable[[str], None] = lambda name: None,
    samples: dict[str, list[float]] | None = None,
    agree: Callable[[int], int] = lambda calls: calls,
) -> dict[str, list[float]]:
    """Time each run once a round and return its seconds per call, one sample a round.

    A machine that slows down slows all of the runs down alike, so that samples of one round can be compared. A sample
    repeats the call for at least `sample_seconds`, after two more that are not timed, as the one before it left the
    caches to another run; a call that is as long as a sample needs none. The clock waits for the accelerator, and every
    other round goes in reverse order. `on_sample` is told of each finished sample, for a progress display.
    `samples` is filled and returned: a caller who may be interrupted keeps what was measured until then.
    `agree` returns how often to call, once all processes that time together have come to it: so each sample starts in
    all of them at once.
    """
    timers = {name: Timer("run()", timer=clock, globals={"run": run}) for name, run in runs.items()}
    calls = {}
    for name, timer in timers.items():
        timer.timeit(warmup_calls)
        calls[name] = agree(max(1, math.ceil(sample_seconds / timer.timeit(warmup_calls) * warmup_calls)))
    samples = {} if samples is None else samples
    samples.update((name, []) for name in runs)
    for round_ in range(rounds):
        for name in list(runs)[:: 1 if round_ % 2 == 0 else -1]:
            if calls[name] > 1:
                timers[name].timeit(2)
            agree(calls[name])
            samples[name].append(timers[name].timeit(calls[name]) / calls[name])
            on_sample(name)
    return samples


def paired_ratio(numerator: list[float], denominator: list[float]) -> Spread:
    """Return the spread of the ratios round by round: what drifts between rounds cancels."""
    return Spread.of([a / b for a, b in zip(numerator, denominator, strict=True)])
