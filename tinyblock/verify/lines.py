"""The lines about a layer: one for each cause, and the change that gives its numbers."""

import os
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest

from .changes import Change
from .imports import last_own_frame
from .search import Observation, explain, explained_by, raises

Line = list[str]  # and what stands below it


@dataclass
class Failure:
    """A failed test, with the exception of each case that failed, by the case's title."""

    test: str
    of_cases: dict[str, BaseException]
    ran: int = 0  # cases; 0 if the test has none


@dataclass
class Layer:
    """What is known of a layer after the tests."""

    name: str
    has_passed: bool = False
    has_no_gradient: bool = False  # of x
    failures: list[Failure] = field(default_factory=list)
    unwritten: set[str] = field(default_factory=set)  # functions
    observations: dict[str, Observation] = field(default_factory=dict)  # by title

    @property
    def is_right(self) -> bool:
        is_wrong = self.failures or self.unwritten or self.has_no_gradient
        return self.has_passed and not is_wrong


def lines_of(layer: Layer, known: dict[Change, str]) -> list[Line]:
    """Return the lines of a layer, and add its changes to the known ones.

    Where the equation fails, other tests fail for the same cause.
    """
    equation = [each for each in layer.failures if each.test == "test_equation"]
    if equation:
        lines = lines_of_equation(layer, equation[0], known)
        others = len(layer.failures) - 1
        if others:
            lines[-1].append(
                f"(and {others} other {'test' if others == 1 else 'tests'})"
            )
        return lines
    first = {failure.test: failure for failure in reversed(layer.failures)}
    return [line_of(each, list(each.of_cases)) for each in reversed(first.values())]


def lines_of_equation(
    layer: Layer, failure: Failure, known: dict[Change, str]
) -> list[Line]:
    waiting = list(failure.of_cases)
    lines: list[Line] = []
    for seen in by_name(layer.observations):
        wrong = [title for title in waiting if title in seen and seen[title].is_wrong]
        if not wrong:
            continue
        numbers = [each for each in seen.values() if each.result is not None]
        found = explained_by(list(known), numbers)
        if found:
            below = ["with the changes above, the equation gives these numbers, too"]
        elif len(numbers) > 1 and (change := explain(numbers)):
            # Too many changes give the numbers of a single case.
            found = [change]
            below = shown(change)
        else:
            below = [largest_and_smallest(seen, wrong)]
        is_new = any(known.get(change) != layer.name for change in found)
        known |= {change: layer.name for change in found if change not in known}
        same = [
            title
            for title in waiting
            if title in wrong
            or (title in seen and found and raises(found, seen[title]))
        ]
        waiting = [title for title in waiting if title not in same]
        if is_new or not (found or lines):
            lines.append([*line_of(failure, same), *below])
    causes = defaultdict(list)
    for title in waiting:
        causes[cause_of(failure.of_cases[title])].append(title)
    return lines + [line_of(failure, titles) for titles in causes.values()]


def by_name(
    observations: dict[str, Observation],
) -> Iterable[dict[str, Observation]]:
    """Return the observations of each function and class."""
    found: dict[str, dict[str, Observation]] = defaultdict(dict)
    for title, seen in observations.items():
        found[seen.case.name][title] = seen
    return found.values()


def line_of(failure: Failure, titles: list[str]) -> Line:
    """Return the line of these cases, which shows the first."""
    title, error = titles[0], failure.of_cases[titles[0]]
    where = f"{title} ({len(titles)} of {failure.ran} cases fail): " if title else ""
    if isinstance(error, pytest.fail.Exception):
        return [f"{failure.test}: {where}{error.msg}"]
    message = f"{type(error).__name__}: {error}"
    line = [f"{failure.test}: {where}{textwrap.shorten(message, 300)}"]
    if frame := last_own_frame(error):
        path = os.path.relpath(frame.filename)
        path = path if not path.startswith("..") else frame.filename
        line.append(f"{path}, line {frame.lineno}, in {frame.name}: {frame.line}")
    return line


def cause_of(error: BaseException) -> object:
    """Return what is the same for two cases that fail for one cause."""
    if isinstance(error, pytest.fail.Exception):
        return re.sub(r" at \[.*|[\d.]+", "", error.msg or "")
    frame = last_own_frame(error)
    return type(error), frame and (frame.filename, frame.lineno)


def shown(change: Change) -> Line:
    """Return the lines of the equation that differ."""
    old, new = change.lines()
    if not old:
        return [
            "your numbers are those of the equation with one line more:",
            *(f"    {line.strip()}" for line in new),
        ]
    if not new:
        return [
            "your numbers are those of the equation without this:",
            *(f"    {line}" for line in textwrap.dedent("\n".join(old)).splitlines()),
        ]
    return [
        f"{label if number == 0 else '':28}{line}"
        for label, lines in (
            ("your numbers are those of", old),
            ("with this change:", new),
        )
        for number, line in enumerate(textwrap.dedent("\n".join(lines)).splitlines())
    ]


def largest_and_smallest(seen: dict[str, Observation], wrong: list[str]) -> str:
    """Return where the numbers begin to be wrong; cases go from plain to special."""
    right = [
        title
        for title, each in seen.items()
        if each.result is not None and not each.is_wrong
    ]
    if not right:
        return f"no case of {seen[wrong[0]].case.name} passes"
    return f"the largest case that passes: {right[-1]}; the smallest that fails: {wrong[0]}"
