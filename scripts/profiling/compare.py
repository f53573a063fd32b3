"""An earlier profile beside this one: the ratio of every time, with the interval in which it may lie."""

import json
from pathlib import Path
from typing import Any

from lab.sizes import Size
from lab.tables import Section, Table, number

from .report import describe, doubts

SCHEMA = "tinyblock.profile/1"
_CEILINGS = ("flops_per_second", "bytes_per_second")
# What can make a difference, beside the code.
_CAUSES = ["device", "torch", "threads", "driver", "cudnn", "norm_kernels", "commit", "dtype", "mode", "compile"]
_CAUSES += ["float32_matmul_precision", "mesh", "attention_kernel"]
_ADVICE = (
    "Two runs of the same code differ by more than the rounds within one. To compare two versions of the code, run\n"
    "them in turns: scripts/compare_peers.py --against."
)


def load(path: Path, sizes: list[Size] | None = None, option: str = "--compare") -> dict[str, Any]:
    """Read the profile that an option names.

    Raises:
        ValueError: it cannot be read, is not a profile of this schema, or has none of the sizes.
    """
    try:
        document = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{option}: cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{option}: {path} is not JSON: {error}") from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise ValueError(f'{option}: {path} is not a profile: its "schema" is not "{SCHEMA}"')
    if sizes is not None and not any(Size(**point["size"]) in sizes for point in document["points"]):
        raise ValueError(f"{option}: {path} has none of these sizes")
    return document


def compare(new: dict[str, Any], old: dict[str, Any]) -> list[Section]:
    """Return new/old for every time that both have, at the same sizes, and first what else differs between the two.

    The interval goes from the new p20 over the old p80 to the new p80 over the old p20, and is wider by what the
    ceilings differ by: where 1 lies in it, no change shows.
    """
    sections: list[Section] = [_differences(new, old), *doubts(old)]
    rates = [new["ceilings"][key]["median"] / old["ceilings"][key]["median"] for key in _CEILINGS]
    margin = max(*rates, *(1 / rate for rate in rates))
    for point in new["points"]:
        size = point["size"]
        alike = (_times(earlier) for earlier in old["points"] if Size(**earlier["size"]) == Size(**size))
        before = next(alike, {})
        now = _times(point)
        if before and now:
            rows = [[*key, *_ratio(seconds, before[key], margin)] for key, seconds in now.items() if key in before]
            columns = ["part", "pass", "old us", "new us", "ratio", "interval", ""]
            sections.append(Table(f"New / old: {describe(size)}", columns, rows))
        else:
            sections.append(f"{describe(size)}: nothing to compare with")
    wider = f"The ceilings differ by {number(100 * (margin - 1))}%, by which each interval is wider."
    return [*sections, f"{wider}\n{_ADVICE}"]


def _differences(new: dict[str, Any], old: dict[str, Any]) -> str:
    lines = [f"Compared with the profile of {old['environment']['date']}, commit {old['environment']['commit']}:"]
    then, now = (doc["points"][0] | doc["environment"] | doc["settings"] for doc in (old, new))
    for key in _CAUSES:
        if then.get(key) != now.get(key):
            lines.append(f"  {key.replace('_', ' ')}: {then.get(key)} then, {now.get(key)} now")
    return "\n".join(lines)


def _times(point: dict[str, Any]) -> dict[tuple[str, str], dict[str, float]]:
    """Return the seconds of each part and pass; none of a point that ran out of memory."""
    if "whole" not in point:
        return {}
    parts, optimizer = point.get("parts", []), point.get("optimizer")  # several processes have neither
    records = [*parts, {"name": "whole"} | point["whole"], {"name": "AdamW", "step": optimizer}]
    passes = ("forward", "backward", "train", "step")
    return {
        (record["name"], name): record[name]["seconds"] for record in records for name in passes if record.get(name)
    }


def _ratio(new: dict[str, float], old: dict[str, float], margin: float) -> list[str]:
    times = [number(old["median"] * 1e6), number(new["median"] * 1e6)]
    if min(old["p20"], new["p20"]) <= 0:  # a backward pass that is lost in the noise
        return [*times, "n/a", "n/a", ""]
    low, high = new["p20"] / old["p80"] / margin, new["p80"] / old["p20"] * margin
    verdict = "may be slower" if low > 1 else "may be faster" if high < 1 else "same"
    return [*times, number(new["median"] / old["median"]), f"{number(low)}-{number(high)}", verdict]
