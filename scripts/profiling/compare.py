"""An earlier profile beside this one: the ratio of every time, with the interval in which it may lie."""

from typing import Any

from lab.sizes import Size
from lab.tables import Section, Table, number

from .analysis import addends
from .report import describe, doubts

SCHEMA = "tinyblock.profile/1"
# What can make a difference, beside the code.
_CAUSES = [
    "device",
    "torch",
    "threads",
    "driver",
    "cudnn",
    "norm_kernels",
    "commit",
    "dtype",
    "mode",
    "compile",
]
_CAUSES += ["float32_matmul_precision", "mesh", "attention_kernel"]
_ADVICE = "Runs of the same code differ, too. To compare two versions, run them in turns: compare_peers.py --against."


def compare(new: dict[str, Any], old: dict[str, Any]) -> list[Section]:
    """Return new/old for every time that both have, at the same sizes, and first what else differs between the two.

    The interval goes from the new p20 over the old p80 to the new p80 over the old p20, and is wider by what the
    ceilings differ by: where 1 lies in it, no change shows.
    """
    lines = [
        f"Compared with the profile of {old['environment']['date']}, commit {old['environment']['commit']}:"
    ]
    then, now = (
        doc["points"][0] | doc["environment"] | doc["settings"] for doc in (old, new)
    )
    for key in _CAUSES:
        if then.get(key) != now.get(key):
            lines.append(
                f"  {key.replace('_', ' ')}: {then.get(key)} then, {now.get(key)} now"
            )
    sections: list[Section] = ["\n".join(lines), *doubts(old)]
    keys = ("flops_per_second", "bytes_per_second")
    rates = [
        new["ceilings"][key]["median"] / old["ceilings"][key]["median"] for key in keys
    ]
    margin = max(*rates, *(1 / rate for rate in rates))
    old_times = {Size(**point["size"]): _times(point) for point in old["points"]}
    for point in new["points"]:
        before, after = old_times.get(Size(**point["size"]), {}), _times(point)
        rows = [
            [*key, *_ratio(after[key], before[key], margin)]
            for key in after
            if key in before
        ]
        columns = ["part", "pass", "old us", "new us", "ratio", "interval", ""]
        title = describe(point["size"])
        sections.append(
            Table(f"New / old: {title}", columns, rows)
            if rows
            else f"{title}: nothing to compare with"
        )
    wider = f"The ceilings differ by {number(100 * (margin - 1))}%, by which each interval is wider."
    return [*sections, f"{wider}\n{_ADVICE}"]


def _times(point: dict[str, Any]) -> dict[tuple[str, str], dict[str, float]]:
    """Return the seconds of each part and pass; none of a point that ran out of memory."""
    if "whole" not in point:
        return {}
    parts = addends(point) if "parts" in point else []  # several processes have none
    passes = ("forward", "backward", "optimizer", "train", "step")
    records = [*parts, {"name": "whole"} | point["whole"]]
    return {
        (record["name"], name): record[name]["seconds"]
        for record in records
        for name in passes
        if name in record
    }


def _ratio(new: dict[str, float], old: dict[str, float], margin: float) -> list[str]:
    times = [number(old["median"] * 1e6), number(new["median"] * 1e6)]
    if min(old["p20"], new["p20"]) <= 0:  # a backward pass that is lost in the noise
        return [*times, "n/a", "n/a", ""]
    low, high = new["p20"] / old["p80"] / margin, new["p80"] / old["p20"] * margin
    verdict = "may be slower" if low > 1 else "may be faster" if high < 1 else "same"
    return [
        *times,
        number(new["median"] / old["median"]),
        f"{number(low)}-{number(high)}",
        verdict,
    ]
