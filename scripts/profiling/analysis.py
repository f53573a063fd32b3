"""What follows from the samples: times with their spread, shares, rates, the distance from the roofline, MFU.

The result is plain dicts and lists, ready for JSON; docs/profile_schema.md says what each key means.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from lab.machine import Ceilings, Datasheet
from lab.sizes import Cost, Size, adamw_cost
from lab.timing import Spread, paired_ratio

from .trust import trust

Samples = Mapping[str, list[float]]


def analyse(
    samples: Samples,
    size: Size,
    mode: str,
    dtype: torch.dtype,
    ceilings: Ceilings,
    datasheet: Datasheet | None,
    hindrances: Mapping[str, float | None],
) -> dict[str, Any]:
    """Return the figures of one point, from seconds per call and round of the runs of `measure`, by their names.

    Those are "<part> forward" and, unless the mode is forward, "<part> train" (forward and backward) of each part, of
    "whole" and of "smallest", if there is one; in the mode step also "whole step", "smallest step" and "AdamW".
    `hindrances` are the shares that a Watch returns.
    """
    train = mode != "forward"
    passes = ("forward", "backward") if train else ("forward",)
    costs = size.part_costs(dtype.itemsize)
    counts = {name: 1 if name == "final norm" else size.layers for name in costs}
    times = {name: _pass_times(samples, name, train) for name in (*costs, "whole")}

    sums = {
        pass_: [
            sum(row) for row in zip(*([n * t for t in times[name][pass_]] for name, n in counts.items()), strict=True)
        ]
        for pass_ in times["whole"]
    }
    parts: list[dict[str, Any]] = []
    for name, count in counts.items():
        record: dict[str, Any] = {"name": name, "count": count}
        for pass_ in passes:
            record[pass_] = _pass(times[name][pass_], costs[name][pass_], ceilings)
            record[pass_]["share"] = count * record[pass_]["seconds"]["median"] / Spread.of(sums[pass_]).median
        parts.append(record)

    # The whole as its parts add up: nothing is fused from one part to the next.
    whole_costs = {p: sum((costs[name][p] * count for name, count in counts.items()), Cost()) for p in passes}
    floors = {p: sum(part["count"] * part[p]["roofline_seconds"] for part in parts) for p in passes}
    optimizer = None
    if train:
        whole_costs["train"] = whole_costs["forward"] + whole_costs["backward"]
        floors["train"] = floors["forward"] + floors["backward"]
    if mode == "step":
        update = adamw_cost(size.parameters, dtype.itemsize)
        optimizer = _pass(samples["AdamW"], update, ceilings)
        times["whole"]["step"] = samples["whole step"]
        whole_costs["step"] = whole_costs["train"] + update
        floors["step"] = floors["train"] + optimizer["roofline_seconds"]
    whole = {p: _pass(times["whole"][p], whole_costs[p], ceilings, floors[p]) for p in times["whole"]}

    seconds = whole[mode]["seconds"]["median"]
    overhead, overheads = None, {}
    if (name := f"smallest {mode}") in samples:
        smallest = Spread.of(samples[name])
        overhead = {"seconds": asdict(smallest), "share": smallest.median / seconds}
        # Of the parts, as if the calls of each cost the same.
        of_parts = Spread.of(samples["smallest train" if train else "smallest forward"]).median
        overheads = dict.fromkeys(counts, of_parts / sum(counts.values())) | {"AdamW": smallest.median - of_parts}
    peaks = {
        "measured": ceilings.flops_per_second.median,
        "datasheet": None if datasheet is None else datasheet.flops_per_second(dtype),
    }

    def utilization(flops: int) -> dict[str, float | None]:
        return {source: None if peak is None else flops / seconds / peak for source, peak in peaks.items()}

    return {
        "parts": parts,
        "optimizer": optimizer,
        "whole": whole,
        "sum_of_parts": {
            pass_: {
                "seconds": asdict(Spread.of(total)),
                "of_whole": asdict(paired_ratio(total, times["whole"][pass_])),
            }
            for pass_, total in sums.items()
        },
        "tokens_per_second": size.tokens / seconds,
        "mfu": {
            "causal": utilization(whole_costs[mode].matmul_flops),
            "dense": utilization(whole_costs[mode].dense_matmul_flops),
        },
        "overhead": overhead,
        "losses": _losses(parts, optimizer, seconds, overheads),
        "trust": trust(times["whole"][mode], hindrances, [ceilings.flops_per_second, ceilings.bytes_per_second]),
    }


def _losses(
    parts: list[dict[str, Any]], optimizer: dict[str, Any] | None, whole: float, overheads: dict[str, float]
) -> list[dict[str, Any]]:
    """Return the three parts that lose most against the roofline, and the cause that their figures point to."""
    records = [(part["name"], part["count"], [part[p] for p in ("forward", "backward") if p in part]) for part in parts]
    records += [] if optimizer is None else [("AdamW", 1, [optimizer])]
    losses = []
    for name, count, passes in records:
        taken = sum(record["seconds"]["median"] for record in passes)
        least = sum(record["roofline_seconds"] for record in passes)
        costliest = max(passes, key=lambda record: record["seconds"]["median"] - record["roofline_seconds"])
        if taken < 2 * overheads.get(name, 0.0):
            cause = "overhead"
        elif not costliest["matmul_flops"]:
            cause = "elementwise"
        else:
            cause = "products" if costliest["bound"] == "compute" else "weights"
        if taken > least:
            lost = count * (taken - least)
            fraction = least / taken
            losses.append(
                {"name": name, "seconds": lost, "share": lost / whole, "roofline_fraction": fraction, "cause": cause}
            )
    return sorted(losses, key=lambda loss: -loss["seconds"])[:3]


def _pass_times(samples: Samples, name: str, train: bool) -> dict[str, list[float]]:
    forward = samples[f"{name} forward"]
    if not train:
        return {"forward": forward}
    both = samples[f"{name} train"]
    return {"forward": forward, "backward": [b - f for f, b in zip(forward, both, strict=True)], "train": both}


def _pass(samples: list[float], cost: Cost, ceilings: Ceilings, floor: float | None = None) -> dict[str, Any]:
    """Return the record of one pass; `floor` is its least time in seconds, where it is not the roofline's own."""
    spread = Spread.of(samples)
    floor = ceilings.seconds(cost.flops, cost.bytes) if floor is None else floor
    timed = spread.median > 0  # noise can leave no time at all to a backward pass, which is a difference
    return {
        "seconds": asdict(spread),
        "matmul_flops": cost.matmul_flops,
        "dense_matmul_flops": cost.dense_matmul_flops,
        "elementwise_flops": cost.elementwise_flops,
        "bytes": cost.bytes,
        "intensity": cost.intensity,
        "bound": ceilings.bound(cost.intensity),
        "flops_per_second": cost.flops / spread.median if timed else None,
        "roofline_seconds": floor,
        "roofline_fraction": floor / spread.median if timed else None,
    }
