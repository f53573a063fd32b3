"""How long a pass takes on many devices, on paper: sizes, ceilings and links in, seconds and MFU out.

The model, which docs/scaling.md checks against measurements:
- Each process computes its share of every part at the roofline of its device.
- A collective takes what its bytes take on the link that it crosses, all processes of a machine at a time; no latency.
- Tensor-parallel collectives lie between computations that need them: none of them is hidden.
- FSDP fetches the weights of the next block, and sends the gradients of the last, while one block runs, its
  tensor-parallel collectives included: they have other streams and mostly other links. So of `layers` equal steps of
  both, the longer one counts, and the transfer that is first or last is not hidden.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from lab.machine import Ceilings
from lab.sizes import PASSES, Size, adamw_cost

from .collectives import Collective, Mesh, collectives_of


@dataclass(frozen=True)
class Links:
    """Bytes per second that each device receives, while it sends as many: from its own machine, and from others.

    `between` is None where all devices are like those of one machine.
    """

    within: float
    between: float | None = None
    per_machine: int = 8

    def seconds(self, collective: Collective, mesh: Mesh, element_size: int) -> float:
        """Return the least time in which its bytes cross each link, when all groups do the same at once."""
        axes = mesh.axes
        processes, inner = axes[collective.axis], 1
        for axis in reversed(axes):  # the last axis has neighbors, the others are this far apart
            if axis == collective.axis:
                break
            inner *= axes[axis]
        together = processes if self.between is None else min(processes, max(1, self.per_machine // inner))
        moved = element_size * collective.moved(processes)
        seconds = moved / self.within if together > 1 else 0.0
        if together < processes and self.between is not None:
            # What other machines have comes once to each machine, by the links of all its devices in the group.
            of_others = (processes - together) / (processes - 1)
            seconds = max(seconds, moved * of_others / together / self.between)
        return seconds


def predict(size: Size, mesh: Mesh, ceilings: Ceilings, links: Links, mode: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return a prediction of docs/profile_schema.md, of a size that splits over the mesh."""
    seconds = compute_seconds(size, mesh, ceilings, dtype.itemsize)
    compute = {name: seconds[name] for name in PASSES[mode]}
    tp = dp = hidden = 0.0
    for name, calls in collectives_of(size, mesh).items():
        if name in compute:
            of_axis = dict.fromkeys(mesh.axes, 0.0)
            for call, count in calls.items():
                of_axis[call.axis] += count * links.seconds(call, mesh, dtype.itemsize)
            of_tp = of_axis.pop("tp", 0.0)
            of_dp = sum(of_axis.values())
            tp, dp = tp + of_tp, dp + of_dp
            hidden += (size.layers - 1) / size.layers * min(of_dp, compute[name] + of_tp)
    computing = sum(compute.values())
    whole = computing + tp + dp - hidden
    return {
        "size": asdict(size),
        "mesh": asdict(mesh),
        "processes": mesh.processes,
        "tokens_per_process": size.tokens / mesh.processes,
        "state_bytes": (4 if mode == "step" else 2 if mode == "train" else 1) * _stored(size, mesh) * dtype.itemsize,
        "seconds": whole,
        "compute_seconds": computing,
        "tp_seconds": tp,
        "dp_seconds": dp,
        "hidden_seconds": hidden,
        "mfu": size.costs(mode).matmul_flops / whole / mesh.processes / ceilings.flops_per_second.median,
    }


def compute_seconds(size: Size, mesh: Mesh, ceilings: Ceilings, element_size: int) -> dict[str, float]:
    """Return what one process computes in a forward and a backward pass, and to update its weights, at the roofline."""
    of_batch = replace(size, batch_size=size.batch_size // mesh.batches)
    # Along tp, some parts are split by tokens, the others by heads or d_ff.
    by_tokens = replace(of_batch, seq_len=-(-size.seq_len // mesh.tp))
    heads, kv_heads = size.num_heads // mesh.tp, size.num_kv_heads // mesh.tp
    by_heads = replace(of_batch, num_heads=heads, num_kv_heads=kv_heads, d_ff=size.d_ff // mesh.tp)
    of_tokens = by_tokens.part_costs(element_size)
    seconds = {"forward": 0.0, "backward": 0.0}
    for name, costs in by_heads.part_costs(element_size).items():
        both = of_tokens[name] if name in ("ln1", "residual adds", "ln2", "final norm") else costs
        for pass_, cost in both.items():
            seconds[pass_] += ceilings.seconds(cost.flops, cost.bytes) * size.count(name)
    update = adamw_cost(_stored(size, mesh), element_size)
    return seconds | {"optimizer": ceilings.seconds(update.flops, update.bytes)}


def _stored(size: Size, mesh: Mesh) -> int:
    """Return how many parameters a process stores."""
    gains = size.layers * size.block_gains + (0 if size.num_layers is None else size.d_model)
    return (gains + (size.parameters - gains) // mesh.tp) // mesh.dp
