"""Measure a size that is distributed over processes, and one process with all of it, in interleaved rounds."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from lab.kernels import busy_time, events_of
from lab.processes import from_all, is_first, least
from lab.progress import Progress
from lab.sizes import PASSES, Size
from lab.timing import Clock, Spread, interleave, paired_ratio
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.optim import Optimizer

from tinyblock import Block, Transformer, parallelize

from .collectives import Collective, alone, collectives_of
from .measure import Run, build_whole, held_memory, passes_of
from .parts import TimedPart, whole
from .records import (
    CollectiveTime,
    DistributedPass,
    DistributedPoint,
    HeldMemory,
    Overlap,
    Settings,
)
from .trust import BusyShares, busy_shares, system_clocks, trust

# The size of the all-gather that measures a link.
_LINK_BYTES = {"cpu": 2**24, "cuda": 2**29}

# Who runs a pass ("all" processes or "one") and its name; or a collective.
Key = tuple[str, str] | Collective


@dataclass(frozen=True)
class Distributed:
    """A model that is distributed over all processes, and what is timed of it.

    complete: the part of it that this process runs, in one call.
    optimizer: AdamW of this process; None except in a step.
    runs: the passes of all processes, and those of the first one alone.
    """

    complete: TimedPart
    optimizer: Optimizer | None
    runs: dict[tuple[str, str], Run]


@dataclass(frozen=True)
class Times:
    """The seconds of each run in each round, by process, and how busy the machine was meanwhile."""

    of_ranks: list[dict[Key, list[float]]]
    shares: BusyShares

    def slowest(self, key: Key) -> list[float]:
        """Return what the slowest process takes in each round."""
        rounds = zip(*(seconds[key] for seconds in self.of_ranks), strict=True)
        return [max(seconds) for seconds in rounds]

    def of_first(self, key: Key) -> list[float]:
        return self.of_ranks[0][key]


def measure_distributed(
    size: Size, settings: Settings, progress: Progress, clock: Clock
) -> DistributedPoint:
    """Measure a size on all processes and on the first one alone.

    The collectives follow from the sizes. Each is timed apart from the model, in all groups of its axis at once: a
    wait for a late process is not part of its time. torch.profiler measures on CUDA how much of them overlaps with
    computation. On CPUs there is no such overlap, because gloo uses the cores that compute.
    """
    progress.start("building")
    axes = settings.mesh.axes
    devices = init_device_mesh(
        settings.device.type, tuple(axes.values()), mesh_dim_names=tuple(axes)
    )
    built = build_distributed(size, settings, devices)
    calls = _calls(size, settings)
    links = _links(settings)
    collectives = [*links.values(), *chain(*calls.values())]
    to_time = _everything_to_time(built, collectives, settings, devices)
    times = _time(to_time, settings, progress, clock)
    whole_run = built.runs["all", settings.mode]
    overlap = summarize_overlap(events_of(whole_run, settings.device))
    held = held_memory(built.complete, built.optimizer, whole_run, settings.device)
    return DistributedPoint(
        size=size,
        whole=_passes(built, times),
        collectives=_collectives(calls, times, settings),
        links={axis: _rate(call, times, settings) for axis, call in links.items()},
        overlap=overlap,
        memory=_largest(from_all(held)),
        trust=trust(times.slowest(("all", settings.mode)), times.shares),
    )


def build_distributed(
    size: Size, settings: Settings, devices: DeviceMesh
) -> Distributed:
    """Build the model of all processes, and that of the first one alone.

    Only the first process still has a model of the full size afterwards.
    """
    model, full = _build(size, settings)
    parallelize(model, devices, compile=settings.compile)
    x = _local(full.inputs[0], settings, devices).requires_grad_(settings.train)
    gradient = [_local(each, settings, devices) for each in full.gradients]
    complete = whole(model, x, *gradient)
    passes, optimizer = _passes_into_grad(complete, settings.mode)
    if settings.mesh.dp > 1:
        passes["forward"] = _resharding(complete, model)
    runs = {("all", name): run for name, run in passes.items()}
    if is_first():
        _, full = _build(size, settings)
        if settings.compile:
            full = full.compiled()
        of_first, _ = _passes_into_grad(full, settings.mode)
    else:
        # The others wait without using a core.
        of_first = dict.fromkeys(passes, _wait)
    for name, run in of_first.items():
        runs["one", name] = run
    return Distributed(complete, optimizer, runs)


def _build(size: Size, settings: Settings) -> tuple[Block | Transformer, TimedPart]:
    torch.manual_seed(settings.seed)
    return build_whole(size, settings)


def _local(tensor: Tensor, settings: Settings, devices: DeviceMesh) -> Tensor:
    """Return this process's sequences of a tensor that all processes have."""
    placements = [
        Replicate() if axis == "tp" else Shard(0) for axis in settings.mesh.axes
    ]
    spread = distribute_tensor(tensor.detach(), devices, placements, src_data_rank=None)
    return spread.to_local().clone()


def _wait() -> None:
    pass


def _resharding(complete: TimedPart, model: Any) -> Callable[[], None]:
    """Return a forward pass after which the model keeps only this process's part of its weights.

    By default, FSDP leaves the outermost module's weights gathered, so the next pass would not have to gather them.
    """

    def forward() -> None:
        complete.forward()
        model.reshard()

    return forward


def _passes_into_grad(
    complete: TimedPart, mode: str
) -> tuple[dict[str, Run], Optimizer | None]:
    """Return what is timed of a whole. Backward fills .grad, because FSDP reduces no gradients for autograd.grad."""
    runs, optimizer = passes_of(complete, mode)
    if "train" in runs:
        runs["train"] = complete.accumulate
    return runs, optimizer


def _calls(size: Size, settings: Settings) -> dict[str, Counter[Collective]]:
    """Return how often each collective is called in the passes of the mode."""
    calls = collectives_of(size, settings.mesh)
    return {name: calls[name] for name in calls if name in PASSES[settings.mode]}


def _links(settings: Settings) -> dict[str, Collective]:
    """Return the large all-gather that measures the link of each axis."""
    elements = _LINK_BYTES[settings.device.type] // settings.dtype.itemsize
    return {
        axis: Collective("all-gather", axis, elements) for axis in settings.mesh.axes
    }


def _everything_to_time(
    built: Distributed,
    collectives: Iterable[Collective],
    settings: Settings,
    devices: DeviceMesh,
) -> dict[Key, Run]:
    """Return all passes, and each collective by itself, in the same order in every process."""
    runs: dict[Key, Run] = {}
    for key, run in built.runs.items():
        runs[key] = run
    for collective in collectives:
        group = devices[collective.axis].get_group()
        runs[collective] = alone(collective, group, settings.device, settings.dtype)
    return runs


def _time(
    runs: dict[Key, Run], settings: Settings, progress: Progress, clock: Clock
) -> Times:
    """Time the runs in all processes at once."""
    progress.start("timing samples", len(runs) * settings.rounds)
    start = system_clocks()
    seconds = interleave(runs, settings.rounds, 0.01, 1, progress.advance, least, clock)
    shares = busy_shares(start, system_clocks())
    # Most of the other programs belong to this profile.
    return Times(from_all(seconds), replace(shares, others=None))


def _passes(built: Distributed, times: Times) -> dict[str, DistributedPass]:
    passes = {}
    for who, name in built.runs:
        if who == "all":
            passes[name] = _pass(name, times)
    return passes


def _pass(name: str, times: Times) -> DistributedPass:
    one_process = times.of_first(("one", name))
    slowest = times.slowest(("all", name))
    medians = [Spread.of(seconds["all", name]).median for seconds in times.of_ranks]
    return DistributedPass(
        seconds=Spread.of(slowest),
        of_ranks=tuple(medians),
        one_process=Spread.of(one_process),
        speed_up=paired_ratio(one_process, slowest),
    )


def _collectives(
    calls: Mapping[str, Counter[Collective]], times: Times, settings: Settings
) -> tuple[CollectiveTime, ...]:
    """Return the collectives by pass, axis and kind."""
    records = []
    for name, counts in calls.items():
        kinds: dict[tuple[str, str], Counter[Collective]] = {}
        for call, count in counts.items():
            kinds.setdefault((call.axis, call.kind), Counter())[call] = count
        for alike in kinds.values():
            records.append(_collective_time(name, alike, times, settings))
    return tuple(records)


def _collective_time(
    pass_name: str, counts: Counter[Collective], times: Times, settings: Settings
) -> CollectiveTime:
    """Return the seconds that collectives of one axis and kind take, each alone."""
    elements, moved, seconds = 0, 0.0, 0.0
    for call, count in counts.items():
        elements += count * call.elements
        moved += count * _moved_bytes(call, settings)
        seconds += count * Spread.of(times.slowest(call)).median
    any_call = next(iter(counts))  # all have the same axis and kind
    return CollectiveTime(
        pass_name=pass_name,
        axis=any_call.axis,
        kind=any_call.kind,
        count=counts.total(),
        bytes=elements * settings.dtype.itemsize,
        moved_bytes=moved,
        seconds=seconds,
    )


def _moved_bytes(call: Collective, settings: Settings) -> float:
    return settings.dtype.itemsize * call.moved(settings.mesh.axes[call.axis])


def _rate(call: Collective, times: Times, settings: Settings) -> Spread:
    """Return the bytes that each process receives in a second."""
    moved = _moved_bytes(call, settings)
    return Spread.of([moved / seconds for seconds in times.slowest(call)])


def _largest(held: list[HeldMemory]) -> HeldMemory:
    """Return the most that a process has of each kind."""
    return HeldMemory(
        parameters_bytes=max(each.parameters_bytes for each in held),
        gradients_bytes=_most([each.gradients_bytes for each in held]),
        optimizer_state_bytes=_most([each.optimizer_state_bytes for each in held]),
        peak_added_bytes=max(each.peak_added_bytes for each in held),
    )


def _most(sizes: list[int | None]) -> int | None:
    """Return the largest size; None if there is none."""
    known = [size for size in sizes if size is not None]
    return max(known, default=None)


def summarize_overlap(work: list[Any]) -> Overlap | None:
    """Return how long a GPU runs collectives, waiting included, and for how long other kernels run beside them.

    None if no kernel is one of NCCL's.
    """
    collectives = [event for event in work if event.name.startswith("nccl")]
    if not collectives:
        return None
    others = [event for event in work if not event.name.startswith("nccl")]
    seconds = busy_time(collectives)
    hidden = seconds + busy_time(others) - busy_time(work)
    return Overlap(collective_seconds=1e-6 * seconds, hidden_seconds=1e-6 * hidden)
