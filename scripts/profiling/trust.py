"""Whether figures can be trusted: what the samples and the system show of other work on the machine."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from lab.machine import Ceilings
from lab.tables import plural
from lab.timing import Spread

from .records import Trust

# With fewer samples, p20 and p80 are little more than the fastest and the slowest one.
LEAST_SAMPLES = 5
# On an idle machine, none of these figures reaches half of its limit.
_LARGEST_SPREAD = 0.2
_LARGEST_ABOVE_FASTEST = 0.25
_LARGEST_WAITED_SHARE = 0.05
_LARGEST_OTHERS_SHARE = 0.25


@dataclass(frozen=True)
class Clocks:
    """Seconds since some start: of the wall, of own threads that waited for a core, and of cores that others used."""

    wall: float
    waited: float
    others: float


@dataclass(frozen=True)
class BusyShares:
    """The share of the time in which own threads waited, added up, and the share of all cores that others used.

    None where the system does not count them.
    """

    waited: float | None
    others: float | None


def system_clocks(proc: Path = Path("/proc")) -> Clocks | None:
    """Read the clocks; None except on Linux."""
    try:
        busy = _busy_seconds(proc / "stat")
        waited = 0
        for path in proc.glob("self/task/*/schedstat"):
            # Nanoseconds on a core, nanoseconds of waiting for one, and the number of turns.
            waited += int(path.read_text().split()[1])
    except OSError:
        return None
    return Clocks(
        wall=time.perf_counter(),
        waited=waited / 1e9,
        others=busy - time.process_time(),
    )


def _busy_seconds(stat: Path) -> float:
    """Return the time in which cores were busy, added over all cores."""
    # The first line is "cpu" and the ticks of user, nice, system, idle, iowait, irq, softirq and steal.
    words = stat.read_text().split()
    ticks = [int(word) for word in words[1:9]]
    idle, iowait = ticks[3], ticks[4]
    return (sum(ticks) - idle - iowait) / os.sysconf("SC_CLK_TCK")


def busy_shares(start: Clocks | None, end: Clocks | None) -> BusyShares:
    """Return the shares of the time between two readings."""
    if start is None or end is None:
        return BusyShares(None, None)
    wall = end.wall - start.wall
    # Threads that ended since then took their waiting with them.
    waited = max(0.0, end.waited - start.waited)
    others = max(0.0, end.others - start.others)
    cores = os.cpu_count() or 1
    return BusyShares(waited / wall, others / wall / cores)


def trust(seconds: list[float], shares: BusyShares) -> Trust:
    """Return how far to trust the samples of a whole."""
    spread = Spread.of(seconds)
    return Trust(
        waited_share=shares.waited,
        others_share=shares.others,
        spread=_width(spread),
        median_above_fastest=spread.median / min(seconds) - 1,
    )


def reasons_to_doubt(trust: Trust, ceilings: Ceilings, samples: int) -> list[str]:
    """Return a sentence for each figure that is too large, and for too small a number of samples."""
    waited = trust.waited_share or 0.0
    others = trust.others_share or 0.0
    flops, memory = ceilings.flops_per_second, ceilings.bytes_per_second
    unsteady = max(_width(flops), _width(memory))
    reasons = []
    if samples < LEAST_SAMPLES:
        counted = plural(samples, "sample")
        reasons.append(f"each time has {counted}, fewer than {LEAST_SAMPLES}")
    if waited > _LARGEST_WAITED_SHARE:
        reasons.append(
            f"threads waited for a core for {waited:.0%} of the run time "
            "(sum over all threads)"
        )
    if others > _LARGEST_OTHERS_SHARE:
        reasons.append(f"other programs kept {others:.0%} of all cores busy")
    if trust.spread > _LARGEST_SPREAD:
        reasons.append(f"the samples vary by {trust.spread:.0%} (p20 to p80)")
    if trust.median_above_fastest > _LARGEST_ABOVE_FASTEST:
        above = trust.median_above_fastest
        reasons.append(f"the median is {above:.0%} above the fastest sample")
    if unsteady > _LARGEST_SPREAD:
        reasons.append(f"the ceilings vary by {unsteady:.0%} (p20 to p80)")
    return reasons


def _width(spread: Spread) -> float:
    """Return the range from p20 to p80 as a share of the median."""
    return (spread.p80 - spread.p20) / spread.median
