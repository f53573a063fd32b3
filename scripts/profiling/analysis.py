"""What follows from the samples, ready for JSON: times, shares, rates, roofline, MFU, as in docs/profile_schema.md."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from lab.costs import Cost, adamw_cost
from lab.machine import Ceilings, Datasheet
from lab.sizes import PASSES, Size
from lab.timing import Spread, paired_ratio

from .trust import trust

Samples = Mapping[tuple[str, str], list[float]]


def analyze(
    samples: Samples,
    gpu: Samples,
    size: Size,
    mode: str,
    dtype: torch.dtype,
    ceilings: Ceilings,
    datasheet: Datasheet | None,
    shares: Mapping[str, float | None],
) -> dict[str, Any]:
    """Return the figures of one point, from the seconds per call of each part and pass, one sample for each round.

    The parts are those of `Size.part_costs`, "whole", "smallest" (the same calls on one token) and "AdamW"; the passes
    "forward", "train" (forward and backward), "step" and "optimizer". `gpu` has the time of the GPU alone.
    """
    samples, gpu = _with_backward(samples), _with_backward(gpu)

    def record(
        part: str, pass_: str, cost: Cost, floor: float | None = None
    ) -> dict[str, Any]:
        """Return the figures of one pass; `floor` is its least time in seconds, if that is not the roofline's own."""
        spread, on_gpu = Spread.of(samples[part, pass_]), gpu.get((part, pass_))
        floor = ceilings.seconds(cost.flops, cost.bytes) if floor is None else floor
        timed = (
            spread.median > 0
        )  # noise can leave no time at all to a backward pass, which is a difference
        return {
            "seconds": asdict(spread),
            "gpu_seconds": on_gpu and on_gpu[0],
            **asdict(cost),
            "intensity": cost.intensity,
            "bound": "compute" if cost.intensity >= ceilings.ridge else "memory",
            "flops_per_second": cost.flops / spread.median if timed else None,
            "roofline_seconds": floor,
            "roofline_fraction": floor / spread.median if timed else None,
        }

    passes = [
        name
        for name in ("forward", "backward", "train", "step")
        if ("whole", name) in samples
    ]
    parts: list[dict[str, Any]] = []
    for name, costs in size.part_costs(dtype.itemsize).items():
        records = {
            pass_: record(name, pass_, costs[pass_])
            for pass_ in costs
            if pass_ in passes
        }
        parts.append({"name": name, "count": size.count(name), **records})
    sums: dict[str, dict[str, Any]] = {}
    for pass_ in passes[:3]:  # those of the parts
        of_each = [
            [part["count"] * seconds for seconds in samples[part["name"], pass_]]
            for part in parts
        ]
        total, of_whole = (
            [sum(round_) for round_ in zip(*of_each, strict=True)],
            samples["whole", pass_],
        )
        sums[pass_] = {
            "seconds": asdict(Spread.of(total)),
            "of_whole": asdict(paired_ratio(total, of_whole)),
        }
        for part in (part for part in parts if pass_ in part):
            part[pass_]["share"] = (
                part["count"]
                * part[pass_]["seconds"]["median"]
                / sums[pass_]["seconds"]["median"]
            )
    adamw = adamw_cost(size.parameters, dtype.itemsize)
    point: dict[str, Any] = {
        "parts": parts,
        "optimizer": record("AdamW", "optimizer", adamw) if mode == "step" else None,
    }

    def least(name: str) -> float:
        """Return the least time of the whole as it adds up: nothing is fused from one part to the next."""
        records = [
            (part["count"], part.get(pass_))
            for part in addends(point)
            for pass_ in PASSES.get(name, (name,))
        ]
        return sum(
            count * record["roofline_seconds"] for count, record in records if record
        )

    def cost_of(name: str) -> Cost:
        """Return the cost of the model in a mode or in a pass."""
        of_model = size.costs if name in PASSES else size.pass_cost
        return of_model(name, dtype.itemsize)

    whole = {name: record("whole", name, cost_of(name), least(name)) for name in passes}
    seconds, cost = whole[mode]["seconds"]["median"], size.costs(mode)
    smallest = Spread.of(samples["smallest", mode])
    of_datasheet = datasheet.flops_per_second(dtype) if datasheet else None
    peaks = {"measured": ceilings.flops_per_second.median, "datasheet": of_datasheet}

    def utilization(flops: int) -> dict[str, float | None]:
        return {
            source: peak and flops / seconds / peak for source, peak in peaks.items()
        }

    overheads = {}
    if not gpu:  # which does not wait for the host in a whole that fills it
        # Of the calls without arithmetic, each part has an equal share, and AdamW what a step takes longer.
        of_parts = Spread.of(
            samples["smallest", "forward" if mode == "forward" else "train"]
        ).median
        equal_share = of_parts / sum(part["count"] for part in parts)
        overheads = {part["name"]: equal_share for part in parts} | {
            "AdamW": smallest.median - of_parts
        }
    return point | {
        "whole": whole,
        "sum_of_parts": sums,
        "tokens_per_second": size.tokens / seconds,
        "mfu": {
            "causal": utilization(cost.matmul_flops),
            "dense": utilization(cost.dense_matmul_flops),
        },
        "overhead": {"seconds": asdict(smallest), "share": smallest.median / seconds},
        "losses": _losses(addends(point), seconds, overheads),
        "trust": trust(samples["whole", mode], shares, ceilings),
    }


def addends(point: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what adds up to the whole: the parts, and in a step AdamW as one more, with the pass "optimizer"."""
    optimizer = point["optimizer"]
    return [
        *point["parts"],
        *([{"name": "AdamW", "count": 1, "optimizer": optimizer}] if optimizer else []),
    ]


def own_seconds(record: Mapping[str, Any]) -> float:
    """Return the time of a pass: on a GPU its own, as the whole does not wait for the launches of each part."""
    return float(
        record["seconds"]["median"]
        if record["gpu_seconds"] is None
        else record["gpu_seconds"]
    )


def _with_backward(samples: Samples) -> dict[tuple[str, str], list[float]]:
    """Add the backward passes: what forward and backward take longer than forward, round by round."""
    backward = {
        (part, "backward"): [
            both - ahead
            for ahead, both in zip(samples[part, "forward"], times, strict=True)
        ]
        for (part, pass_), times in samples.items()
        if pass_ == "train"
    }
    return {**samples, **backward}


def _losses(
    addends: list[dict[str, Any]], whole: float, overheads: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Return the three parts that lose most against the roofline, and the cause that their figures point to."""
    losses = []
    for part in addends:
        passes = [part[pass_] for pass_ in PASSES["step"] if pass_ in part]
        taken, least = (
            sum(map(own_seconds, passes)),
            sum(record["roofline_seconds"] for record in passes),
        )
        costliest = max(
            passes, key=lambda record: own_seconds(record) - record["roofline_seconds"]
        )
        if taken < 2 * overheads.get(part["name"], 0.0):
            cause = "overhead"
        elif not costliest["matmul_flops"]:
            cause = "elementwise"
        else:
            cause = "products" if costliest["bound"] == "compute" else "weights"
        lost = part["count"] * (taken - least)
        if lost > 0:
            figures = {
                "seconds": lost,
                "share": lost / whole,
                "roofline_fraction": least / taken,
            }
            losses.append({"name": part["name"], **figures, "cause": cause})
    return sorted(losses, key=lambda loss: -loss["seconds"])[:3]
