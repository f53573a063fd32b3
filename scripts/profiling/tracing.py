"""What a profiler sees, in runs of their own that no timing comes from: traces, ranges, kernels, graphs."""

import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from .files import atomic
from .parts import Part, backward_of

__all__ = [
    "compile_report",
    "kernel_report",
    "nsys_capture",
    "nsys_command",
    "nvtx_range",
    "record_memory",
    "run_labelled",
    "summarize_kernels",
    "write_trace",
]

# A GPU that waits for its next kernel for more than a fifth of the time is limited by how fast kernels are launched.
_LAUNCH_BOUND_BELOW = 0.8


def run_labelled(
    parts: Sequence[Part], step: Callable[[], object] | None, label: Callable[[str], AbstractContextManager[object]]
) -> None:
    """Run each part once, forward and backward under a label each, and then the optimizer's step."""
    for part in parts:
        with label(f"{part.name} forward"), torch.set_grad_enabled(bool(part.gradients)):
            outputs = part.forward()
        if part.gradients:
            with label(f"{part.name} backward"):
                backward_of(part, outputs)
    if step is not None:
        with label("AdamW"):
            step()


def write_trace(run: Callable[[Callable[[str], AbstractContextManager[object]]], None], path: Path) -> None:
    """Write a Chrome trace of `run(label)`, for ui.perfetto.dev or chrome://tracing."""
    with profile(activities=_activities(), record_shapes=True) as profiler:
        run(record_function)
        _synchronize()
    with atomic(path) as temporary:
        profiler.export_chrome_trace(str(temporary))


@contextmanager
def nvtx_range(name: str) -> Iterator[None]:
    torch.cuda.nvtx.range_push(name)
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()


@contextmanager
def nsys_capture() -> Iterator[None]:
    """Mark what nsys records when it is told to wait for the profiler's interface."""
    torch.cuda.profiler.start()
    try:
        yield
        torch.cuda.synchronize()
    finally:
        torch.cuda.profiler.stop()


def nsys_command(arguments: Sequence[str]) -> str:
    """Return the command that records the NVTX ranges of this very run, and nothing around them."""
    nsys = "nsys profile --trace=cuda,nvtx,cublas --capture-range=cudaProfilerApi --capture-range-end=stop"
    return f"{nsys} --output=profile_block {shlex.join([sys.executable, sys.argv[0], *arguments])}"


def kernel_report(run: Callable[[], object], device: torch.device, seconds: float) -> dict[str, Any] | None:
    """Count the kernels of `run`, which takes so many seconds without a profiler; None without CUDA."""
    if device.type != "cuda":
        return None
    with profile(activities=_activities()) as profiler:
        run()
        _synchronize()
    return summarize_kernels(profiler.events() or [], seconds)


def summarize_kernels(events: Iterable[Any], seconds: float) -> dict[str, Any]:
    """Return the count of the kernels among a profiler's events, and how long at least one of them was running."""
    intervals = sorted(
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type.name == "CUDA"
        and not getattr(event, "is_user_annotation", False)
        and not event.name.startswith(("Memcpy", "Memset"))
    )
    busy, until = 0.0, float("-inf")
    for start, end in intervals:  # in microseconds; kernels on several streams may overlap
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    fraction = busy * 1e-6 / seconds
    return {
        "count": len(intervals),
        "busy_seconds": busy * 1e-6,
        "busy_fraction": fraction,
        "launch_bound": fraction < _LAUNCH_BOUND_BELOW,
    }


def compile_report(eager: Part, compiled: Part, train: bool) -> dict[str, Any]:
    """Compile by a first call, and return the seconds that it took, the graphs, and where they break."""
    explained = torch._dynamo.explain(eager.run)(*eager.inputs)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    start = time.perf_counter()
    compiled.train() if train else compiled.forward()
    _synchronize()
    seconds = time.perf_counter() - start
    counters = torch._dynamo.utils.counters
    hits = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
    return {
        "seconds": seconds,
        "from_cache": hits > 0,  # inductor keeps what it compiled on disk, so that a second run compiles faster
        "graphs": explained.graph_count,
        "graph_breaks": explained.graph_break_count,
        "break_reasons": [str(reason.reason) for reason in explained.break_reasons],
    }


@contextmanager
def record_memory(path: Path) -> Iterator[None]:
    """Write a snapshot of CUDA's allocations within, for pytorch.org/memory_viz."""
    torch.cuda.memory._record_memory_history(max_entries=100_000)
    try:
        yield
        with atomic(path) as temporary:
            torch.cuda.memory._dump_snapshot(str(temporary))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def _activities() -> list[ProfilerActivity]:
    cuda = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    return [ProfilerActivity.CPU, *cuda]


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
