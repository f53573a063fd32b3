"""The rows of the report: what each part takes of the whole, and what remains."""

import statistics
from dataclasses import dataclass

from lab.timing import Spread

from .roofline import Rates
from .work import Work

Samples = dict[str, list[float]]
# Medians by pass: forward, backward, and the total of the mode.
Seconds = dict[str, float]


@dataclass(frozen=True)
class Row:
    """A part with all of its copies, AdamW, the rest, the GPU's pauses, or the whole.

    varies: the range from p20 to p80 of the total, divided by the median; 0 if unknown.
    overhead: seconds of the same calls on a tiny input; 0 if there is none.
    kept_bytes: what autograd keeps for backward, unless an earlier part keeps it.
    least_seconds: the least time of the work at the machine's rates.
    limit: what takes the longest of computing, moving bytes (memory), and the overhead.
    """

    name: str
    seconds: Seconds
    varies: float
    work: Work
    overhead: float
    kept_bytes: int
    least_seconds: float
    limit: str

    @property
    def total(self) -> float:
        return self.seconds["total"]


def limit_of(work: Work, overhead: float, rates: Rates) -> str:
    limits = {
        "compute": work.flops / rates.flops,
        "memory": work.bytes / rates.bytes,
        "overhead": overhead,
    }
    return max(limits, key=lambda name: limits[name])


def totals_of(samples: Samples, name: str) -> dict[str, list[float]]:
    """Return the samples of forward, train and step, as far as they were taken."""
    names = {mode: f"{name} {mode}" for mode in ("forward", "train", "step")}
    return {mode: samples[key] for mode, key in names.items() if key in samples}


def seconds_of(samples: Samples, name: str, count: int = 1) -> Seconds:
    """Return the times of `count` copies. Backward is what train takes beyond forward."""
    seconds = {}
    for mode, taken in totals_of(samples, name).items():
        seconds["total"] = count * statistics.median(taken)
        if mode == "forward":
            seconds["forward"] = seconds["total"]
        elif mode == "train":
            seconds["backward"] = seconds["total"] - seconds["forward"]
    return seconds


def varies(samples: Samples, name: str) -> float:
    """Return how much the total varies; 0 if it was not timed."""
    totals = list(totals_of(samples, name).values())
    return Spread.of(totals[-1]).width if totals else 0.0


def remainder(samples: Samples, whole: str, parts: list[Seconds]) -> Seconds:
    """Return what the parts leave of the whole; 0 if the total is within the noise."""
    remains = seconds_of(samples, whole)
    noise = remains["total"] * varies(samples, whole) / 2
    for part in parts:
        for name, seconds in part.items():
            remains[name] -= seconds
    if abs(remains["total"]) <= noise:
        return dict.fromkeys(remains, 0.0)
    return remains
