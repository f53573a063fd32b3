"""What a profiler records, in runs of their own that no timing comes from: traces, ranges, graphs, allocations."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from lab.files import atomic
from lab.timing import clock
from torch.optim import Optimizer
from torch.profiler import profile, record_function

from .parts import TimedPart
from .records import Compilation


def run_labeled(
    steps: Sequence[TimedPart],
    optimizer: Optimizer | None,
    label: Callable[[str], AbstractContextManager[object]],
) -> None:
    """Run each step once, forward and backward under a label each, and then the optimizer's update."""
    for step in steps:
        with (
            label(f"{step.name} forward"),
            torch.set_grad_enabled(bool(step.gradients)),
        ):
            outputs = step.forward()
        if step.gradients:
            # On this thread, which the label is on: on CUDA, autograd has one of its own.
            with (
                torch.autograd.set_multithreading_enabled(False),
                label(f"{step.name} backward"),
            ):
                step.backward(outputs)
    if optimizer is not None:
        with label("AdamW"):
            optimizer.step()


def write_trace(
    steps: Sequence[TimedPart], optimizer: Optimizer | None, path: Path
) -> None:
    """Write a Chrome trace of a labeled run of the steps, for ui.perfetto.dev or chrome://tracing."""
    with profile(record_shapes=True) as profiler:
        run_labeled(steps, optimizer, record_function)
        clock()  # waits for the GPU
    with atomic(path) as temporary:
        profiler.export_chrome_trace(str(temporary))


def compile_report(run: Callable[[], object]) -> Compilation:
    """Compile by a first call, and return the seconds that it took, the graphs, and where they break."""
    counters = torch._dynamo.utils.counters
    counters.clear()
    start = clock()
    run()
    seconds = clock() - start
    hits = (
        counters["inductor"]["fxgraph_cache_hit"]
        + counters["aot_autograd"]["autograd_cache_hit"]
    )
    return Compilation(
        seconds=seconds,
        # inductor keeps what it compiled on disk, so a second run compiles faster.
        from_cache=hits > 0,
        graphs=counters["stats"]["unique_graphs"],
        graph_breaks=sum(counters["graph_break"].values()),
        break_reasons=tuple(counters["graph_break"]),
    )


def write_memory_snapshot(run: Callable[[], object], path: Path) -> None:
    """Write a snapshot of CUDA's allocations during `run`, for pytorch.org/memory_viz."""
    # Python's stacks alone: those of C++ take minutes to be resolved.
    torch.cuda.memory._record_memory_history(max_entries=100_000, stacks="python")
    try:
        run()
        with atomic(path) as temporary:
            torch.cuda.memory._dump_snapshot(str(temporary))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
