"""Count the collectives of a model that `parallelize` distributes, from its sizes, and run each of them alone.

Sources: Korthikanti et al., "Reducing Activation Recomputation" (arXiv 2205.05198), section 4.2.2, for tensor and
sequence parallelism; Rajbhandari et al., "ZeRO" (arXiv 1910.02054), section 7, and Zhao et al., "PyTorch FSDP" (arXiv
2304.11277) for what is sharded over the data. A test of `parallelize` counts the calls and compares them.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from math import prod

import torch
import torch.distributed as dist
from lab.records import require_at_least
from lab.sizes import Size

# The outermost first.
_AXES = ("dp_replicate", "dp", "tp")


@dataclass(frozen=True)
class Mesh:
    """How many processes there are along each axis of `parallelize`."""

    dp_replicate: int = 1
    dp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        require_at_least(1, **vars(self))

    @property
    def axes(self) -> dict[str, int]:
        """Return the axes that have more than one process, the outermost first."""
        counts = asdict(self)
        return {axis: counts[axis] for axis in _AXES if counts[axis] > 1}

    @property
    def processes(self) -> int:
        return prod(self.axes.values())

    @property
    def batches(self) -> int:
        """Return the number of pieces into which the batch is split."""
        return self.dp_replicate * self.dp

    @classmethod
    def parse(cls, text: str) -> "Mesh":
        """Return the mesh of a text such as "tp=8,dp=64"; raise a ValueError if it is none."""
        counts: dict[str, int] = {}
        for part in text.split(","):
            axis, _, count = part.partition("=")
            if axis not in _AXES or not count.isdecimal():
                raise ValueError(
                    f"a mesh must consist of {', '.join(_AXES)}, as in tp=8,dp=64, got {text!r}"
                )
            if axis in counts:
                raise ValueError(f"a mesh must have each axis once, got {text!r}")
            counts[axis] = int(count)
        return cls(**counts)

    def __str__(self) -> str:
        counts = [f"{axis}={count}" for axis, count in self.axes.items()]
        return ",".join(counts) or "one process"

    def splits(self, size: Size) -> bool:
        """Return whether the size splits over the mesh."""
        try:
            self.require(size)
        except ValueError:
            return False
        return True

    def require(self, size: Size) -> None:
        """Raise a ValueError where the size does not split over the mesh."""
        if self.dp_replicate > 1 and self.dp == 1:
            raise ValueError(
                f"dp_replicate={self.dp_replicate} requires dp of at least 2: use dp instead"
            )
        if size.batch_size % self.batches:
            raise ValueError(
                f"batch_size must be a multiple of {self.batches} for {self}, got {size.batch_size}"
            )
        for name in ("num_heads", "num_kv_heads", "d_ff", "vocab"):
            count = getattr(size, name)
            if count % self.tp:
                raise ValueError(
                    f"{name} must be a multiple of tp={self.tp}, got {count}: use a smaller tp"
                )


@dataclass(frozen=True)
class Collective:
    """A call along one axis. `elements` is of the whole tensor: when gathered, before it is scattered, or summed."""

    kind: str
    axis: str
    elements: int

    def moved(self, processes: int) -> float:
        """Return how many elements each process must receive: what the others have, and of a sum twice as many."""
        of_others = self.elements * (processes - 1) / processes
        return 2 * of_others if self.kind == "all-reduce" else of_others


def collectives_of(
    size: Size, mesh: Mesh, recompute: bool = False
) -> dict[str, Counter[Collective]]:
    """Return the collectives of each process in a forward and in a backward pass, the input's gradient included.

    They are exact where tp divides the sequence and dp the rows of each weight: else torch pads. FSDP gathers embedding
    and head with the final norm. Recomputing a block ends before its last product, and the reduce-scatter after it.
    """
    calls = {"forward": Counter[Collective](), "backward": Counter[Collective]()}
    if mesh.tp > 1:
        _add_tensor_parallel(calls, size, mesh, recompute)
    if mesh.dp > 1:
        _add_data_parallel(calls, size, mesh)
    return calls


def _add_tensor_parallel(
    calls: dict[str, Counter[Collective]], size: Size, mesh: Mesh, recompute: bool
) -> None:
    """Add the collectives along "tp", of the residual stream and of the gradients of gains."""
    blocks = size.layers
    final_norms = 0 if size.num_layers is None else 1
    embeddings = 1 if size.vocab else 0
    stream = size.tokens // mesh.batches * size.d_model
    gather = Collective("all-gather", "tp", stream)
    scatter = Collective("reduce-scatter", "tp", stream)
    for counts in calls.values():
        # Into each sub-layer and out of it; one more for the output, or its input.
        counts[gather] += 2 * blocks + 1
        counts[scatter] += 2 * blocks + embeddings
    backward = calls["backward"]
    if recompute:
        backward[gather] += 2 * blocks
        backward[scatter] += blocks
    backward[Collective("all-reduce", "tp", size.d_model)] += 2 * blocks + final_norms
    if size.qk_norm:
        backward[Collective("all-reduce", "tp", size.d_head)] += 2 * blocks


def _add_data_parallel(
    calls: dict[str, Counter[Collective]], size: Size, mesh: Mesh
) -> None:
    """Add the collectives along "dp" and "dp_replicate", of weights and their gradients."""
    forward, backward = calls["forward"], calls["backward"]
    of_block = size.block_gains + size.block_matrices // mesh.tp
    # FSDP gathers the weights of each block at once, and those outside of the blocks with the final norm.
    gathered = [(of_block, size.layers)]
    if size.num_layers is not None:
        embedding_and_head = 2 * size.vocab * size.d_model
        gathered.append((size.d_model + embedding_and_head // mesh.tp, 1))
        # A single Block is the outermost module, which keeps its weights for the backward pass.
        backward[Collective("all-gather", "dp", of_block)] += size.layers
    for elements, count in gathered:
        forward[Collective("all-gather", "dp", elements)] += count
        backward[Collective("reduce-scatter", "dp", elements)] += count
        if mesh.dp_replicate > 1:
            part = Collective("all-reduce", "dp_replicate", elements // mesh.dp)
            backward[part] += count


def alone(
    collective: Collective,
    group: "dist.ProcessGroup",
    device: torch.device,
    dtype: torch.dtype,
) -> Callable[[], object]:
    """Return a function that runs only this collective, on tensors of its own."""
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
