"""What torch.profiler sees of a run: the kernels of a GPU, and memory."""

from dataclasses import dataclass
from itertools import accumulate
from operator import methodcaller
from pathlib import Path

from lab.timing import Run, clock
from torch.profiler import profile, schedule


@dataclass
class Kernel:
    """All launches of one kernel of the GPU in a run."""

    name: str
    launches: int = 0
    total_s: float = 0.0


@dataclass(frozen=True)
class Recording:
    """One run.

    kernels: by their time; none on a CPU.
    peak_added_bytes: the most that the run allocated at a time, on a CPU.
    """

    kernels: list[Kernel]
    peak_added_bytes: int

    @property
    def busy_s(self) -> float:
        return sum(kernel.total_s for kernel in self.kernels)


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
        acc_events=True,  # otherwise torch 2.11 warns that it drops earlier events
    ) as session:
        for _ in range(2):
            run()
            clock()  # waits for the GPU
            session.step()
    if trace is not None:
        session.export_chrome_trace(str(trace))
    kernels: dict[str, Kernel] = {}
    for event in session.events() or []:
        if event.device_type.name == "CUDA" and not event.is_user_annotation:
            kernel = kernels.setdefault(event.name, Kernel(event.name))
            kernel.launches += 1
            kernel.total_s += 1e-6 * event.time_range.elapsed_us()
    # The peak of the running sum of allocations and releases.
    memory = session.profiler.kineto_results.events()
    changes = [event for event in memory if event.name() == "[memory]"]
    changes.sort(key=methodcaller("start_ns"))  # equal times keep their order
    sizes = map(methodcaller("nbytes"), changes)
    return Recording(
        kernels=sorted(kernels.values(), key=lambda kernel: -kernel.total_s),
        peak_added_bytes=max(accumulate(sizes, initial=0)),
    )
