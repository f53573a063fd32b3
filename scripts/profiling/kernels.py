"""What torch.profiler sees of a run: kernels, attention, collectives, memory."""

import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import accumulate
from operator import methodcaller
from pathlib import Path

import torch
from lab.timing import Run, clock
from torch.profiler import profile, record_function, schedule

from .record import Stretch

_SCHEDULE = schedule(wait=0, warmup=1, active=1, repeat=1)


@dataclass(frozen=True)
class Recording:
    """One run.

    attention: torch's kernel for attention, such as flash, or "no fused".
    kernels: the calls and seconds of each kernel of the GPU, the longest first.
    operations: the nanoseconds of torch's operations, without what they call.
    collectives: the calls of torch.distributed.
    peak_added_bytes: the most that the run allocated at a time, on a CPU.
    """

    attention: str
    kernels: dict[str, tuple[int, float]]
    operations: dict[str, int]
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
    with profile(schedule=_SCHEDULE, profile_memory=True) as session:
        for _ in range(2):
            run()
            clock()  # waits for the GPU
            session.step()
    if trace is not None:
        session.export_chrome_trace(str(trace))
    kernels = defaultdict(list)
    operations: Counter[str] = Counter()
    names: Counter[str] = Counter()
    for event in session.events() or []:
        names[event.name] += 1
        if event.device_type.name == "CUDA" and not event.is_user_annotation:
            kernels[event.name].append(event.time_range.elapsed_us() * 1e-6)
        elif event.name.startswith("aten::"):
            taken = event.self_device_time_total or event.self_cpu_time_total
            operations[event.name] += round(taken * 1e3)
    attention = re.search(r"scaled_dot_product_(\w+?)_attention", " ".join(names))
    longest = sorted(kernels, key=lambda name: -sum(kernels[name]))
    # The peak is that of the running sum of allocations and releases.
    memory = session.profiler.kineto_results.events()
    changes = [event for event in memory if event.name() == "[memory]"]
    changes.sort(
        key=methodcaller("start_ns")
    )  # those of the same time keep their order
    sizes = map(methodcaller("nbytes"), changes)
    return Recording(
        attention=attention[1] if attention else "no fused",
        kernels={name: (len(kernels[name]), sum(kernels[name])) for name in longest},
        operations=dict(operations),
        collectives={name: names[name] for name in names if name.startswith("c10d::")},
        peak_added_bytes=max(accumulate(sizes, initial=0)),
    )


def run_labeled(stretches: list[Stretch], parts: dict[str, list[int]]) -> None:
    """Run each part once, with its name in the trace."""
    # On CUDA, backward would run on another thread, without the names.
    with torch.autograd.set_multithreading_enabled(False):
        for label, places in parts.items():
            for place in places:
                with record_function(f"{label} forward"):
                    results = stretches[place].forward()
                with record_function(f"{label} backward"):
                    stretches[place].backward(results)
