"""Where memory goes: what is kept for backward, and the peak that a run adds to what was there before."""

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

Outputs = TypeVar("Outputs")


class SavedBytes:
    """Count the bytes that autograd keeps for backward, each storage once however many tensors share it.

    The storages of `known` tensors (weights, tables) exist anyway and do not count.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        # The bytes that count, by address.
        self._seen = {tensor.untyped_storage().data_ptr(): 0 for tensor in known}
        # Keeps the storages alive: a free address may be given out again.
        self._alive: list[object] = []

    def of(self, run: Callable[[], Outputs]) -> tuple[Outputs, int]:
        """Return what `run` returns, and the bytes that it keeps and no earlier run has kept."""
        seen = self._seen
        before = sum(seen.values())

        def pack(tensor: Tensor) -> Tensor:
            # The graph holds this function and what it returns, and the garbage collector does not see the graph.
            # With `self`, which holds the graph, or with an output as it is, the graph would hold itself for ever.
            storage = tensor.untyped_storage()
            seen.setdefault(storage.data_ptr(), storage.nbytes())
            return tensor.detach()

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = run()
        self._alive.append(outputs)
        return outputs, sum(seen.values()) - before


def peak_added_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Return the peak of the bytes of tensors while `run` runs, minus those that existed before it.

    On CUDA it comes from the allocator's statistics, and on a CPU from the allocations that torch.profiler records.
    Neither sees what a library allocates for itself.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    return peak_of_trace(_events(profiler))


def _events(profiler: profile) -> Sequence[Mapping[str, Any]]:
    """Return the events of the profiler's Chrome trace, which only a file has; raise an OSError if it has no space."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        try:
            document = json.loads(trace.read_bytes())
        except ValueError:
            # torch reports nothing if the disk is full.
            raise OSError(
                f"cannot write the temporary file {trace}: free some space, or set TMPDIR"
            ) from None
    events: Sequence[Mapping[str, Any]] = document["traceEvents"]
    return events


def peak_of_trace(events: Iterable[Mapping[str, Any]]) -> int:
    """Return the peak of the running sum of a Chrome trace's allocations and releases, in bytes."""
    changes = []
    for event in events:
        if event.get("name") == "[memory]":
            changes.append((event["ts"], event["args"]["Bytes"]))
    # Those of the same time stay in their order.
    changes.sort(key=lambda change: change[0])
    return max(accumulate((change for _, change in changes), initial=0))


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors; of a DTensor, those that this process has."""
    total = 0
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        total += local.nbytes
    return total


_OUT_OF_MEMORY = (
    "out of memory",  # the CUDA driver's own, which is no torch.OutOfMemoryError
    "can't allocate memory",  # a CPU's
    "not enough memory",
    "status_alloc_failed",  # cuBLAS's and cuDNN's
    "outofmemoryerror",  # as inductor wraps it
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether torch or Python ran out of memory: often, torch raises a plain RuntimeError."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(
        message in text for message in _OUT_OF_MEMORY
    )
