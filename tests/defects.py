"""Layers with defects, and what `tinyblock verify` reports about them."""

import re
from dataclasses import dataclass

import pytest


def replace(path, right, wrong):
    """Replace a part of a file, which must be there."""
    text = path.read_text()
    assert right in text, f"{path.name} must have {right!r}: {text}"
    path.write_text(text.replace(right, wrong))


@dataclass
class Defect:
    """A line of a right layer, the wrong line in its place, and the line of the report.

    The report of one run shows defects of several layers, or of several tests.
    """

    run: int
    layer: str
    right: str
    wrong: str
    line: str  # a regular expression

    def put_into(self, folder):
        replace(folder / f"{self.layer}.py", self.right, self.wrong)

    def require_in(self, report):
        line = rf"^FAILED {self.layer}: {self.line}"
        if not re.search(line, report, re.MULTILINE):
            pytest.fail(f"no line {line!r} is in this report:\n{report}")
