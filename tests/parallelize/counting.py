"""Count the collectives that a run calls."""

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from profiling.collectives import Collective
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# DTensor calls the functional ones, FSDP the others.
_KINDS = {
    **dict.fromkeys(("all_gather_into_tensor", "_allgather_base_"), "all-gather"),
    **dict.fromkeys(("reduce_scatter_tensor", "_reduce_scatter_base_"), "reduce-scatter"),
    **dict.fromkeys(("all_reduce", "allreduce_"), "all-reduce"),
}


class Collectives(TorchDispatchMode):
    """Record the collectives along the axes of a mesh; torch's CommDebugMode fails on a module that is called twice."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.calls: Counter[Collective] = Counter()
        # By their ranks: DTensor may use the group of an equal mesh that was there before.
        self._axes = {_ranks(mesh[axis].get_group()): axis for axis in mesh.mesh_dim_names or ()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(tensor, DTensor) for tensor in types):
            return NotImplemented  # what it does to local tensors comes here again
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.namespace in ("c10d", "_c10d_functional") and not name.startswith(("wait", "_wrap")):
            leaves = tree_leaves((args, out))
            elements = max(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor))
            self.calls[Collective(_KINDS.get(name, name), self._axes[_ranks(_group(leaves))], elements)] += 1
        return out


def _group(leaves: list[Any]) -> dist.ProcessGroup:
    """Return the group among a collective's arguments: itself, or its name behind that of the sum."""
    for leaf in leaves:
        if isinstance(leaf, torch.ScriptObject) and str(leaf._type()).endswith("ProcessGroup"):
            return dist.ProcessGroup.unbox(leaf)
    from torch._C._distributed_c10d import _resolve_process_group

    name: Any = [leaf for leaf in leaves if isinstance(leaf, str)][-1]
    return _resolve_process_group(name)


def _ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))
