"""Measure a size that is distributed over processes, beside one process with all of it, in interleaved rounds."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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
from .trust import busy_shares, system_clocks, trust

_LINK_BYTES = {"cpu": 2**24, "cuda": 2**29}  # of the all-gather that measures a link

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


def measure_distributed(
    size: Size, settings: Settings, progress: Progress, clock: Clock
) -> DistributedPoint:
    """Measure a size on all processes and on the first one alone.

    The collectives follow from the sizes. Each is timed alone, by all groups of its axis at once, so without the time
    in which it waits for the others where it is called. torch.profiler measures on CUDA how much of them overlaps with
    computation; gloo computes on the same cores.
    """
    progress.start("building")
    device, mesh = settings.device, settings.mesh
    axes = tuple(mesh.axes)
    devices = init_device_mesh(
        device.type, tuple(mesh.axes.values()), mesh_dim_names=axes
    )
    built = build_distributed(size, settings, devices)
    elements = _LINK_BYTES[device.type] // settings.dtype.itemsize
    links = {axis: Collective("all-gather", axis, elements) for axis in axes}
    calls = _calls(size, settings)
    runs: dict[Key, Run] = {}
    for key, run in built.runs.items():
        runs[key] = run
    for call in [
        *links.values(),
        *(call for counts in calls.values() for call in counts),
    ]:
        group = devices[call.axis].get_group()
        runs.setdefault(call, alone(call, group, device, settings.dtype))
    progress.start("timing", len(runs) * settings.rounds)
    start = system_clocks()
    samples = interleave(runs, settings.rounds, 0.01, 1, progress.advance, least, clock)
    shares = busy_shares(start, system_clocks())
    run = built.runs["all", settings.mode]
    overlap = summarize_overlap(events_of(run, device))
    held = held_memory(built.complete, built.optimizer, run, device)
    of_ranks = from_all(samples)
    slowest = _slowest(of_ranks)
    passes = {}
    for who, name in built.runs:
        if who == "all":
            passes[name] = _pass(name, of_ranks, slowest)
    return DistributedPoint(
        size=size,
        whole=passes,
        collectives=_collectives(calls, slowest, settings),
        links={axis: _rate(call, slowest, settings) for axis, call in links.items()},
        overlap=overlap,
        memory=_largest(from_all(held)),
        # Most of the other programs belong to this profile.
        trust=trust(slowest["all", settings.mode], replace(shares, others=None)),
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
        alone, _ = _passes_into_grad(full, settings.mode)
    else:
        # The others wait without using a core.
        alone = dict.fromkeys(passes, _wait)
    runs.update({("one", name): run for name, run in alone.items()})
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
    """Return a forward pass after which the outermost module gives its weights up, as it would not by itself.

    Otherwise, the next pass would not have to gather them.
    """

    def forward() -> None:
        complete.forward()
        model.reshard()

    return forward


def _passes_into_grad(
    complete: TimedPart, mode: str
) -> tuple[dict[str, Run], Optimizer | None]:
    """Return what is timed of a whole, with backward() into .grad: for autograd.grad, FSDP reduces no gradients."""
    runs, optimizer = passes_of(complete, mode)
    if "train" in runs:
        runs["train"] = complete.accumulate
    return runs, optimizer


def _calls(size: Size, settings: Settings) -> dict[str, Counter[Collective]]:
    """Return how often each collective is called in the passes of the mode."""
    calls = collectives_of(size, settings.mesh)
    return {name: calls[name] for name in calls if name in PASSES[settings.mode]}


def _slowest(of_ranks: list[dict[Key, list[float]]]) -> dict[Key, list[float]]:
    """Return what the slowest process takes in each round."""
    found = {}
    for key in of_ranks[0]:
        rounds = zip(*(samples[key] for samples in of_ranks), strict=True)
        found[key] = [max(seconds) for seconds in rounds]
    return found


def _pass(
    name: str,
    of_ranks: list[dict[Key, list[float]]],
    slowest: Mapping[Key, list[float]],
) -> DistributedPass:
    one_process = of_ranks[0]["one", name]
    medians = [Spread.of(samples["all", name]).median for samples in of_ranks]
    return DistributedPass(
        seconds=Spread.of(slowest["all", name]),
        of_ranks=tuple(medians),
        one_process=Spread.of(one_process),
        speed_up=paired_ratio(one_process, slowest["all", name]),
    )


def _collectives(
    calls: Mapping[str, Counter[Collective]],
    slowest: Mapping[Key, list[float]],
    settings: Settings,
) -> tuple[CollectiveTime, ...]:
    """Return the collectives by pass, axis and kind, with the seconds that those of a kind take, each alone."""
    records = []
    for name, counts in calls.items():
        for axis, kind in dict.fromkeys((call.axis, call.kind) for call in counts):
            elements, moved, seconds, number = 0, 0.0, 0.0, 0
            for call, count in counts.items():
                if (call.axis, call.kind) == (axis, kind):
                    number += count
                    elements += count * call.elements
                    moved += count * _moved_bytes(call, settings)
                    seconds += count * Spread.of(slowest[call]).median
            record = CollectiveTime(
                pass_name=name,
                axis=axis,
                kind=kind,
                count=number,
                bytes=elements * settings.dtype.itemsize,
                moved_bytes=moved,
                seconds=seconds,
            )
            records.append(record)
    return tuple(records)


def _moved_bytes(call: Collective, settings: Settings) -> float:
    return settings.dtype.itemsize * call.moved(settings.mesh.axes[call.axis])


def _rate(
    call: Collective, slowest: Mapping[Key, list[float]], settings: Settings
) -> Spread:
    """Return the bytes that each process receives in a second."""
    moved = _moved_bytes(call, settings)
    return Spread.of([moved / seconds for seconds in slowest[call]])


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
    """Return the time in which a GPU runs collectives, waiting included, and that of other kernels beside them."""
    collectives = [event for event in work if event.name.startswith("nccl")]
    if not collectives:
        return None
    others = [event for event in work if not event.name.startswith("nccl")]
    seconds = busy_time(collectives)
    hidden = seconds + busy_time(others) - busy_time(work)
    return Overlap(collective_seconds=1e-6 * seconds, hidden_seconds=1e-6 * hidden)
