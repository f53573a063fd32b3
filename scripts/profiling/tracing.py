"""Record traces, compilations, and allocations, in runs of their own that no timing comes from."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from lab.files import atomic
from lab.kernels import gpu_profile
from lab.timing import clock
from torch.optim import Optimizer
from torch.profiler import record_function

from .parts import TimedPart
from .records import Compilation


def run_labeled(steps: Sequence[TimedPart], optimizer: Optimizer | None) -> None:
    """Run each step once, with a label for forward and one for backward, and then the optimizer's update."""
    # On CUDA, autograd has a thread of its own, on which the labels would not be.
    with torch.autograd.set_multithreading_enabled(False):
        for step in steps:
            with torch.set_grad_enabled(bool(step.gradients)):
                _run_step(step)
    if optimizer is not None:
        with record_function("AdamW"):
            optimizer.step()


def _run_step(step: TimedPart) -> None:
    with record_function(f"{step.name} forward"):
        outputs = step.forward()
    if step.gradients:
        with record_function(f"{step.name} backward"):
            step.backward(outputs)


def write_trace(
    steps: Sequence[TimedPart], optimizer: Optimizer | None, path: Path
) -> None:
    """Write a Chrome trace of a labeled run of the steps, for ui.perfetto.dev or chrome://tracing."""
    device = steps[0].inputs[0].device
    with gpu_profile(device, record_shapes=True) as profiler:
        run_labeled(steps, optimizer)
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
    # inductor keeps what it compiled on disk, so a second run compiles faster.
    hits = counters["inductor"]["fxgraph_cache_hit"]
    hits += counters["aot_autograd"]["autograd_cache_hit"]
    return Compilation(
        seconds=seconds,
        from_cache=hits > 0,
        graphs=counters["stats"]["unique_graphs"],
        graph_breaks=sum(counters["graph_break"].values()),
        break_reasons=tuple(counters["graph_break"]),
    )


def write_memory_snapshot(run: Callable[[], object], path: Path) -> None:
    """Write a snapshot of CUDA's allocations during `run`, for pytorch.org/memory_viz."""
    # Only Python's stacks: those of C++ take minutes to resolve.
    torch.cuda.memory._record_memory_history(max_entries=100_000, stacks="python")
    try:
        run()
        with atomic(path) as temporary:
            torch.cuda.memory._dump_snapshot(str(temporary))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
