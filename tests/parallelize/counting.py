"""Count the collectives that a run calls; torch's CommDebugMode fails on a module that is called twice."""

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from profiling.collectives import Collective
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# DTensor calls the functional ones, FSDP the others.
KINDS = {
    **dict.fromkeys(("all_gather_into_tensor", "_allgather_base_"), "all-gather"),
    **dict.fromkeys(
        ("reduce_scatter_tensor", "_reduce_scatter_base_"), "reduce-scatter"
    ),
    **dict.fromkeys(("all_reduce", "allreduce_"), "all-reduce"),
}


class Collectives(TorchDispatchMode):
    """Record the collectives along the axes of a mesh.

    Groups are compared by their ranks, because DTensor may use an older group of the same ranks.
    """

    def __init__(self, mesh):
        super().__init__()
        self.calls = Counter()
        self.axes = {}
        for axis in mesh.mesh_dim_names:
            ranks = dist.get_process_group_ranks(mesh[axis].get_group())
            self.axes[tuple(ranks)] = axis

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(tensor, DTensor) for tensor in types):
            return NotImplemented  # what it does to local tensors comes here again
        out = func(*args, **(kwargs or {}))
        if _is_collective(func):
            name = func.overloadpacket.__name__
            leaves = tree_leaves((args, out))
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            elements = max(tensor.numel() for tensor in tensors)
            ranks = dist.get_process_group_ranks(_group(leaves))
            axis = self.axes[tuple(ranks)]
            self.calls[Collective(KINDS.get(name, name), axis, elements)] += 1
        return out


def _is_collective(func):
    name = func.overloadpacket.__name__
    is_distributed = func.namespace in ("c10d", "_c10d_functional")
    return is_distributed and not name.startswith(("wait", "_wrap"))


def _group(leaves):
    """Return the process group among the arguments of a collective: an object of FSDP's, or the name of DTensor's."""
    for leaf in leaves:
        is_object = isinstance(leaf, torch.ScriptObject)
        if is_object and str(leaf._type()).endswith("ProcessGroup"):
            return dist.ProcessGroup.unbox(leaf)
    texts: Any = [leaf for leaf in leaves if isinstance(leaf, str)]
    return _resolve_process_group(texts[-1])
