"""The collectives of a model that `parallelize` has spread, from its sizes; each of them can run alone.

Sources: Korthikanti et al., "Reducing Activation Recomputation" (arXiv 2205.05198), section 4.2.2, for tensor and
sequence parallelism; Rajbhandari et al., "ZeRO" (arXiv 1910.02054), section 7, and Zhao et al., "PyTorch FSDP" (arXiv
2304.11277) for what is sharded over the data. A test of `parallelize` counts what the formulas here tell.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from math import prod

import torch
import torch.distributed as dist
from lab.sizes import Size


@dataclass(frozen=True)
class Mesh:
    """How many processes there are along each axis of `parallelize`."""

    dp_replicate: int = 1
    dp: int = 1
    tp: int = 1

    @property
    def axes(self) -> dict[str, int]:
        """Return the axes that have more than one process, the outermost first."""
        return {axis: count for axis, count in asdict(self).items() if count > 1}

    @property
    def processes(self) -> int:
        return prod(self.axes.values())

    @property
    def batches(self) -> int:
        """Return into how many the batch is split."""
        return self.dp_replicate * self.dp

    def __str__(self) -> str:
        return (
            ",".join(f"{axis}={count}" for axis, count in self.axes.items())
            or "one process"
        )

    def require(self, size: Size) -> None:
        """Raise a ValueError where the size does not split over the mesh."""
        if min(asdict(self).values()) < 1:
            raise ValueError(
                f"a mesh has at least 1 process along each axis, got {asdict(self)}"
            )
        if self.dp_replicate > 1 and self.dp == 1:
            raise ValueError(
                f"dp_replicate={self.dp_replicate} needs dp of at least 2: use dp alone"
            )
        if size.batch_size % self.batches:
            multiple = f"use a multiple of {self.batches}"
            raise ValueError(
                f"a batch of {size.batch_size} does not split over {self}: {multiple}"
            )
        for name in ("num_heads", "num_kv_heads", "d_ff", "vocab"):
            if (count := getattr(size, name)) % self.tp:
                raise ValueError(
                    f"{name} must be a multiple of tp={self.tp}, got {count}; use a smaller tp"
                )


@dataclass(frozen=True)
class Collective:
    """A call along one axis. `elements` is of the whole tensor: when gathered, before it is scattered, or summed."""

    kind: str
    axis: str
    elements: int

    def moved(self, processes: int) -> float:
        """Return how many elements each process must receive: those that the others have, of a sum twice as many."""
        return (
            (2 if self.kind == "all-reduce" else 1)
            * self.elements
            * (processes - 1)
            / processes
        )


def collectives_of(
    size: Size, mesh: Mesh, recompute: bool = False
) -> dict[str, Counter[Collective]]:
    """Return the collectives of each process in a forward and in a backward pass, the input's gradient included.

    They are exact where tp divides the sequence and dp the rows of each weight: else torch pads. FSDP gathers embedding
    and head with the final norm. Recomputing a block ends before its last product, and the reduce-scatter after it.
    """
    calls: dict[str, Counter[Collective]]
    calls = {"forward": Counter(), "backward": Counter()}
    if mesh.tp > 1:
        _add_tensor_parallel(calls, size, mesh, recompute)
    if mesh.dp > 1:
        _add_data_parallel(calls, size, mesh)
    return calls


def _add_tensor_parallel(
    calls: dict[str, Counter[Collective]], size: Size, mesh: Mesh, recompute: bool
) -> None:
    """Add the collectives along "tp", of the residual stream and of the gradients of gains."""
    blocks, final_norm = size.layers, int(size.num_layers is not None)
    stream = size.tokens // mesh.batches * size.d_model
    gather = Collective("all-gather", "tp", stream)
    scatter = Collective("reduce-scatter", "tp", stream)
    for counts in calls.values():
        # Into each sub-layer and out of it; one more for the output, or its input.
        counts[gather] += 2 * blocks + 1
        counts[scatter] += 2 * blocks + bool(size.vocab)
    backward = calls["backward"]
    if recompute:
        backward[gather] += 2 * blocks
        backward[scatter] += blocks
    backward[Collective("all-reduce", "tp", size.d_model)] += 2 * blocks + final_norm
    if size.qk_norm:
        backward[Collective("all-reduce", "tp", size.d_head)] += 2 * blocks


def _add_data_parallel(
    calls: dict[str, Counter[Collective]], size: Size, mesh: Mesh
) -> None:
    """Add the collectives along "dp" and "dp_replicate", of weights and their gradients."""
    blocks, final_norm = size.layers, int(size.num_layers is not None)
    matrices = size.block_parameters - size.block_gains
    of_block = size.block_gains + matrices // mesh.tp
    beside = size.d_model + 2 * size.vocab * size.d_model // mesh.tp
    forward, backward = calls["forward"], calls["backward"]
    for elements, count in ((of_block, blocks), (beside, final_norm)):
        if count:
            forward[Collective("all-gather", "dp", elements)] += count
            backward[Collective("reduce-scatter", "dp", elements)] += count
            if mesh.dp_replicate > 1:
                part = Collective("all-reduce", "dp_replicate", elements // mesh.dp)
                backward[part] += count
    if final_norm:  # else the Block is the outermost module, which keeps its weights for the backward pass
        backward[Collective("all-gather", "dp", of_block)] += blocks


def alone(
    collective: Collective,
    group: "dist.ProcessGroup",
    device: torch.device,
    dtype: torch.dtype,
) -> Callable[[], object]:
    """Return a function that does what the collective does, and nothing else, on tensors of its own."""
    processes = group.size()
    part = torch.zeros(-(-collective.elements // processes), device=device, dtype=dtype)
    whole = torch.zeros(processes * len(part), device=device, dtype=dtype)
    if collective.kind == "all-reduce":
        return partial(dist.all_reduce, whole, group=group)
    # As torch 2.13 calls them, or before.
    if collective.kind == "all-gather":
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return partial(gather, whole, part, group=group)
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return partial(scatter, part, whole, group=group)
