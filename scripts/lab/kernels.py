"""What torch.profiler sees of the GPU: its kernels, and how long they keep it busy."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.profiler import profile


def kernel_report(run: Callable[[], object], device: torch.device, seconds: float) -> dict[str, Any] | None:
    """Count the kernels of `run`, which takes so many seconds without a profiler; None where none can be seen."""
    return summarize_kernels(events_of(run, device), seconds)


def summarize_kernels(events: Iterable[Any], seconds: float) -> dict[str, Any] | None:
    """Return the count of the kernels among a profiler's events, and how long the GPU was busy.

    Copies and fills are no kernels, and keep the GPU busy all the same. Without a kernel the profiler has seen nothing
    of the GPU, and the result is None.
    """
    work = on_gpu(events)
    count = sum(not event.name.startswith(("Memcpy", "Memset")) for event in work)
    if count == 0:
        return None
    busy = busy_time(work)
    fraction = busy * 1e-6 / seconds
    return {
        "count": count,
        "busy_seconds": busy * 1e-6,
        "busy_fraction": fraction,
        "launch_bound": fraction < 0.8,  # for a fifth of the time, the GPU waits for its next kernel
    }


def events_of(run: Callable[[], object], device: torch.device) -> Iterable[Any]:
    """Return what a profiler sees of `run`; nothing where there is no GPU to be seen."""
    if device.type != "cuda":
        return []
    with profile() as profiler:
        run()
        torch.cuda.synchronize()
    return profiler.events() or []


def on_gpu(events: Iterable[Any]) -> list[Any]:
    return [e for e in events if e.device_type.name == "CUDA" and not getattr(e, "is_user_annotation", False)]


def busy_time(events: Iterable[Any]) -> float:
    """Return the microseconds in which one of the events is on: on several streams, they may overlap."""
    busy, until = 0.0, float("-inf")
    for start, end in sorted((event.time_range.start, event.time_range.end) for event in events):
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy
