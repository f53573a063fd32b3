"""A lower bound on the time of a pass on many devices: sizes, links and the rates of a device in, seconds and MFU out.

docs/scaling.md explains the model, and compares it with published runs. What overlaps: FSDP fetches the weights of the
next block, and sends the gradients of the last one, while a block runs, including its tensor-parallel collectives. So
of `layers` equal steps of both, the longer one counts, and nothing hides the transfer that is first or last.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from lab.costs import Cost, PartCost, adamw_cost
from lab.machine import Rates
from lab.sizes import PASSES, Size

from .collectives import Collective, Mesh, collectives_of

# Along tp, the tokens of these parts are split; the heads, d_ff or the vocabulary of the others.
_SPLIT_BY_TOKENS = ("ln1", "residual sums", "ln2", "final norm", "embedding")
# The share of a part that torch computes twice if it recomputes each block: it stops before the last product of the
# ffn, so the second residual sum is left out, too. Every other part of a block is repeated.
_RECOMPUTED = {
    "ffn": 2 / 3,
    "residual sums": 1 / 2,
    "final norm": 0.0,
    "embedding": 0.0,
    "head": 0.0,
    "loss": 0.0,
}
# Weights, gradients and AdamW's two moments, as far as each mode has them.
_STATES = {"forward": 1, "train": 2, "step": 4}


def is_rate(number: float) -> bool:
    """Return whether a device could have this rate, in FLOP/s or bytes/s."""
    return 1 <= number <= 1e30


@dataclass(frozen=True)
class Links:
    """Bytes per second that each device receives, while it sends as many: from its own machine, and from others.

    Without `between`, all devices are like those of one machine.
    """

    within: float
    between: float | None = None
    per_machine: int = 8

    @classmethod
    def parse(cls, text: str) -> "Links":
        """Return the links of a text such as "450e9,50e9"; raise a ValueError if it is none."""
        try:
            rates = [float(part) for part in text.split(",")]
        except ValueError:
            rates = []
        if len(rates) not in (1, 2) or not all(map(is_rate, rates)):
            raise ValueError(
                f"--link must be bytes/s within and between machines, as in 450e9,50e9, got {text!r}"
            )
        return cls(rates[0], rates[1] if len(rates) == 2 else None)

    def seconds(self, collective: Collective, mesh: Mesh, element_size: int) -> float:
        """Return the least time in which its bytes cross each link, when all groups do the same at once."""
        group = mesh.axes[collective.axis]
        moved = element_size * collective.moved(group)
        in_machine = self._of_one_machine(collective.axis, mesh)
        within = moved / self.within if in_machine > 1 else 0.0
        if self.between is None or in_machine == group:
            return within
        # What other machines have comes to each machine once, by the links of all its devices in the group.
        from_others = moved * (group - in_machine) / (group - 1)
        between = from_others / in_machine / self.between
        return max(within, between)

    def _of_one_machine(self, axis: str, mesh: Mesh) -> int:
        """Return how many devices of a group along the axis share a machine."""
        group = mesh.axes[axis]
        if self.between is None:
            return group
        names = list(mesh.axes)
        inner_axes = names[names.index(axis) + 1 :]
        # Neighbors along the axis are this many devices apart.
        distance = prod(mesh.axes[name] for name in inner_axes)
        return min(group, max(1, self.per_machine // distance))


@dataclass(frozen=True)
class Work:
    """The passes of a mode, the bytes of an element of the dtype, and whether backward recomputes each block."""

    mode: str
    element_size: int
    recompute: bool = False


@dataclass(frozen=True)
class Share:
    """What one device computes of a part in one pass: `count` times this cost."""

    part: str
    count: float
    cost: Cost


@dataclass(frozen=True)
class PassTime:
    """Seconds of one pass: computing, transfers along tp and along dp, and what computing hides of the transfers."""

    compute: float
    tp: float = 0.0
    dp: float = 0.0
    hidden: float = 0.0


@dataclass(frozen=True)
class Prediction:
    """The least time of a size on a mesh.

    size: of all devices together.
    mesh: devices along each axis.
    compute_seconds: computation of each device.
    tp_seconds: its transfers along tp.
    dp_seconds: its transfers along dp and dp_replicate.
    hidden_seconds: what runs of these beside computation.
    state_bytes: weights, gradients and AdamW's moments that each device stores, as far as the mode has them.
    product_flops: FLOPs of matrix products on each device, with causal attention.
    peak: FLOP/s of a device. MFU is the share of it that matrix products reach.
    """

    size: Size
    mesh: Mesh
    compute_seconds: float
    tp_seconds: float
    dp_seconds: float
    hidden_seconds: float
    state_bytes: int
    product_flops: float
    peak: float

    @property
    def not_hidden_seconds(self) -> float:
        return self.tp_seconds + self.dp_seconds - self.hidden_seconds

    @property
    def seconds(self) -> float:
        return self.compute_seconds + self.not_hidden_seconds

    @property
    def mfu(self) -> float:
        return self.product_flops / self.seconds / self.peak

    @property
    def tokens_per_second(self) -> float:
        return self.size.tokens / self.seconds

    @property
    def tokens_per_device(self) -> float:
        return self.size.tokens / self.mesh.processes


def predict(
    size: Size, mesh: Mesh, work: Work, rates: Rates, links: Links
) -> Prediction:
    """Return the prediction for a size that splits over the mesh."""
    passes = _pass_times(size, mesh, work, rates, links)
    return Prediction(
        size=size,
        mesh=mesh,
        compute_seconds=sum(each.compute for each in passes),
        tp_seconds=sum(each.tp for each in passes),
        dp_seconds=sum(each.dp for each in passes),
        hidden_seconds=sum(each.hidden for each in passes),
        state_bytes=_STATES[work.mode] * _stored(size, mesh) * work.element_size,
        product_flops=size.costs(work.mode).matmul_flops / mesh.processes,
        peak=rates.flops_per_second,
    )


def predict_all(
    sizes: Sequence[Size],
    meshes: Sequence[Mesh],
    work: Work,
    rates: Rates,
    links: Links,
) -> list[Prediction]:
    """Return a prediction for each size on each mesh over which it splits."""
    return [
        predict(size, mesh, work, rates, links)
        for size in sizes
        for mesh in meshes
        if mesh.splits(size)
    ]


def shares_of(size: Size, mesh: Mesh, work: Work) -> dict[str, list[Share]]:
    """Return what one device computes in each pass of the mode."""
    passes = PASSES[work.mode]
    costs = _part_costs(size, mesh, work.element_size)
    shares: dict[str, list[Share]] = {name: [] for name in passes}
    for part, cost in costs.items():
        count = size.count(part)
        shares["forward"].append(Share(part, count, cost["forward"]))
        if "backward" in passes:
            shares["backward"].append(Share(part, count, cost["backward"]))
        if "backward" in passes and work.recompute:
            again = count * _RECOMPUTED.get(part, 1.0)
            shares["backward"].append(Share(part, again, cost["forward"]))
    if "optimizer" in passes:
        update = adamw_cost(_stored(size, mesh), work.element_size)
        shares["optimizer"].append(Share("AdamW", 1, update))
    return shares


def _part_costs(size: Size, mesh: Mesh, element_size: int) -> dict[str, PartCost]:
    """Return the cost of each part on one device."""
    of_device = replace(
        size, batch_size=size.batch_size // mesh.batches, vocab=size.vocab // mesh.tp
    )
    tokens = -(-size.seq_len // mesh.tp)  # rounded up
    by_tokens = replace(of_device, seq_len=tokens).part_costs(element_size)
    by_heads = replace(
        of_device,
        num_heads=size.num_heads // mesh.tp,
        num_kv_heads=size.num_kv_heads // mesh.tp,
        d_ff=size.d_ff // mesh.tp,
    ).part_costs(element_size)
    costs = by_heads
    for part in _SPLIT_BY_TOKENS:
        if part in by_tokens:
            costs[part] = by_tokens[part]
    return costs


def _pass_times(
    size: Size, mesh: Mesh, work: Work, rates: Rates, links: Links
) -> list[PassTime]:
    collectives = collectives_of(size, mesh, work.recompute)
    times = []
    for name, shares in shares_of(size, mesh, work).items():
        compute = 0.0
        for share in shares:
            cost = share.cost
            compute += share.count * rates.seconds(cost.flops, cost.bytes)
        calls = collectives.get(name, Counter())
        tp = dp = 0.0
        for call, count in calls.items():
            seconds = count * links.seconds(call, mesh, work.element_size)
            if call.axis == "tp":
                tp += seconds
            else:
                dp += seconds
        # Of one transfer for each layer, all but one run beside the computation of another layer.
        hidden = min(dp, compute + tp) * (size.layers - 1) / size.layers
        times.append(PassTime(compute, tp, dp, hidden))
    return times


def _stored(size: Size, mesh: Mesh) -> int:
    """Return how many parameters a device stores: along tp, each has all gains."""
    matrices = size.parameters - size.gains
    return (size.gains + matrices // mesh.tp) // mesh.dp
