"""What the GPU does, and what torch.profiler sees of a run: kernels, attention, memory."""

import re
from collections import Counter
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from lab.timing import Run, Sampler, clock
from torch.profiler import profile, record_function, schedule

from .record import Stretch

_SCHEDULE = schedule(wait=0, warmup=1, active=1)


def gpu_sampler(run: Run) -> Sampler:
    """Return a sampler of the time that the GPU takes for `run`, without its launches."""
    for _ in range(3):
        run()
    return partial(_gpu_seconds, run)


def _gpu_seconds(run: Run) -> float:
    """Time calls that are queued behind a sleeping kernel, so that none waits for the host.

    If the host is too slow, a longer sleep follows. After the longest, pauses count. A
    stream takes about 1,000 launches before it blocks the host, so the calls are few.
    """
    calls = 3
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    for sleep_cycles in (20_000_000, 100_000_000, 500_000_000):  # 10 to 250 ms at 2 GHz
        torch.cuda.synchronize()
        torch.cuda._sleep(sleep_cycles)
        start.record()
        for _ in range(calls):
            run()
        end.record()
        all_launched_in_time = not start.query()
        end.synchronize()
        if all_launched_in_time:
            break
    return start.elapsed_time(end) * 1e-3 / calls


@dataclass(frozen=True)
class Kernel:
    """A GPU kernel: its calls in one run, and their seconds."""

    name: str
    count: int
    seconds: float


@dataclass(frozen=True)
class Recording:
    """One run of the whole.

    attention: torch's kernel for attention, such as flash; None if no fused one runs.
    kernels: of the GPU, the longest first; none on a CPU.
    collectives: the calls of torch.distributed.
    peak_added_bytes: the most that the run allocated at a time, on a CPU.
    """

    attention: str | None
    kernels: list[Kernel]
    collectives: dict[str, int]
    peak_added_bytes: int

    @property
    def launches(self) -> int:
        return sum(kernel.count for kernel in self.kernels)

    @property
    def busy_seconds(self) -> float:
        return sum(kernel.seconds for kernel in self.kernels)


def record_run(run: Run, *, with_memory: bool = False) -> Recording:
    """Profile one run after a warm-up, on a CPU with its memory.

    Call this after all timings: launches stay slower once a profiler has run. A session
    of torch.profiler may lose its first kernels (pytorch issue 192021); they are those of
    the warm-up.
    """
    with profile(schedule=_SCHEDULE, profile_memory=with_memory) as session:
        run()
        clock()  # waits for the GPU
        session.step()
        run()
        clock()
    events = session.events() or []
    seconds: dict[str, list[float]] = {}
    for event in events:
        if event.device_type.name == "CUDA" and not event.is_user_annotation:
            taken = event.time_range.elapsed_us() * 1e-6
            seconds.setdefault(event.name, []).append(taken)
    kernels = [Kernel(name, len(times), sum(times)) for name, times in seconds.items()]
    kernels.sort(key=lambda kernel: kernel.seconds, reverse=True)
    names = Counter(event.name for event in events)
    attention = re.search(r"scaled_dot_product_(\w+?)_attention", " ".join(names))
    return Recording(
        attention=attention[1] if attention else None,
        kernels=kernels,
        collectives={name: names[name] for name in names if name.startswith("c10d::")},
        peak_added_bytes=_peak(session),
    )


def _peak(session: Any) -> int:
    """Return the peak of the running sum of allocations and releases."""
    changes = []
    for event in session.profiler.kineto_results.events():
        if event.name() == "[memory]":
            changes.append((event.start_ns(), event.nbytes()))
    changes.sort(key=itemgetter(0))  # those of the same time keep their order
    return max(accumulate((size for _, size in changes), initial=0))


def exceeding(whole: Run, parts: Run) -> dict[str, float]:
    """Return the operations that take more time in the whole than in its parts."""
    taken, covered = _operations(whole), _operations(parts)
    more = {name: taken[name] - covered.get(name, 0.0) for name in taken}
    longest = sorted(more, key=lambda name: more[name], reverse=True)[:3]
    return {name: more[name] for name in longest if more[name] > 0}


def _operations(run: Run) -> dict[str, float]:
    """Return the seconds of each of torch's operations, without what it calls."""
    run()
    with profile() as session:
        run()
        clock()
    seconds: dict[str, float] = {}
    for event in session.events() or []:
        if event.name.startswith("aten::"):
            taken = event.self_device_time_total or event.self_cpu_time_total
            seconds[event.name] = seconds.get(event.name, 0.0) + taken * 1e-6
    return seconds


def write_trace(
    stretches: list[Stretch], labels: list[str], run_whole: Run, path: Path
) -> None:
    """Write a Chrome trace in which each part runs once, and then the whole."""
    # On CUDA, backward would run on another thread, without the labels.
    one_thread = torch.autograd.set_multithreading_enabled(False)
    with one_thread, profile(record_shapes=True, schedule=_SCHEDULE) as session:
        _run_labeled(stretches, labels, run_whole)
        session.step()
        _run_labeled(stretches, labels, run_whole)
    session.export_chrome_trace(str(path))


def _run_labeled(stretches: list[Stretch], labels: list[str], run_whole: Run) -> None:
    for stretch, label in zip(stretches, labels, strict=True):
        with record_function(f"{label} forward"):
            results = stretch.forward()
        if stretch.gradients:
            with record_function(f"{label} backward"):
                stretch.backward(results)
    with record_function("the whole"):
        run_whole()
    clock()  # waits for the GPU
