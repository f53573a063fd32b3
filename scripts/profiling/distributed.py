"""Measure a size that is distributed over processes, beside one process with all of it, in interleaved rounds."""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from itertools import chain
from typing import Any

import torch
from lab.kernels import busy_time, events_of
from lab.machine import Ceilings
from lab.memory import bytes_of, peak_added_bytes
from lab.processes import from_all, is_first, least
from lab.progress import Progress
from lab.sizes import PASSES, Size
from lab.timing import Clock, Spread, interleave, paired_ratio
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.optim import Optimizer

from tinyblock import parallelize

from .collectives import Collective, alone, collectives_of
from .measure import Settings, adamw, build_whole, state_bytes, training_step
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
        self.devices = init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
        model, one = self._build()
        parallelize(model, self.devices, compile=settings.compile)
        by_batch = [Replicate() if axis == "tp" else Shard(0) for axis in axes]
        x, *gradients = (
            distribute_tensor(tensor.detach(), self.devices, by_batch, src_data_rank=None).to_local().clone()
            for tensor in (*one.inputs, *one.gradients)
        )
        self.step = whole(model, x.requires_grad_(settings.train), gradients[0] if gradients else None)
        calls = collectives_of(size, settings.mesh)
        self.calls = {name: calls[name] for name in PASSES[settings.mode] if name in calls}
        self.runs, self.optimizer = _runs(self.step, settings.mode)
        if settings.mesh.dp > 1:  # else the outermost module keeps its weights, and the next pass need not gather them
            self.runs["forward"] = lambda: (self.step.forward(), model.reshard())
        self.runs_of_one: dict[str, Callable[[], object]] = dict.fromkeys(self.runs, lambda: None)
        if is_first():  # for which the others wait, without a core
            one = self._build()[1]
            self.runs_of_one = _runs(one.compiled() if settings.compile else one, settings.mode)[0]
        elements = _LINK_BYTES[device.type] // settings.dtype.itemsize
        self.links = {axis: Collective("all-gather", axis, elements) for axis in axes}

    def _build(self) -> tuple[Any, Step]:
        torch.manual_seed(self.settings.seed)
        return build_whole(self.size, self.settings)

    def point(self, ceilings: Ceilings, progress: Progress, clock: Clock) -> dict[str, Any]:
        """Measure, and return such a point of docs/profile_schema.md."""
        settings, mesh, start = self.settings, self.mesh, system_clocks()
        timed: dict[Any, Callable[[], object]] = {("all", name): run for name, run in self.runs.items()}
        timed |= {("one", name): run for name, run in self.runs_of_one.items()}
        for call in dict.fromkeys([*self.links.values(), *chain(*self.calls.values())]):
            timed[call] = alone(call, self.devices[call.axis].get_group(), settings.device, settings.dtype)
        progress.start("timing", len(timed) * settings.rounds)
        samples = interleave(timed, settings.rounds, 0.01, 1, progress.advance, least, clock)
        shares = busy_shares(start, system_clocks())
        shares["others_share"] = None  # most of them belong to this profile
        run = self.runs[settings.mode]
        overlap, memory = summarize_overlap(events_of(run, settings.device)), self._memory(run)
        self.samples = from_all(samples)
        passes = {name: self._pass(name) for name in self.runs}
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
            "memory": memory,
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
        records = []
        for pass_, calls in self.calls.items():
            for axis, kind in dict.fromkeys((call.axis, call.kind) for call in calls):
                alike = {call: count for call, count in calls.items() if (call.axis, call.kind) == (axis, kind)}
                seconds = sum(count * Spread.of(self._slowest(call)).median for call, count in alike.items())
                record = {"pass": pass_, "axis": axis, "kind": kind, "count": sum(alike.values())}
                record["bytes"] = sum(n * call.elements for call, n in alike.items()) * self.settings.dtype.itemsize
                record["moved_bytes"] = sum(n * self._moved(call) for call, n in alike.items())
                records.append(record | {"seconds": seconds, "share": seconds / whole_seconds})
        return records

    def _memory(self, run: Callable[[], object]) -> dict[str, int | None]:
        """Return what the process with the most of each holds."""
        gradients = [weight.grad for weight in self.step.weights if weight.grad is not None]
        held = {
            "parameters_bytes": bytes_of(self.step.weights),
            "gradients_bytes": bytes_of(gradients) if self.settings.train else None,
            "optimizer_state_bytes": self.optimizer and state_bytes(self.optimizer),
        }
        self.step.clear()
        held["peak_added_bytes"] = peak_added_bytes(run, self.settings.device)
        of_ranks = from_all(held)
        return {key: max(rank[key] or 0 for rank in of_ranks) if held[key] is not None else None for key in held}


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


def _runs(step: Step, mode: str) -> tuple[dict[str, Callable[[], object]], Optimizer | None]:
    """Return what is timed, as far as the mode goes, and the optimizer of a step."""
    optimizer = adamw(step) if mode == "step" else None
    runs: dict[str, Callable[[], object]] = {"forward": step.forward}
    if mode != "forward":
        runs["train"] = step.accumulate
    if optimizer is not None:
        runs["step"] = partial(training_step, step, optimizer)
    return runs, optimizer
