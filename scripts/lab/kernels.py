"""What the GPU does: its kernels, as torch.profiler sees them, its own time, and the attention kernel that runs."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

LOST_AT_MOST = 1000  # kernels that a profile may lose at its start
LAUNCH_BOUND = 0.8  # below this busy share, the GPU often waits for the host
CYCLES_PER_SECOND = 2e9  # of a GPU, at most
LEAST_SLEEP = 1e-2  # seconds; longer than most pauses of a host
MISSES = 3  # failed samples until a call counts as too long to queue

_COUNTED = "counted"


@dataclass(frozen=True)
class Kernels:
    """The GPU's kernels in one run.

    count: number of kernels, without copies and fills.
    busy_seconds: time in which at least one kernel, copy or fill ran.
    busy_fraction: this divided by the time of the run without a profiler.
    launch_bound: whether the fraction is below 0.8.
    """

    count: int
    busy_seconds: float
    busy_fraction: float
    launch_bound: bool


def kernel_report(
    run: Callable[[], object], device: torch.device, seconds: float
) -> Kernels | None:
    """Count the kernels of `run`, given its seconds without a profiler; None if none can be seen."""
    return summarize_kernels(events_of(run, device), seconds)


def count_kernels(run: Callable[[], object], device: torch.device) -> int | None:
    """Return the number of kernels that `run` starts on a GPU; None if none can be seen."""
    return _number_of_kernels(events_of(run, device)) or None


@contextmanager
def gpu_profile(device: torch.device, **options: Any) -> Iterator[profile]:
    """Profile a block of code, and record all kernels that it launches.

    A profile loses its first kernels: the k-th profile of a process loses about k (pytorch issue 192021). 1,000
    kernels that do not count are launched first, under a label of their own.

    Args:
        device: where the code runs; on a CPU nothing gets lost.
        options: further options of torch.profiler.profile.
    """
    with profile(**options) as profiler:
        if device.type == "cuda":
            with record_function("not counted: the profile may lose these"):
                _launch_throwaways(device)
        yield profiler


def _launch_throwaways(device: torch.device) -> None:
    number = torch.zeros((), device=device)
    with torch.no_grad():
        for _ in range(LOST_AT_MOST):
            number.add_(1)
    torch.cuda.synchronize(device)


def events_of(run: Callable[[], object], device: torch.device) -> list[Any]:
    """Return what torch.profiler sees of the GPU in one call of `run`; nothing on a CPU."""
    if device.type != "cuda":
        return []
    with gpu_profile(device) as profiler, record_function(_COUNTED):
        run()
        torch.cuda.synchronize(device)
    return counted_on_gpu(profiler.events() or [])


def counted_on_gpu(events: Sequence[Any]) -> list[Any]:
    """Return the work on the GPU that starts after the label.

    The label has a time on the GPU too, from its first kernel on: by that, the clocks of host and GPU may differ.
    """
    on_gpu = [event for event in events if event.device_type.name == "CUDA"]
    labels = [event for event in on_gpu if event.name == _COUNTED]
    if not labels:
        labels = [event for event in events if event.name == _COUNTED]
    start = min(label.time_range.start for label in labels)
    counted = []
    for event in on_gpu:
        is_label = getattr(event, "is_user_annotation", False)
        if not is_label and event.time_range.start >= start:
            counted.append(event)
    return counted


def summarize_kernels(work: Sequence[Any], seconds: float) -> Kernels | None:
    """Count kernels, and add up how long the GPU was busy with them, copies and fills; None without a kernel."""
    count = _number_of_kernels(work)
    if count == 0:
        return None
    busy_seconds = busy_time(work) * 1e-6
    busy_fraction = busy_seconds / seconds
    return Kernels(count, busy_seconds, busy_fraction, busy_fraction < LAUNCH_BOUND)


def _number_of_kernels(work: Sequence[Any]) -> int:
    return sum(not event.name.startswith(("Memcpy", "Memset")) for event in work)


def busy_time(events: Iterable[Any]) -> float:
    """Return the microseconds in which at least one of the events runs: on several streams, they may overlap."""
    spans = [(event.time_range.start, event.time_range.end) for event in events]
    busy = 0.0
    until = float("-inf")
    for start, end in sorted(spans):
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy


def gpu_seconds(
    run: Callable[[], object], seconds: float, calls: int = 3, samples: int = 5
) -> list[float] | None:
    """Return samples of the time that the GPU takes for a call of `run`, without waiting for the host.

    A sample queues several calls behind a kernel that sleeps until the host has launched them. A stream takes about
    1,000 launches before it blocks the host, so calls that do not fit together are queued one at a time.

    Args:
        run: what to time.
        seconds: the time of a call, with the host's. For each call, the GPU sleeps twice as long, but at most 50 ms,
            while the host launches it.
        calls: number of calls in a sample, which is their mean.
        samples: the number of samples.

    Returns:
        None if a single call does not fit, such as the training of a deep stack: its time would include waits.
    """
    run()
    found = _queued_samples(run, seconds, calls, samples)
    if found is None:
        found = _queued_samples(run, seconds, 1, samples)
    return found


def _queued_samples(
    run: Callable[[], object], seconds: float, calls: int, samples: int
) -> list[float] | None:
    """Return the GPU's seconds for a call in each sample; None if it often begins before all calls are launched."""
    found: list[float] = []
    misses = 0
    while len(found) < samples:
        per_call = _queued(run, seconds, calls)
        if per_call is not None:
            found.append(per_call)
        else:
            misses += 1
            # One miss may be a pause of the host.
            if misses == MISSES:
                return None
    return found


def _queued(run: Callable[[], object], seconds: float, calls: int) -> float | None:
    """Return the GPU's seconds for each of these calls; None if it began before all of them were launched."""
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    sleep = max(LEAST_SLEEP, calls * min(2 * seconds, 0.05))
    torch.cuda._sleep(int(CYCLES_PER_SECOND * sleep))
    start.record()
    for _ in range(calls):
        run()
    end.record()
    all_launched = not start.query()
    end.synchronize()
    if not all_launched:
        return None
    return start.elapsed_time(end) * 1e-3 / calls


class _Names(TorchDispatchMode):
    """Collect the names of the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def attention_kernel(run: Callable[[], object]) -> str:
    """Return which of torch's attention kernels an eager `run` calls: flash, efficient, cudnn or math."""
    with _Names() as operations:
        run()
    found = re.search(
        r"scaled_dot_product_(\w+?)_attention", " ".join(operations.names)
    )
    return found[1] if found else "math"
