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
    """Record the collectives along the axes of a mesh, by the ranks of a group: DTensor may use an equal, older one."""

    def __init__(self, mesh):
        super().__init__()
        self.calls = Counter()
        self.axes = {
            str(dist.get_process_group_ranks(mesh[axis].get_group())): axis
            for axis in mesh.mesh_dim_names
        }

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(tensor, DTensor) for tensor in types):
            return NotImplemented  # what it does to local tensors comes here again
        out, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        if func.namespace in ("c10d", "_c10d_functional") and not name.startswith(
            ("wait", "_wrap")
        ):
            leaves = tree_leaves((args, out))
            elements = max(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor))
            objects = [leaf for leaf in leaves if isinstance(leaf, torch.ScriptObject)]
            boxes = [
                leaf for leaf in objects if str(leaf._type()).endswith("ProcessGroup")
            ]
            names: Any = [
                leaf for leaf in leaves if isinstance(leaf, str)
            ]  # the last is that of the group
            group = (
                dist.ProcessGroup.unbox(boxes[0])
                if boxes
                else _resolve_process_group(names[-1])
            )
            axis = self.axes[str(dist.get_process_group_ranks(group))]
            self.calls[Collective(KINDS.get(name, name), axis, elements)] += 1
        return out
