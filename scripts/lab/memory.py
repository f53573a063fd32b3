"""Where memory goes: what the backward pass keeps, and the most that a run adds to what was there before."""

import json
import tempfile
from collections.abc import Callable, Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

Outputs = TypeVar("Outputs")


class SavedBytes:
    """Count the bytes that autograd keeps for the backward pass, each storage once however many tensors share it.

    The storages of `known` tensors (weights, tables) are there anyway and do not count.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        self._seen = {
            tensor.untyped_storage().data_ptr(): 0 for tensor in known
        }  # address: bytes that count
        self._alive: list[
            object
        ] = []  # keeps the storages alive: an address that is free may be given out again

    def of(self, run: Callable[[], Outputs]) -> tuple[Outputs, int]:
        """Return what `run` returns, and the bytes that it saves and no earlier run has saved."""
        seen = self._seen
        before = sum(seen.values())

        def pack(tensor: Tensor) -> Tensor:
            # The graph holds this function and what it returns, and the garbage collector does not see the graph: with
            # `self`, which holds the graph, or with a saved output as it is, the graph would hold itself for ever.
            storage = tensor.untyped_storage()
            seen.setdefault(storage.data_ptr(), storage.nbytes())
            return tensor.detach()

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = run()
        self._alive.append(outputs)
        return outputs, sum(seen.values()) - before


def peak_added_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Return the most bytes of tensors that `run` holds at a time, beyond those that existed before it.

    On CUDA from the allocator's statistics, on a CPU from the allocations that torch.profiler records. Neither sees
    what a library allocates for itself.
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
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        return peak_of_trace(json.loads(trace.read_bytes())["traceEvents"])


def peak_of_trace(events: list[dict[str, Any]]) -> int:
    """Return the peak of the running sum of a Chrome trace's allocations and releases, in bytes."""
    changes = [
        (event["ts"], event["args"]["Bytes"])
        for event in events
        if event.get("name") == "[memory]"
    ]
    changes.sort(key=lambda change: change[0])
    return max(accumulate((change for _, change in changes), initial=0))


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors; of a DTensor, those that this process has."""
    return sum(
        (tensor.to_local() if hasattr(tensor, "to_local") else tensor).nbytes
        for tensor in tensors
    )


_OUT_OF_MEMORY = (
    "out of memory",  # the CUDA driver's own, which is no torch.OutOfMemoryError
    "can't allocate memory",  # a CPU's
    "not enough memory",
    "status_alloc_failed",  # cuBLAS's and cuDNN's
    "outofmemoryerror",  # as inductor wraps it
)


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether torch or Python ran out of memory: often, torch raises a plain RuntimeError."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(
        message in text for message in _OUT_OF_MEMORY
    )
