"""Show the rows of an acceptance in 40 lines at most: `python -m acceptance.summary OUT`. Exit code 1 if one failed."""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .rows import STATUSES

LINES, WIDTH = 40, 200
_FIRST = ("failed", "ok", "not judged", "missing")  # what has room first


def summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each part, and below it those of its rows that say more than that all is well.

    Rows of a part that miss the same share a line. Where there is no room for all, what failed comes first.
    """
    groups: dict[str, dict[tuple[str, str, str], list[str]]] = {}
    for row in rows:
        lines = groups.setdefault(row["part"], {})
        if row["detail"] or row["status"] != "ok":
            alone = "" if row["status"] == "missing" else row["name"]
            lines.setdefault((row["status"], alone, row["detail"]), []).append(row["name"])
    said: list[tuple[str, str, str]] = []  # of which part, its status, the line
    for part, lines in groups.items():
        for (status, _, detail), names in lines.items():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            said.append((part, status, f"  {status:11} {names[0]}{more}: {detail}"[:WIDTH]))
    kept = sorted(said, key=lambda line: _FIRST.index(line[1]))[: LINES - len(groups) - 2]
    shown: list[str] = []
    for part in groups:
        counts = Counter(row["status"] for row in rows if row["part"] == part)
        shown.append(f"{part}: " + ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status]))
        shown += [line for of, _, line in kept if of == part]
    if len(said) > len(kept):
        shown.append(f"... and {len(said) - len(kept)} lines more, in results.jsonl")
    return [*shown, f"{sum(row['status'] == 'failed' for row in rows)} of {len(rows)} rows failed"]


def main(out: Path) -> int:
    path = out / "results.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    text = "\n".join(summary(rows))
    (out / "summary.txt").write_text(text + "\n", encoding="utf-8")
    print(text)
    return 1 if not rows or any(row["status"] == "failed" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
