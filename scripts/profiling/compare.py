"""An earlier profile beside this one: the ratio of every time, with its spread."""

import json
from pathlib import Path
from typing import Any

from lab.tables import Section, Table, number

from .report import describe

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
        size = point["size"]
        before = next((_times(earlier) for earlier in old["points"] if earlier["size"] == size), {})
        now = _times(point)
        if before and now:
            rows = [[*key, *_ratio(seconds, before[key])] for key, seconds in now.items() if key in before]
            columns = ["part", "pass", "old us", "new us", "ratio", "spread", ""]
            sections.append(Table(f"New / old: {describe(size)}", columns, rows))
        else:
            sections.append(f"{describe(size)}: nothing to compare with")
    return sections


def _differences(new: dict[str, Any], old: dict[str, Any]) -> str:
    lines = [f"Compared with the profile of {old['environment']['date']}, commit {old['environment']['commit']}:"]
    for section, keys in (
        ("environment", ("device", "torch", "threads", "driver", "commit")),
        ("settings", ("dtype", "mode", "compile", "float32_matmul_precision", "attention_backend", "mesh")),
    ):
        for key in keys:
            then, now = old[section].get(key), new[section].get(key)
            if then != now:
                lines.append(f"  {key.replace('_', ' ')}: {then} then, {now} now")
    return "\n".join(lines)


def _times(point: dict[str, Any]) -> dict[tuple[str, str], dict[str, float]]:
    """Return the seconds of each part and pass; of none where the memory did not suffice."""
    if "whole" not in point:
        return {}
    parts, optimizer = point.get("parts", []), point.get("optimizer")  # several processes have neither
    records = [*parts, {"name": "whole"} | point["whole"], {"name": "AdamW", "step": optimizer}]
    passes = ("forward", "backward", "train", "step")
    return {
        (record["name"], name): record[name]["seconds"] for record in records for name in passes if record.get(name)
    }


def _ratio(new: dict[str, float], old: dict[str, float]) -> list[str]:
    times = [number(old["median"] * 1e6), number(new["median"] * 1e6)]
    if min(old["p20"], new["p20"]) <= 0:  # a backward pass that is lost in the noise
        return [*times, "n/a", "n/a", ""]
    low, high = new["p20"] / old["p80"], new["p80"] / old["p20"]
    verdict = "slower" if low > 1 else "faster" if high < 1 else "same"
    return [*times, number(new["median"] / old["median"]), f"{number(low)}-{number(high)}", verdict]
