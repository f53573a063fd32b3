"""What a profile consists of.

`python scripts/profile_block.py --json FILE` writes one `Profile` as JSON: each record becomes an object whose keys are
the fields that are described here. In a sweep, the file is replaced after every size. Times are in seconds, memory is
in bytes, and work is in floating-point operations (FLOP; a multiply-add counts as two). null means not measured.

"The whole" is the Block, or the Transformer, run in one call; a "part" is one of its layers or operations.

The records hold what was measured. What follows from it (tokens per second, MFU, distances from the roofline) stands in
the file under the key "analysis" of each point, which is `Analysis` of analysis.py, and is not read back.
"""

from dataclasses import dataclass, field
from typing import Literal

import torch
from lab.costs import Cost
from lab.environment import Environment
from lab.kernels import Kernels
from lab.machine import Ceilings, Rates
from lab.records import require_at_least
from lab.sizes import Size
from lab.timing import Spread

from .collectives import Mesh

SCHEMA = "tinyblock.profile/2"
Mode = Literal["forward", "train", "step"]
Axis = Literal["seq-len", "batch-size", "d-model"]
# A time below the first one is noise, and no run takes the second one.
LEAST_SECONDS = 1e-12
LARGEST_SECONDS = 1e9


@dataclass(frozen=True)
class Settings:
    """How the sizes were measured, apart from the files that were written.

    device: cpu or cuda:0.
    dtype: that of weights and inputs.
    mode: the passes to measure: forward; train (forward and backward); or step (forward, backward and AdamW).
    compile: whether the whole and each part were compiled.
    rounds: number of samples of each time.
    seed: seed of weights and inputs.
    mesh: processes along each axis; 1 along all axes without torchrun.
    preset: the name of the model whose block was measured; null without --preset.
    sweep: the axis along which the sizes differ: seq-len, batch-size or d-model; null for a single size.
    """

    device: torch.device
    dtype: torch.dtype
    mode: Mode
    compile: bool = False
    rounds: int = 15
    seed: int = 0
    mesh: Mesh = field(default_factory=Mesh)
    preset: str | None = None
    sweep: Axis | None = None

    def __post_init__(self) -> None:
        require_at_least(1, rounds=self.rounds)

    @property
    def train(self) -> bool:
        return self.mode != "forward"


@dataclass(frozen=True)
class Pass:
    """One pass of a part or of the whole.

    seconds: over the rounds. On CUDA, the longer of host and GPU. Backward is the time of forward and backward minus
        that of forward in the same round, so noise can make it negative.
    gpu_seconds: on CUDA, the time of the GPU alone: its work is queued before it starts, so it does not wait for the
        host. Null on a CPU, and for a pass with more launches than a stream takes.
    cost: the FLOPs and the fewest bytes of this pass.
    """

    seconds: Spread
    gpu_seconds: Spread | None
    cost: Cost

    def require_time(self, name: str) -> None:
        """Raise a ValueError unless the times can be right; `name` is that of the pass."""
        times = {f"the time of {name}": self.seconds}
        if self.gpu_seconds is not None:
            times[f"the GPU's time of {name}"] = self.gpu_seconds
        for what, spread in times.items():
            require_at_least(LEAST_SECONDS, **{what: spread.p20})
            if spread.p80 > LARGEST_SECONDS:
                raise ValueError(
                    f"{what} must be at most {LARGEST_SECONDS:g} s, got {spread.p80}"
                )

    @property
    def is_noise(self) -> bool:
        """Return whether noise left no time to a fifth of the samples, as it can to a difference."""
        shortest = self.seconds.p20
        if self.gpu_seconds is not None:
            shortest = min(shortest, self.gpu_seconds.p20)
        return shortest < LEAST_SECONDS

    @property
    def flops_per_second(self) -> float | None:
        """Return the rate: on a GPU that of its own time. None if the time is lost in the noise."""
        if self.is_noise:
            return None
        return self.cost.flops / self.own_seconds

    @property
    def own_seconds(self) -> float:
        """Return the median time: on a GPU its own, because the whole does not wait for the launches of each part."""
        if self.gpu_seconds is not None:
            return self.gpu_seconds.median
        return self.seconds.median


@dataclass(frozen=True)
class Part:
    """A part of the block, the whole, or AdamW.

    Each part runs with the weights, inputs and gradients that it has inside the block, strides included, and several
    times in a row, so small tensors stay in the caches.

    name: ln1, q/k/v projections, q/k norm, rope, attention, output projection, residual sums (both), ln2, ffn, final
        norm; the whole; or AdamW.
    count: the number of times that the whole contains the part. All other figures are for one.
    passes: by their names: forward and backward; optimizer for AdamW; the whole also has train (forward and backward)
        and step. Passes that the mode leaves out are missing.
    """

    name: str
    count: int
    passes: dict[str, Pass]

    def __post_init__(self) -> None:
        require_at_least(1, count=self.count)
        for name, each in self.passes.items():
            # Backward is a difference of two times, and noise may make it negative.
            if name != "backward":
                each.require_time(name)

    @property
    def has_gpu_seconds(self) -> bool:
        """Return whether the time of the GPU alone is known for each pass."""
        return all(each.gpu_seconds is not None for each in self.passes.values())


@dataclass(frozen=True)
class SumOfParts:
    """The times of all parts added up in each round.

    seconds: the sum.
    of_whole: the sum divided by the time of the whole in the same round.
    """

    seconds: Spread
    of_whole: Spread


@dataclass(frozen=True)
class Compilation:
    """The first call of the compiled whole.

    seconds: duration of the call.
    from_cache: whether inductor found compiled code on disk.
    graphs: number of graphs.
    graph_breaks: number of graph breaks.
    break_reasons: why the graph broke.
    """

    seconds: float
    from_cache: bool
    graphs: int
    graph_breaks: int
    break_reasons: tuple[str, ...]

    def __post_init__(self) -> None:
        require_at_least(0, graphs=self.graphs, graph_breaks=self.graph_breaks)


@dataclass(frozen=True)
class HeldMemory:
    """The memory of a whole, or of one process.

    parameters_bytes: weights.
    gradients_bytes: gradients of the weights; null in mode forward.
    optimizer_state_bytes: AdamW's moments and step counts; null except in mode step.
    peak_added_bytes: the peak of tensor memory during a run, minus the memory before it; gradients are part of it.
        On CUDA from the allocator's statistics, on a CPU from the allocations that torch.profiler records.
    """

    parameters_bytes: int
    gradients_bytes: int | None
    optimizer_state_bytes: int | None
    peak_added_bytes: int

    def __post_init__(self) -> None:
        require_at_least(0, **vars(self))


@dataclass(frozen=True)
class PartMemory:
    """The memory of a part.

    name: the part.
    kept_bytes: storage that autograd keeps for backward. A storage counts for the first part that keeps it. It is
        measured without compilation. Null in mode forward.
    peak_added_bytes: the peak of tensor memory during a run of the part, minus the memory before it.
    """

    name: str
    kept_bytes: int | None
    peak_added_bytes: int

    def __post_init__(self) -> None:
        require_at_least(
            0, kept_bytes=self.kept_bytes, peak_added_bytes=self.peak_added_bytes
        )


@dataclass(frozen=True)
class Memory:
    """Where memory goes.

    held: of the whole.
    peak_bytes: the peak, with what was there before the run: parameters, tables, optimizer state and input.
    kept_bytes: storage that autograd keeps for backward of the whole, each counted once, without parameters and
        tables. Null in mode forward.
    parts: of each part.
    """

    held: HeldMemory
    peak_bytes: int
    kept_bytes: int | None
    parts: tuple[PartMemory, ...]

    def __post_init__(self) -> None:
        require_at_least(0, peak_bytes=self.peak_bytes, kept_bytes=self.kept_bytes)


@dataclass(frozen=True)
class Trust:
    """How reliable the times of the whole are.

    waited_share: time in which threads of this process were ready to run but waited for a core, added over all threads,
        as a share of the run time; null except on Linux, like the next.
    others_share: the share of all cores that other programs used.
    spread: p80 minus p20 of the whole, divided by its median.
    median_above_fastest: how far the median is above the fastest sample, as a share of that sample.
    """

    waited_share: float | None
    others_share: float | None
    spread: float
    median_above_fastest: float

    def __post_init__(self) -> None:
        require_at_least(0, **vars(self))


