"""What a profiler sees, in runs of their own that no timing comes from: traces, ranges, kernels, graphs."""

import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from lab.files import atomic
from lab.kernels import busy_time, events_of, on_gpu
from lab.timing import clock
from torch.profiler import profile, record_function

from .parts import Part, backward_of


def run_labelled(
    parts: Sequence[Part], step: Callable[[], object] | None, label: Callable[[str], AbstractContextManager[object]]
) -> None:
    """Run each part once, forward and backward under a label each, and then the optimizer's step."""
    for part in parts:
        with label(f"{part.name} forward"), torch.set_grad_enabled(bool(part.gradients)):
            outputs = part.forward()
        if part.gradients:
            # On this thread, which the label is on: on CUDA, autograd has one of its own.
            with torch.autograd.set_multithreading_enabled(False), label(f"{part.name} backward"):
                backward_of(part, outputs)
    if step is not None:
        with label("AdamW"):
            step()


def write_trace(parts: Sequence[Part], step: Callable[[], object] | None, path: Path) -> None:
    """Write a Chrome trace of a labelled run of the parts, for ui.perfetto.dev or chrome://tracing."""
    with profile(record_shapes=True) as profiler:
        run_labelled(parts, step, record_function)
        _synchronize()
    with atomic(path) as temporary:
        profiler.export_chrome_trace(str(temporary))


def mark_ranges(parts: Sequence[Part], step: Callable[[], object] | None) -> None:
    """Run the parts in NVTX ranges, and have nsys record that alone, which waits for the profiler's interface."""
    torch.cuda.profiler.start()
    try:
        run_labelled(parts, step, torch.cuda.nvtx.range)
        torch.cuda.synchronize()
    finally:
        torch.cuda.profiler.stop()


def nsys_command(arguments: Sequence[str]) -> str:
    """Return the command that records the NVTX ranges of this very run, and nothing around them."""
    nsys = "nsys profile --trace=cuda,nvtx,cublas --capture-range=cudaProfilerApi --capture-range-end=stop"
    nsys += " --output=profile_block --force-overwrite=true"
    return f"{nsys} {shlex.join([sys.executable, sys.argv[0], *arguments])}"


def overlap_report(run: Callable[[], object], device: torch.device) -> dict[str, float] | None:
    """Return how long NCCL's kernels of `run` take, and how much of that is hidden; None where none can be seen."""
    return summarize_overlap(events_of(run, device))


def summarize_overlap(events: Iterable[Any]) -> dict[str, float] | None:
    """Return the seconds in which a profiler's events have a collective on the GPU, and in which another kernel beside.

    A collective that waits for another process is running, too.
    """
    work = on_gpu(events)
    collectives = [event for event in work if event.name.startswith("nccl")]
    if not collectives:
        return None
    together, others = busy_time(work), busy_time(event for event in work if not event.name.startswith("nccl"))
    seconds = busy_time(collectives)
    return {"collective_seconds": 1e-6 * seconds, "hidden_seconds": 1e-6 * (seconds + others - together)}


def compile_report(eager: Part, compiled: Part, train: bool) -> dict[str, Any]:
    """Compile by a first call, and return the seconds that it took, the graphs, and where they break."""
    explained = torch._dynamo.explain(eager.run)(*eager.inputs)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    start = clock()
    compiled.train() if train else compiled.forward()
    seconds = clock() - start
    counters = torch._dynamo.utils.counters
    hits = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
    return {
        "seconds": seconds,
        "from_cache": hits > 0,  # inductor keeps what it compiled on disk, so that a second run compiles faster
        "graphs": explained.graph_count,
        "graph_breaks": explained.graph_break_count,
        "break_reasons": [str(reason.reason) for reason in explained.break_reasons],
    }


def write_memory_snapshot(run: Callable[[], object], path: Path) -> None:
    """Write a snapshot of CUDA's allocations during `run`, for pytorch.org/memory_viz."""
    torch.cuda.memory._record_memory_history(max_entries=100_000)
    try:
        run()
        with atomic(path) as temporary:
            torch.cuda.memory._dump_snapshot(str(temporary))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
