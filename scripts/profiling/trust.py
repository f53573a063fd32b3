"""Whether figures can be trusted: what the samples, and the system, tell of other work on the machine."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lab.machine import Ceilings
from lab.timing import Spread

# On an idle machine, a half of these is not reached.
_SPREAD, _ABOVE_FASTEST, _WAITED, _OTHERS = 0.2, 0.25, 0.05, 0.25


def system_clocks(proc: Path = Path("/proc")) -> tuple[float, float, float] | None:
    """Return the seconds of the wall, of own threads waiting for a core, of cores that others used; None off Linux."""
    try:
        ticks = [int(word) for word in (proc / "stat").read_text().split()[1:9]]
        waited = sum(
            int(path.read_text().split()[1])
            for path in proc.glob("self/task/*/schedstat")
        )
    except OSError:
        return None
    busy = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf(
        "SC_CLK_TCK"
    )  # all but idle and iowait
    return time.perf_counter(), waited / 1e9, busy - time.process_time()


def busy_shares(
    start: tuple[float, float, float] | None, end: tuple[float, float, float] | None
) -> dict[str, float | None]:
    """Return the share of the time in which threads waited, added up, and the share of all cores that others used."""
    if start is None or end is None:
        return {"waited_share": None, "others_share": None}
    wall, waited, others = (
        max(0.0, after - before) for before, after in zip(start, end, strict=True)
    )
    return {
        "waited_share": waited / wall,
        "others_share": others / wall / (os.cpu_count() or 1),
    }


def trust(
    seconds: list[float], shares: Mapping[str, float | None], ceilings: Ceilings
) -> dict[str, Any]:
    """Return what tells how far to trust the samples of a whole, and a sentence for each figure that is too large."""
    spread = Spread.of(seconds)
    width, above = (
        (spread.p80 - spread.p20) / spread.median,
        spread.median / min(seconds) - 1,
    )
    rates = (ceilings.flops_per_second, ceilings.bytes_per_second)
    unsteady = max((rate.p80 - rate.p20) / rate.median for rate in rates)
    waited, others = shares["waited_share"] or 0.0, shares["others_share"] or 0.0
    sentences = {
        f"threads waited for a core, together {waited:.0%} of the time": waited
        > _WAITED,
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
