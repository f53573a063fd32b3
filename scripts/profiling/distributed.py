"""Measure a size that is distributed over processes, beside one process with all of it, in interleaved rounds."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from itertools import chain
from typing import Any

import torch
from lab.kernels import busy_time, events_of
from lab.machine import Ceilings
from lab.processes import from_all, is_first, least
from lab.progress import Progress
from lab.sizes import PASSES, Size
from lab.timing import Clock, Spread, interleave, paired_ratio
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.optim import Optimizer

from tinyblock import parallelize

from .collectives import Collective, alone, collectives_of
from .measure import Run, build_whole, held_bytes, runs_of
from .parts import Step, whole
from .records import Settings
from .trust import busy_shares, system_clocks, trust

_LINK_BYTES = {"cpu": 2**24, "cuda": 2**29}  # of the all-gather that measures a link


def measure_distributed(
    size: Size, settings: Settings, ceilings: Ceilings, progress: Progress, clock: Clock
) -> dict[str, Any]:
    """Measure a size on all processes and on the first alone, and return such a point of docs/profile_schema.md.

    The collectives follow from the sizes. Each is timed alone, by all groups of its axis at once, so without the time
    in which it waits for the others where it is called. How much is hidden behind computing is seen on CUDA, by
    torch.profiler; gloo computes on the same cores.
    """
    device, mesh, mode = settings.device, settings.mesh, settings.mode
    progress.start("building")
    devices = init_device_mesh(
        device.type, tuple(mesh.axes.values()), mesh_dim_names=tuple(mesh.axes)
    )
    runs, step, optimizer = distributed_runs(size, settings, devices)
    passes = [name for kind, name in runs if kind == "all"]
    elements = _LINK_BYTES[device.type] // settings.dtype.itemsize
    links = {axis: Collective("all-gather", axis, elements) for axis in mesh.axes}
    calls = {
        name: counts
        for name, counts in collectives_of(size, mesh).items()
        if name in PASSES[mode]
    }
    for call in dict.fromkeys([*links.values(), *chain(*calls.values())]):
        runs[call] = alone(call, devices[call.axis].get_group(), device, settings.dtype)

    progress.start("timing", len(runs) * settings.rounds)
    start = system_clocks()
    samples = interleave(runs, settings.rounds, 0.01, 1, progress.advance, least, clock)
    shares = busy_shares(start, system_clocks()) | {
        "others_share": None
    }  # most of the others are of this profile
    run = runs["all", mode]
    overlap = summarize_overlap(events_of(run, device))
    held: list[dict[str, Any]] = from_all(held_bytes(step, optimizer, run, device))
    of_ranks = from_all(samples)
    # What the slowest process takes in each round.
    slowest = {
        key: [
            max(round_)
            for round_ in zip(*(rank[key] for rank in of_ranks), strict=True)
        ]
        for key in runs
    }

    def times(name: str) -> dict[str, Any]:
        speed_up = paired_ratio(of_ranks[0]["one", name], slowest["all", name])
        return {
            "seconds": asdict(Spread.of(slowest["all", name])),
            "of_ranks": [Spread.of(rank["all", name]).median for rank in of_ranks],
            "one_process": asdict(Spread.of(of_ranks[0]["one", name])),
            "speed_up": asdict(speed_up),
            "efficiency": speed_up.median / mesh.processes,
        }

    def rate(call: Collective) -> dict[str, Any]:
        return asdict(
            Spread.of(
                [_moved_bytes(call, settings) / seconds for seconds in slowest[call]]
            )
        )

    seconds = Spread.of(slowest["all", mode]).median
    peaks = mesh.processes * ceilings.flops_per_second.median
    return {
        "status": "ok",
        "error": None,
        "size": asdict(size),
        "whole": {name: times(name) for name in passes},
        "collectives": _collectives(calls, slowest, settings, seconds),
        "links": {axis: rate(call) for axis, call in links.items()},
        "overlap": overlap,
        "memory": {
            key: max(rank[key] for rank in held) if held[0][key] is not None else None
            for key in held[0]
        },
        "tokens_per_second": size.tokens / seconds,
        "mfu": size.costs(mode).matmul_flops / seconds / peaks,
        "trust": trust(slowest["all", mode], shares, ceilings),
    }


def distributed_runs(
    size: Size, settings: Settings, devices: DeviceMesh
) -> tuple[dict[Any, Run], Step, Optimizer | None]:
    """Return the runs of all processes and of the first alone, and the step and the optimizer of all processes.

    Only the first process still has a model of the full size then.
    """

    def build() -> tuple[Any, Step]:
        torch.manual_seed(settings.seed)
        return build_whole(size, settings)

    model, one = build()
    parallelize(model, devices, compile=settings.compile)
    by_batch = [
        Replicate() if axis == "tp" else Shard(0) for axis in settings.mesh.axes
    ]
    x, *gradient = (
        distribute_tensor(tensor.detach(), devices, by_batch, src_data_rank=None)
        .to_local()
        .clone()
        for tensor in (*one.inputs, *one.gradients)
    )
    step = whole(model, x.requires_grad_(settings.train), *gradient)
    passes, optimizer = _runs(step, settings.mode)
    if (
        settings.mesh.dp > 1
    ):  # else the outermost module keeps its weights, and the next pass need not gather them
        passes["forward"] = lambda: (step.forward(), model.reshard())
    runs: dict[Any, Run] = {("all", name): run for name, run in passes.items()}
    runs |= {("one", name): lambda: None for name in passes}
    if is_first():  # for which the others wait, without a core
        one = build()[1]
        of_one, _ = _runs(one.compiled() if settings.compile else one, settings.mode)
        runs |= {("one", name): run for name, run in of_one.items()}
    return runs, step, optimizer


def _runs(step: Step, mode: str) -> tuple[dict[str, Run], Optimizer | None]:
    """Return what is timed of a whole, with backward() into .grad: for autograd.grad, FSDP reduces no gradients."""
    runs, optimizer = runs_of(step, mode)
    return runs | ({"train": step.accumulate} if "train" in runs else {}), optimizer


def _collectives(
    calls: Mapping[str, Counter[Collective]],
    slowest: Mapping[Any, list[float]],
    settings: Settings,
    whole: float,
) -> list[dict[str, Any]]:
    """Return the collectives by pass, axis and kind, with the seconds that those of a kind take, each alone."""
    records = []
    for pass_, counts in calls.items():
        for axis, kind in dict.fromkeys((call.axis, call.kind) for call in counts):
            alike = {
                call: count
                for call, count in counts.items()
                if (call.axis, call.kind) == (axis, kind)
            }
            seconds = sum(
                count * Spread.of(slowest[call]).median for call, count in alike.items()
            )
            record = {
                "pass": pass_,
                "axis": axis,
                "kind": kind,
                "count": sum(alike.values()),
            }
            record["bytes"] = (
                sum(count * call.elements for call, count in alike.items())
                * settings.dtype.itemsize
            )
            record["moved_bytes"] = sum(
                count * _moved_bytes(call, settings) for call, count in alike.items()
            )
            records.append(record | {"seconds": seconds, "share": seconds / whole})
    return records


def _moved_bytes(call: Collective, settings: Settings) -> float:
    return settings.dtype.itemsize * call.moved(settings.mesh.axes[call.axis])


def summarize_overlap(work: list[Any]) -> dict[str, float] | None:
    """Return the seconds in which a GPU runs a collective, waiting included, and another kernel beside it."""
    collectives = [event for event in work if event.name.startswith("nccl")]
    if not collectives:
        return None
    others = [event for event in work if not event.name.startswith("nccl")]
    seconds = busy_time(collectives)
    hidden = seconds + busy_time(others) - busy_time(work)
    return {"collective_seconds": 1e-6 * seconds, "hidden_seconds": 1e-6 * hidden}
