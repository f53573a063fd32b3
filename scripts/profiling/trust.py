"""Whether figures can be trusted: what the samples, and the system, tell of other work on the machine."""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from lab.timing import Spread

# On an idle machine, a half of these is not reached.
_SPREAD, _ABOVE_FASTEST, _WAITED, _OTHERS = 0.2, 0.25, 0.05, 0.25


class Clocks(NamedTuple):
    """Seconds: of the wall, of this process's threads that waited for a core, of all cores that others used."""

    wall: float
    waited: float
    others: float | None


def system_clocks(proc: Path = Path("/proc")) -> Clocks:
    """Read the clocks of the system; on other systems than Linux, little is known."""
    wall, own = time.perf_counter(), time.process_time()
    waited, others = wall - own, None  # the time in which no thread ran is known everywhere
    with suppress(OSError):
        ticks = [int(word) for word in (proc / "stat").read_text().split()[1:9]]
        others = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK") - own  # all ticks but idle and iowait
        threads = [path.read_text() for path in proc.glob("self/task/*/schedstat")]
        waited = sum(int(thread.split()[1]) for thread in threads) / 1e9 if threads else waited
    return Clocks(wall, waited, others)


class Watch:
    """Watch what hinders this process from now on."""

    def __init__(self, clocks: Callable[[], Clocks] = system_clocks) -> None:
        self._clocks, self._start = clocks, clocks()

    def shares(self) -> dict[str, float | None]:
        """Return the shares of the time in which a thread waited for a core, and of all cores that others have used.

        The first is at least 0 and may exceed 1, because the threads add up; the second is None where it is not known.
        """
        now, start, others = self._clocks(), self._start, None
        wall = now.wall - start.wall
        if now.others is not None and start.others is not None:
            others = max(0.0, (now.others - start.others) / wall / (os.cpu_count() or 1))
        return {"waited_share": max(0.0, (now.waited - start.waited) / wall), "others_share": others}


def trust(seconds: list[float], shares: Mapping[str, float | None], ceilings: list[Spread]) -> dict[str, Any]:
    """Return the figures that tell how far to trust the rest, and a sentence for each of them that is too large.

    `seconds` are the samples of the mode's whole; `shares` come from a Watch.
    """
    spread = Spread.of(seconds)
    width, above = (spread.p80 - spread.p20) / spread.median, spread.median / min(seconds) - 1
    unsteady = max((rate.p80 - rate.p20) / rate.median for rate in ceilings)
    waited, others = shares["waited_share"] or 0.0, shares["others_share"] or 0.0
    sentences = {
        f"threads waited for a core, together {waited:.0%} of the time": waited > _WAITED,
        f"other programs kept {others:.0%} of all cores busy": others > _OTHERS,
        f"the samples vary by {width:.0%} (p20 to p80)": width > _SPREAD,
        f"the median is {above:.0%} above the fastest sample": above > _ABOVE_FASTEST,
        f"the ceilings vary by {unsteady:.0%} (p20 to p80)": unsteady > _SPREAD,
    }
    return {
        **shares,
        "spread": width,
        "median_above_fastest": above,
        "ceilings_spread": unsteady,
        "doubts": [sentence for sentence, is_large in sentences.items() if is_large],
    }
