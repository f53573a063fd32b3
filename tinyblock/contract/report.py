"""What `tinyblock verify` prints: a dot for each test, then a line for each property that fails, and a count.

A property is a test function of a layer. It fails if one of its cases fails, and holds if no case fails and one passes.
With -v pytest prints its own report before this one.
"""

import traceback
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch

OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.option.verbose == 0:
        config.option.verbose = -2  # dots, without pytest's own header and count


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Store in each report why the test failed or was skipped, in one line."""
    report = yield
    if call.excinfo is not None:
        report.reason = reason_of(call.excinfo.value)
    return report


def reason_of(error: BaseException) -> str:
    message = str(error)
    if isinstance(error, (AssertionError, pytest.fail.Exception, pytest.skip.Exception)):
        return message.partition("\n")[0]  # pytest adds the source of an assertion
    one_line = " ".join(message.split())[:400]
    place = ""
    for frame in traceback.extract_tb(error.__traceback__):
        is_library = "site-packages" in frame.filename
        if not is_library and not frame.filename.startswith(OURS):
            place = f" ({Path(frame.filename).name}, line {frame.lineno})"
    return f"{type(error).__name__}: {one_line}{place}"


class Property:
    """The cases of one property, by outcome."""

    def __init__(self) -> None:
        self.passed = 0
        self.failed: list[tuple[str, str]] = []  # case, reason
        self.skipped: set[str] = set()  # reasons

    def outcome(self) -> str:
        if self.failed:
            return "fail"
        return "hold" if self.passed else "skip"


def properties_of(stats: dict[str, list[pytest.TestReport]]) -> dict[str, Property]:
    """Return the properties by name, such as "rope: equation"."""
    properties: dict[str, Property] = {}
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in stats.get(outcome, []):
            file, _, test = report.nodeid.partition("::")
            function, _, case = test.partition("[")
            layer = Path(file).stem.removeprefix("test_")
            name = f"{layer}: {function.removeprefix('test_')}"
            found = properties.setdefault(name, Property())
            if outcome == "passed":
                found.passed += 1
            elif outcome == "skipped":
                found.skipped.add(report.reason)
            else:
                found.failed.append((case.removesuffix("]"), report.reason))
    return properties


def failures(properties: dict[str, Property]) -> list[str]:
    """Return a line for each property that fails; one for all that fail for the same reason in a first case."""
    names: dict[str, list[str]] = {}
    for name, found in properties.items():
        if found.failed:
            case, reason = found.failed[0]
            others = len(found.failed) - 1
            more = f" (and {others} more cases)" if others else ""
            names.setdefault(reason, []).append(f"{name} [{case}]{more}" if case else name)
    return [f"FAIL  {shorten(names[reason])}: {reason}" for reason in names]


def skips(properties: dict[str, Property]) -> list[str]:
    """Return a line for each reason for which a property was skipped, or some of its cases."""
    names: dict[str, list[str]] = {}
    for name, found in properties.items():
        for reason in sorted(found.skipped):
            names.setdefault(reason, []).append(name)
    return [f"skip  {reason}: {shorten(names[reason])}" for reason in names]


def shorten(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    others = len(names) - 3
    return f"{shown} and {others} more properties" if others > 0 else shown


def pytest_terminal_summary(terminalreporter: Any) -> None:
    properties = properties_of(terminalreporter.stats)
    terminalreporter.ensure_newline()
    for line in [*failures(properties), *skips(properties)]:
        terminalreporter.write_line(line)
    outcomes = [found.outcome() for found in properties.values()]
    hold = outcomes.count("hold")
    fail = outcomes.count("fail")
    skip = outcomes.count("skip")
    verb = "fails" if fail == 1 else "fail"
    terminalreporter.write_line(
        f"{hold} properties hold, {fail} {verb}, {skip} skipped"
    )
