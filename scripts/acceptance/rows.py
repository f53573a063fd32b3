"""The rows of an acceptance, one JSON object a line; and a pytest plugin that writes one for each test.

    {"part": "right", "name": "test_autocast[bfloat16]", "status": "ok", "detail": "", "seconds": 0.1}

A row is written as soon as it is known: a part that is cut off leaves those before. The status is "ok" or "failed", or
else "missing", of what this machine does not have, or "not judged", of a figure that means nothing at a quick size.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

STATUSES = ("ok", "failed", "missing", "not judged")


class Rows(NamedTuple):
    """The file of the rows, and the part of the acceptance that they are of."""

    path: Path
    part: str

    def add(self, name: str, status: str, detail: str = "", seconds: float | None = None) -> None:
        assert status in STATUSES, status
        row = {"part": self.part, "name": name, "status": status, "detail": " ".join(detail.split())[:300]}
        with self.path.open("a", encoding="utf-8") as file:
            print(json.dumps(row | {"seconds": seconds and round(seconds, 2)}), file=file)


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--rows", type=Path, required=True, help="where each test writes a row, of its file's part")


def pytest_configure(config: Any) -> None:
    config.pluginmanager.register(_Writer(config.option.rows))


class _Writer:
    def __init__(self, path: Path) -> None:
        self.path = path

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        status = {"passed": "ok", "failed": "failed", "skipped": "missing"}[report.outcome]
        detail = ""
        if report.skipped:
            detail = report.longrepr[2].removeprefix("Skipped: ")
        elif report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            detail = crash.message if crash else str(report.longrepr)
        file, _, name = report.nodeid.partition("::")
        Rows(self.path, _part(file)).add(name, status, detail, report.duration)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            Rows(self.path, _part(report.nodeid)).add("all of it", "failed", str(report.longrepr)[-300:])


def _part(file: str) -> str:
    return Path(file).stem.removeprefix("test_").replace("_", " ")
