"""What the GPU does: its kernels, as torch.profiler sees them, its own time, and the attention kernel that runs."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.profiler import profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

_COUNTED = "counted"


def kernel_report(
    run: Callable[[], object], device: torch.device, seconds: float
) -> dict[str, Any] | None:
    """Count the kernels of `run`, given its seconds without a profiler; None if none can be seen."""
    return summarize_kernels(events_of(run, device), seconds)


def events_of(run: Callable[[], object], device: torch.device) -> list[Any]:
    """Return what torch.profiler sees of the GPU in one call of `run`; nothing on a CPU.

    The first kernels of a profiler may get lost, the more the older the process is (pytorch issue 192021). So `run` is
    called twice, and the second call is labeled.
    """
    if device.type != "cuda":
        return []
    with profile() as profiler:
        run()
        torch.cuda.synchronize()
        with record_function(_COUNTED):
            run()
            torch.cuda.synchronize()
    return counted_on_gpu(profiler.events() or [])


def counted_on_gpu(events: Sequence[Any]) -> list[Any]:
    """Return the work on the GPU that starts after the label.

    The label has a time on the GPU too, from its first kernel on: by that, the clocks of host and GPU may differ.
    """
    on_gpu = [event for event in events if event.device_type.name == "CUDA"]
    labels = [event for event in on_gpu if event.name == _COUNTED] or [
        e for e in events if e.name == _COUNTED
    ]
    start = min(label.time_range.start for label in labels)
    work = [
        event for event in on_gpu if not getattr(event, "is_user_annotation", False)
    ]
    return [event for event in work if event.time_range.start >= start]


def summarize_kernels(work: Sequence[Any], seconds: float) -> dict[str, Any] | None:
    """Return the count of kernels, and how long the GPU was busy with them, copies and fills; None without a kernel."""
    count = sum(not event.name.startswith(("Memcpy", "Memset")) for event in work)
    if count == 0:
        return None
    busy = busy_time(work) * 1e-6
    launch_bound = (
        busy / seconds < 0.8
    )  # for a fifth of the time, the GPU waits for its next kernel
    return {
        "count": count,
        "busy_seconds": busy,
        "busy_fraction": busy / seconds,
        "launch_bound": launch_bound,
    }


def busy_time(events: Iterable[Any]) -> float:
    """Return the microseconds in which at least one of the events is running: on several streams, they may overlap."""
    busy, until = 0.0, float("-inf")
    for start, end in sorted(
        (event.time_range.start, event.time_range.end) for event in events
    ):
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy


def gpu_seconds(run: Callable[[], object], seconds: float, calls: int = 3) -> float:
    """Return the time that the GPU takes for a call of `run`, given its seconds with the host.

    The calls queue behind a kernel that sleeps until the host has launched them: launching takes at most as long as the
    whole call, and seldom more than 50 ms.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()
    torch.cuda.synchronize()
    torch.cuda._sleep(
        int(2e9 * calls * min(2 * seconds, 0.05))
    )  # in cycles, of at most 2 GHz
    start.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3 / calls


def attention_kernel(run: Callable[[], object]) -> str:
    """Return which of torch's attention kernels an eager `run` calls: flash, efficient, cudnn or math."""
    names: list[str] = []

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            names.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with Operations():
        run()
    found = re.search(r"scaled_dot_product_(\w+?)_attention", " ".join(names))
    return found[1] if found else "math"
