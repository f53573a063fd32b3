"""What torch.profiler sees of a run: kernels, collectives, and memory."""

from collections import Counter
from dataclasses import dataclass
from itertools import accumulate
from operator import methodcaller
from pathlib import Path

from lab.timing import Run, clock
from torch.profiler import profile, schedule


@dataclass(frozen=True)
class Recording:
    """One run.

    kernels: the calls and seconds of each kernel of the GPU.
    collectives: the calls of torch.distributed.
    peak_added_bytes: the most that the run allocated at a time, on a CPU.
    """

    kernels: dict[str, tuple[int, float]]
    collectives: dict[str, int]
    peak_added_bytes: int

    @property
    def busy_seconds(self) -> float:
        return sum(seconds for _, seconds in self.kernels.values())


def record_run(run: Run, trace: Path | None = None) -> Recording:
    """Profile one run after a warm-up, and write its Chrome trace.

    Call this after all timings: launches stay slower once a profiler has run. A session
    of torch.profiler may lose its first kernels (pytorch issue 192021), so a warm-up runs
    first.
    """
    with profile(
        schedule=schedule(wait=0, warmup=1, active=1, repeat=1),
        profile_memory=True,
        with_stack=trace is not None,  # the trace then names modules
    ) as session:
        for _ in range(2):
            run()
            clock()  # waits for the GPU
            session.step()
    if trace is not None:
        session.export_chrome_trace(str(trace))
    kernels: dict[str, tuple[int, float]] = {}
    collectives: Counter[str] = Counter()
    for event in session.events() or []:
        if event.device_type.name == "CUDA" and not event.is_user_annotation:
            count, seconds = kernels.get(event.name, (0, 0.0))
            seconds += 1e-6 * event.time_range.elapsed_us()
            kernels[event.name] = (count + 1, seconds)
        elif event.name.startswith("c10d::"):
            collectives[event.name] += 1
    # The peak of the running sum of allocations and releases.
    memory = session.profiler.kineto_results.events()
    changes = [event for event in memory if event.name() == "[memory]"]
    changes.sort(key=methodcaller("start_ns"))  # equal times keep their order
    sizes = map(methodcaller("nbytes"), changes)
    return Recording(
        kernels=kernels,
        collectives=collectives,
        peak_added_bytes=max(accumulate(sizes, initial=0)),
    )
