"""How long a pass takes on many devices: sizes, links and either ceilings or a profile in, seconds and MFU out.

docs/scaling.md explains the model, and compares it with measurements. What overlaps: FSDP fetches the weights of the
next block, and sends the gradients of the last, while one block runs, its tensor-parallel collectives included. So of
`layers` equal steps of both, the longer one counts, and the transfer that is first or last is not hidden. On a CPU,
transfers run on the cores that compute, and none is hidden.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any

from lab.machine import Ceilings
from lab.sizes import PASSES, Cost, Size, adamw_cost

from .collectives import Collective, Mesh, collectives_of

# The time of a pass of a part, by their names, if it costs this much.
Price = Callable[[str, str, Cost], float]

_SPLIT_BY_TOKENS = ("ln1", "residual adds", "ln2", "final norm", "embedding")
# Of these parts, recomputing a block repeats less than the whole: it ends before the last product of the ffn.
_RECOMPUTED = {
    "ffn": 2 / 3,
    "residual adds": 1 / 2,
    "final norm": 0,
    "embedding": 0,
    "head": 0,
    "loss": 0,
}


@dataclass(frozen=True)
class Links:
    """Bytes per second that each device receives, while it sends as many: from its own machine, and from others.

    Without `between`, all devices are like those of one machine. `overlap`: whether transfers run beside computing.
    """

    within: float
    between: float | None = None
    per_machine: int = 8
    overlap: bool = True

    def seconds(self, collective: Collective, mesh: Mesh, element_size: int) -> float:
        """Return the least time in which its bytes cross each link, when all groups do the same at once."""
        counts, place = [*mesh.axes.values()], [*mesh.axes].index(collective.axis)
        processes, inner = (
            counts[place],
            prod(counts[place + 1 :]),
        )  # of an axis, neighbors are `inner` apart
        together = (
            processes
            if self.between is None
            else min(processes, max(1, self.per_machine // inner))
        )
        moved = element_size * collective.moved(processes)
        seconds = moved / self.within if together > 1 else 0.0
        if together < processes and self.between is not None:
            # What other machines have comes once to each machine, by the links of all its devices in the group.
            of_others = (processes - together) / (processes - 1)
            seconds = max(seconds, moved * of_others / together / self.between)
        return seconds


def roofline(ceilings: Ceilings) -> Price:
    """Return what takes the least time for any part."""
    return lambda part, pass_, cost: ceilings.seconds(cost.flops, cost.bytes)


def predict(
    size: Size,
    mesh: Mesh,
    price: Price,
    peak: float,
    links: Links,
    mode: str,
    element_size: int,
    recompute: bool,
) -> dict[str, Any]:
    """Return a prediction of docs/profile_schema.md, of a size that splits over the mesh; MFU is of `peak` FLOP/s."""
    compute = compute_seconds(size, mesh, price, mode, element_size, recompute)
    tp = dp = hidden = 0.0
    for name, calls in collectives_of(size, mesh, recompute).items():
        if name in compute:
            of_axis = dict.fromkeys(mesh.axes, 0.0)
            for call, count in calls.items():
                of_axis[call.axis] += count * links.seconds(call, mesh, element_size)
            of_tp = of_axis.pop("tp", 0.0)
            of_dp = sum(of_axis.values())
            tp, dp = tp + of_tp, dp + of_dp
            if links.overlap:
                hidden += (
                    (size.layers - 1) / size.layers * min(of_dp, compute[name] + of_tp)
                )
    computing = sum(compute.values())
    whole = computing + tp + dp - hidden
    return {
        "size": asdict(size),
        "mesh": asdict(mesh),
        "processes": mesh.processes,
        "tokens_per_process": size.tokens / mesh.processes,
        "state_bytes": (4 if mode == "step" else 2 if mode == "train" else 1)
        * _stored(size, mesh)
        * element_size,
        "seconds": whole,
        "compute_seconds": computing,
        "tp_seconds": tp,
        "dp_seconds": dp,
        "hidden_seconds": hidden,
        "mfu": size.costs(mode).matmul_flops / whole / mesh.processes / peak,
    }


def compute_seconds(
    size: Size,
    mesh: Mesh,
    price: Price,
    mode: str,
    element_size: int,
    recompute: bool = False,
) -> dict[str, float]:
    """Return how long one process computes in each pass of the mode."""
    of_batch = replace(
        size, batch_size=size.batch_size // mesh.batches, vocab=size.vocab // mesh.tp
    )
    # Along tp, some parts are split by tokens, the others by heads or d_ff.
    by_tokens = replace(of_batch, seq_len=-(-size.seq_len // mesh.tp))
    heads, kv_heads = size.num_heads // mesh.tp, size.num_kv_heads // mesh.tp
    by_heads = replace(
        of_batch, num_heads=heads, num_kv_heads=kv_heads, d_ff=size.d_ff // mesh.tp
    )
    of_tokens = by_tokens.part_costs(element_size)
    seconds = dict.fromkeys(PASSES[mode], 0.0)
    for name, costs in by_heads.part_costs(element_size).items():
        if name in _SPLIT_BY_TOKENS:
            costs = of_tokens[name]
        for pass_ in seconds.keys() & costs.keys():
            seconds[pass_] += size.count(name) * price(name, pass_, costs[pass_])
        if recompute and "backward" in seconds:
            repeated = _RECOMPUTED.get(name, 1) * size.count(name)
            seconds["backward"] += repeated * price(name, "forward", costs["forward"])
    if "optimizer" in seconds:
        seconds["optimizer"] = price(
            "AdamW", "optimizer", adamw_cost(_stored(size, mesh), element_size)
        )
    return seconds


def _stored(size: Size, mesh: Mesh) -> int:
    """Return how many parameters a process stores."""
    gains = size.layers * size.block_gains + (
        0 if size.num_layers is None else size.d_model
    )
    return (gains + (size.parameters - gains) // mesh.tp) // mesh.dp