@dataclass(frozen=True)
class Point:
    """One size, measured in one process.

    The whole is the Block or Transformer of this size.

    size: what was built.
    parts: in the order of the block.
    whole: all of it in one call.
    optimizer: one update of AdamW; null except in mode step.
    sum_of_parts: for the passes forward, backward and train.
    overhead: by pass, the time of the same calls on a tiny input (one token, d_model 8, d_ff 8), which contain almost
        no arithmetic: Python, dispatch and launches.
    compilation: null without --compile.
    attention_kernel: torch's kernel for attention: flash, efficient, cudnn or math.
    memory: in a run of the mode's passes.
    kernels: null without CUDA, or if torch.profiler recorded none.
    trust: how reliable the figures are.
    kind: tells the records of points apart.
    """

    size: Size
    parts: tuple[Part, ...]
    whole: Part
    optimizer: Part | None
    sum_of_parts: dict[str, SumOfParts]
    overhead: dict[str, Spread]
    compilation: Compilation | None
    attention_kernel: str
    memory: Memory
    kernels: Kernels | None
    trust: Trust
    kind: Literal["one process"] = "one process"

    @property
    def addends(self) -> tuple[Part, ...]:
        """Return what adds up to the whole: the parts, and in a step AdamW."""
        if self.optimizer is None:
            return self.parts
        return (*self.parts, self.optimizer)


@dataclass(frozen=True)
class OutOfMemory:
    """A size for which the memory did not suffice.

    size: what was to be built.
    error: the message.
    kind: tells the records of points apart.
    """

    size: Size
    error: str
    kind: Literal["out of memory"] = "out of memory"


@dataclass(frozen=True)
class DistributedPass:
    """One pass of the whole on several processes.

    seconds: of the slowest process in each round.
    of_ranks: the median of each process.
    one_process: a single process with the whole batch, in the same rounds.
    speed_up: its time divided by the slowest's.
    """

    seconds: Spread
    of_ranks: tuple[float, ...]
    one_process: Spread
    speed_up: Spread

    def __post_init__(self) -> None:
        require_at_least(
            LEAST_SECONDS, seconds=self.seconds.p20, one_process=self.one_process.p20
        )


@dataclass(frozen=True)
class CollectiveTime:
    """All collectives of a kind along one axis of the mesh in one pass.

    pass_name: forward, backward or optimizer.
    axis: of the mesh.
    kind: such as all-gather.
    count: number of calls in one process.
    bytes: of the whole tensors: gathered, before they are scattered, or summed.
    moved_bytes: what a process must receive.
    seconds: time of these calls when they run alone, one after another.
    """

    pass_name: str
    axis: str
    kind: str
    count: int
    bytes: int
    moved_bytes: float
    seconds: float


@dataclass(frozen=True)
class Overlap:
    """How much communication runs beside computation.

    collective_seconds: time of NCCL's kernels in one run of the whole, waiting included.
    hidden_seconds: the part of it in which another kernel ran.
    """

    collective_seconds: float
    hidden_seconds: float


@dataclass(frozen=True)
class DistributedPoint:
    """One size, measured on several processes.

    size: what all processes share.
    whole: by pass: forward, train and step, as far as the mode includes them.
    collectives: by pass, axis and kind.
    links: by axis, the bytes per second that each process receives in a large all-gather, all groups at once.
    overlap: on CUDA, from torch.profiler; null elsewhere.
    memory: of the process that uses the most.
    trust: others_share is null, because most of the others belong to this profile.
    kind: tells the records of points apart.
    """

    size: Size
    whole: dict[str, DistributedPass]
    collectives: tuple[CollectiveTime, ...]
    links: dict[str, Spread]
    overlap: Overlap | None
    memory: HeldMemory
    trust: Trust
    kind: Literal["several processes"] = "several processes"


@dataclass(frozen=True)
class Profile:
    """A whole profile.

    environment: where and when it was measured.
    settings: how it was measured.
    ceilings: the fastest matrix product and copy of this device in this dtype.
    datasheet: what the manufacturer gives; null if the exact device is unknown, or has no peak for this dtype.
    points: one for each size, in the order of the sweep.
    finished: false while sizes of a sweep are missing, as after Ctrl-C.
    schema: the version of this format. New keys may be added under the same version.
    """

    environment: Environment
    settings: Settings
    ceilings: Ceilings
    datasheet: Rates | None
    points: tuple[Point | DistributedPoint | OutOfMemory, ...] = ()
    finished: bool = False
    schema: str = SCHEMA


def times_of(
    point: Point | DistributedPoint | OutOfMemory,
) -> dict[tuple[str, str], Spread]:
    """Return the seconds of each part and pass of a point, by their names; none if memory ran out."""
    if isinstance(point, OutOfMemory):
        return {}
    if isinstance(point, DistributedPoint):
        return {("whole", name): each.seconds for name, each in point.whole.items()}
    times = {}
    for part in (*point.addends, point.whole):
        for name, each in part.passes.items():
            times[part.name, name] = each.seconds
    return times
