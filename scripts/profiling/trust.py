"""Whether figures can be trusted: what the samples, and the system, tell of other work on the machine."""

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lab.timing import Spread

# On an idle machine, a half of these is not reached.
_SPREAD, _ABOVE_FASTEST, _WAITED, _OTHERS = 0.2, 0.25, 0.05, 0.25
_PROC = Path("/proc")


class Watch:
    """Watch what hinders this process from now on."""

    def __init__(self) -> None:
        self._start = _clocks()

    def shares(self) -> dict[str, float | None]:
        """Return the shares of the time in which a thread waited for a core, and of all cores that others have used.

        The first is at least 0 and may exceed 1, as the threads add up; the second is None where nobody tells.
        """
        (wall, waited, others), (wall_then, waited_then, others_then) = _clocks(), self._start
        wall -= wall_then
        return {
            "waited_share": max(0.0, (waited - waited_then) / wall),
            "others_share": None
            if others is None or others_then is None
            else max(0.0, (others - others_then) / wall / (os.cpu_count() or 1)),
        }


def _clocks() -> tuple[float, float, float | None]:
    """Return seconds: of the wall, of threads of this process that wait for a core, of what others use of all cores."""
    wall, own = time.perf_counter(), time.process_time()
    waited, others = wall - own, None  # the time in which no thread ran is known everywhere
    with suppress(OSError):  # Linux tells more
        ticks = [int(word) for word in (_PROC / "stat").read_text().split()[1:9]]
        others = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK") - own  # all ticks but idle and iowait
        threads = [path.read_text() for path in _PROC.glob("self/task/*/schedstat")]
        waited = sum(int(thread.split()[1]) for thread in threads) / 1e9 if threads else waited
    return wall, waited, others


def trust(seconds: list[float], shares: Mapping[str, float | None], ceilings: list[Spread]) -> dict[str, Any]:
    """Return the figures that tell how far to trust the rest, and a sentence for each of them that is too large.

    `seconds` are the samples of what was asked for; `shares` come from a Watch.
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
