"""Measure a size that is distributed over processes, beside one process with all of it, in interleaved rounds."""

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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tinyblock import parallelize

from .collectives import Collective, alone, collectives_of
from .measure import Run, Settings, build_whole, held_bytes, runs_of
from .parts import Step, whole
from .trust import busy_shares, system_clocks, trust

_LINK_BYTES = {"cpu": 2**24, "cuda": 2**29}  # of the all-gather that measures a link


class Distributed:
    """A size, built on all processes and on the first alone, and what is timed of both.

    The collectives follow from the sizes. Each is timed alone, by all groups of its axis at once, so without the time
    in which it waits for the others where it is called. How much is hidden behind computing is seen on CUDA, by
    torch.profiler; gloo computes on the same cores.
    """

    def __init__(self, size: Size, settings: Settings) -> None:
        self.size, self.mesh, self.settings = size, settings.mesh, settings
        device, axes = settings.device, settings.mesh.axes
        devices = init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
        model, one = self._build()
        parallelize(model, devices, compile=settings.compile)
        by_batch = [Replicate() if axis == "tp" else Shard(0) for axis in axes]
        x, *gradients = (
            distribute_tensor(tensor.detach(), devices, by_batch, src_data_rank=None).to_local().clone()
            for tensor in (*one.inputs, *one.gradients)
        )
        self.step = whole(model, x.requires_grad_(settings.train), gradients[0] if gradients else None)
        self.passes, self.optimizer = runs_of(self.step, settings.mode)
        if settings.mesh.dp > 1:  # else the outermost module keeps its weights, and the next pass need not gather them
            self.passes["forward"] = lambda: (self.step.forward(), model.reshard())
        self.runs: dict[Any, Run] = {("all", name): run for name, run in self.passes.items()}
        self.runs |= {("one", name): lambda: None for name in self.passes}
        if is_first():  # for which the others wait, without a core
            one = self._build()[1]
            one_passes, _ = runs_of(one.compiled() if settings.compile else one, settings.mode)
            self.runs |= {("one", name): run for name, run in one_passes.items()}
        calls = collectives_of(size, settings.mesh)
        self.calls = {name: calls[name] for name in PASSES[settings.mode] if name in calls}
        elements = _LINK_BYTES[device.type] // settings.dtype.itemsize
        self.links = {axis: Collective("all-gather", axis, elements) for axis in axes}
        for call in dict.fromkeys([*self.links.values(), *chain(*self.calls.values())]):
            self.runs[call] = alone(call, devices[call.axis].get_group(), device, settings.dtype)

    def _build(self) -> tuple[Any, Step]:
        torch.manual_seed(self.settings.seed)
        return build_whole(self.size, self.settings)

    def point(self, ceilings: Ceilings, progress: Progress, clock: Clock) -> dict[str, Any]:
        """Measure, and return such a point of docs/profile_schema.md."""
        settings, mesh, start = self.settings, self.mesh, system_clocks()
        progress.start("timing", len(self.runs) * settings.rounds)
        samples = interleave(self.runs, settings.rounds, 0.01, 1, progress.advance, least, clock)
        shares = busy_shares(start, system_clocks()) | {"others_share": None}  # most of the others are of this profile
        run = self.passes[settings.mode]
        overlap = summarize_overlap(events_of(run, settings.device))
        held: list[dict[str, Any]] = from_all(held_bytes(self.step, self.optimizer, run, settings.device))
        self.samples = from_all(samples)
        passes = {name: self._pass(name) for name in self.passes}
        seconds = passes[settings.mode]["seconds"]["median"]
        peaks = mesh.processes * ceilings.flops_per_second.median
        return {
            "status": "ok",
            "error": None,
            "size": asdict(self.size),
            "whole": passes,
            "collectives": self._collectives(seconds),
            "links": {axis: self._rate(call) for axis, call in self.links.items()},
            "overlap": overlap,
            "memory": {
                key: max(of_rank[key] for of_rank in held) if held[0][key] is not None else None for key in held[0]
            },
            "tokens_per_second": self.size.tokens / seconds,
            "mfu": self.size.costs(settings.mode).matmul_flops / seconds / peaks,
            "trust": trust(self._slowest(("all", settings.mode)), shares, ceilings),
        }

    def _slowest(self, key: Any) -> list[float]:
        """Return what the slowest process takes in each round."""
        return [max(round_) for round_ in zip(*(samples[key] for samples in self.samples), strict=True)]

    def _pass(self, name: str) -> dict[str, Any]:
        slowest, one = self._slowest(("all", name)), self.samples[0]["one", name]
        speed_up = paired_ratio(one, slowest)
        return {
            "seconds": asdict(Spread.of(slowest)),
            "of_ranks": [Spread.of(samples["all", name]).median for samples in self.samples],
            "one_process": asdict(Spread.of(one)),
            "speed_up": asdict(speed_up),
            "efficiency": speed_up.median / self.mesh.processes,
        }

    def _rate(self, call: Collective) -> dict[str, Any]:
        return asdict(Spread.of([self._moved(call) / seconds for seconds in self._slowest(call)]))

    def _moved(self, call: Collective) -> float:
        return self.settings.dtype.itemsize * call.moved(self.mesh.axes[call.axis])

    def _collectives(self, whole_seconds: float) -> list[dict[str, Any]]:
        """Return the collectives by pass, axis and kind; the seconds of all of them, as each takes alone."""
        records: dict[tuple[str, ...], dict[str, Any]] = {}
        for pass_, calls in self.calls.items():
            for call, count in calls.items():
                key = {"pass": pass_, "axis": call.axis, "kind": call.kind}
                seconds = count * Spread.of(self._slowest(call)).median
                figures = {
                    "count": count,
                    "bytes": count * call.elements * self.settings.dtype.itemsize,
                    "moved_bytes": count * self._moved(call),
                    "seconds": seconds,
                    "share": seconds / whole_seconds,
                }
                record = records.setdefault(tuple(key.values()), key | dict.fromkeys(figures, 0))
                record |= {name: record[name] + figure for name, figure in figures.items()}
        return list(records.values())


def summarize_overlap(work: list[Any]) -> dict[str, float] | None:
    """Return the seconds in which the events of a GPU have a collective, and in which another kernel runs beside it.

    A collective that waits for another process is running, too.
    """
    collectives = [event for event in work if event.name.startswith("nccl")]
    if not collectives:
        return None
    others = [event for event in work if not event.name.startswith("nccl")]
    seconds = busy_time(collectives)
    return {
        "collective_seconds": 1e-6 * seconds,
        "hidden_seconds": 1e-6 * (seconds + busy_time(others) - busy_time(work)),
    }
