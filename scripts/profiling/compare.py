"""An earlier profile beside this one: the ratio of every time, with its spread."""

import json
from pathlib import Path
from typing import Any

from .report import Section, Table, describe, number

SCHEMA = "tinyblock.profile/1"


def load(path: Path) -> dict[str, Any]:
    """Read a profile, for the option --compare.

    Raises:
        ValueError: it cannot be read, or is no profile of this schema.
    """
    try:
        document = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"--compare: cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise ValueError(f'{path} is no profile: its "schema" is not "{SCHEMA}"')
    return document


def compare(new: dict[str, Any], old: dict[str, Any]) -> list[Section]:
    """Return new/old for every time that both have, at the same sizes, and first what else differs between the two.

    The spread goes from the new p20 over the old p80 to the new p80 over the old p20. Where 1 lies in it, no change
    shows.
    """
    sections: list[Section] = [_differences(new, old)]
    for point in new["points"]:
        twin = next((p for p in old["points"] if p["size"] == point["size"]), None)
        if twin is None or "parts" not in twin or "parts" not in point:
            sections.append(f"{describe(point['size'])}: nothing to compare with")
            continue
        table = Table(
            f"New / old: {describe(point['size'])}", ["part", "pass", "old us", "new us", "ratio", "spread", ""]
        )
        before = dict(_times(twin))
        for (name, pass_), seconds in _times(point):
            if (name, pass_) in before:
                table.rows.append([name, pass_, *_ratio(seconds, before[name, pass_])])
        sections.append(table)
    return sections


def _differences(new: dict[str, Any], old: dict[str, Any]) -> str:
    lines = [f"Compared with the profile of {old['environment']['date']}, commit {old['environment']['commit']}:"]
    for section, keys in (
        ("environment", ("device", "torch", "threads", "driver", "commit")),
        ("settings", ("dtype", "mode", "compile", "float32_matmul_precision", "attention_backend")),
    ):
        for key in keys:
            then, now = old[section].get(key), new[section].get(key)
            if then != now:
                lines.append(f"  {key.replace('_', ' ')}: {then} then, {now} now")
    return "\n".join(lines)


def _times(point: dict[str, Any]) -> list[tuple[tuple[str, str], dict[str, float]]]:
    records = [
        (part["name"], pass_, part[pass_])
        for part in point["parts"]
        for pass_ in ("forward", "backward")
        if pass_ in part
    ]
    records += [("whole", pass_, record) for pass_, record in point["whole"].items()]
    if point["optimizer"] is not None:
        records.append(("AdamW", "step", point["optimizer"]))
    return [((name, pass_), record["seconds"]) for name, pass_, record in records]


def _ratio(new: dict[str, float], old: dict[str, float]) -> list[str]:
    times = [number(old["median"] * 1e6), number(new["median"] * 1e6)]
    if min(old["p20"], new["p20"]) <= 0:  # a backward pass that is lost in the noise
        return [*times, "n/a", "n/a", ""]
    low, high = new["p20"] / old["p80"], new["p80"] / old["p20"]
    verdict = "slower" if low > 1 else "faster" if high < 1 else "same"
    return [*times, number(new["median"] / old["median"]), f"{number(low)}-{number(high)}", verdict]
