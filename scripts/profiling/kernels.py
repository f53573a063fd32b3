"""What torch.profiler sees of a run: kernels, attention, collectives, memory."""

import re
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate
from operator import methodcaller
from pathlib import Path

from lab.timing import Run, clock
from torch.profiler import profile, schedule

_SCHEDULE = schedule(wait=0, warmup=1, active=1, repeat=1)


@dataclass(frozen=True)
class Recording:
    """One run.

    attention: torch's kernel for attention, such as flash, or "no fused".
    kernels: the calls and seconds of each kernel of the GPU, the longest first.
    collectives: the calls of torch.distributed.
    peak_added_bytes: the most that the run allocated at a time, on a CPU.
    """

    attention: str
    kernels: dict[str, tuple[int, float]]
    collectives: dict[str, int]
    peak_added_bytes: int

    @property
    def launches(self) -> int:
        return sum(count for count, _ in self.kernels.values())

    @property
    def busy_seconds(self) -> float:
        return sum(seconds for _, seconds in self.kernels.values())


def record_run(run: Run, trace: Path | None = None) -> Recording:
    """Profile one run after a warm-up, and write its Chrome trace.

    Call this after all timings: launches stay slower once a profiler has run. A session
    of torch.profiler may lose its first kernels (pytorch issue 192021), so a warm-up runs
    first.
    """
    with_stack = trace is not None  # the trace then names modules
    with profile(
        schedule=_SCHEDULE, profile_memory=True, with_stack=with_stack
    ) as session:
        for _ in range(2):
            run()
            clock()  # waits for the GPU
            session.step()
    if trace is not None:
        session.export_chrome_trace(str(trace))
    names: Counter[str] = Counter()
    kernels: Counter[str] = Counter()  # in ns, because a Counter has integers
    for event in session.events() or []:
        if event.device_type.name == "CUDA" and not event.is_user_annotation:
            kernels[event.name] += round(1e3 * event.time_range.elapsed_us())
        names[event.name] += 1
    attention = re.search(r"scaled_dot_product_(\w+?)_attention", " ".join(names))
    # The peak of the running sum of allocations and releases.
    memory = session.profiler.kineto_results.events()
    changes = [event for event in memory if event.name() == "[memory]"]
    changes.sort(key=methodcaller("start_ns"))  # equal times keep their order
    sizes = map(methodcaller("nbytes"), changes)
    return Recording(
        attention=attention[1] if attention else "no fused",
        kernels={name: (names[name], 1e-9 * ns) for name, ns in kernels.most_common()},
        collectives={name: names[name] for name in names if name.startswith("c10d::")},
        peak_added_bytes=max(accumulate(sizes, initial=0)),
    )
