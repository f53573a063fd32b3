"""Print a dot for each test, then a line for each property that fails, and a count, for `tinyblock verify`.

A property is a test function of a layer. It fails if one of its cases fails, and holds
if no case fails and one passes. With -v pytest prints its own report before this one.
"""

import traceback
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch

CONTRACT = str(Path(__file__).parent)
OURS = (str(Path(torch.__file__).parent), CONTRACT)


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
        report.user_properties.append(("reason", reason_of(call.excinfo.value)))
    return report


def reason_of(error: BaseException) -> str:
    """Return the message of a check, or the type, message and place of another error."""
    message = str(error)
    frames = traceback.extract_tb(error.__traceback__)
    if is_of_a_check(error, frames):
        return message.partition("\n")[0]  # pytest adds the source of an assertion
    one_line = " ".join(message.split())[:400]
    place = ""
    for frame in frames:
        is_library = "site-packages" in frame.filename
        if not is_library and not frame.filename.startswith(OURS):
            place = f" ({Path(frame.filename).name}, line {frame.lineno})"
    name = type(error).__name__
    described = f"{name}: {one_line}" if one_line else name
    return described + place


def is_of_a_check(error: BaseException, frames: traceback.StackSummary) -> bool:
    """Return whether the contract raised the error, and not the layer."""
    if isinstance(error, (pytest.fail.Exception, pytest.skip.Exception)):
        return True
    is_assertion = isinstance(error, AssertionError)
    return is_assertion and frames[-1].filename.startswith(CONTRACT)


def reason_in(report: Any) -> str:
    """Return the reason that a report stores, or the last line of an error of collection."""
    properties = dict(getattr(report, "user_properties", []))
    if "reason" in properties:
        return str(properties["reason"])
    lines = str(report.longrepr).strip().splitlines()
    if not lines:
        return "no reason"
    # pytest begins each line of an error with an E.
    return lines[-1].removeprefix("E ").strip()


class Property:
    """The cases of one property, by outcome."""

    def __init__(self, layer: str, name: str) -> None:
        self.layer = layer
        self.name = name
        self.passed = 0
        self.failed: list[tuple[str, str]] = []  # case, reason
        self.skipped: set[str] = set()  # reasons

    def outcome(self) -> str:
        if self.failed:
            return "fail"
        return "hold" if self.passed else "skip"

    def first_failure(self) -> str:
        case, _ = self.failed[0]
        shown = f"{self.name} [{case}]" if case else self.name
        others = len(self.failed) - 1
        if not others:
            return shown
        return f"{shown} and {others} more case{'s' if others > 1 else ''}"


def parts_of(nodeid: str) -> tuple[str, str, str]:
    """Return layer, property and case of `test_<layer>.py::test_<property>[<case>]`.

    The id of a file that cannot be collected has no property, and outside of the
    contract no file.
    """
    file, _, test = nodeid.partition("::test_")
    layer = Path(file).stem.removeprefix("test_")
    name, _, case = test.partition("[")
    return layer or "tests", name or "collection", case.removesuffix("]")


def properties_of(stats: dict[str, list[pytest.TestReport]]) -> list[Property]:
    """Collect the outcomes of all cases of each property."""
    properties: dict[tuple[str, str], Property] = {}
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in stats.get(outcome, []):
            layer, name, case = parts_of(report.nodeid)
            found = properties.setdefault((layer, name), Property(layer, name))
            if outcome == "passed":
                found.passed += 1
            elif outcome == "skipped":
                found.skipped.add(reason_in(report))
            else:
                found.failed.append((case, reason_in(report)))
    return list(properties.values())


def failures(properties: list[Property]) -> list[str]:
    """Return a line for each property that fails, but one line for all of a layer that fail for the same reason.

    Other weights come first, because they explain why other properties are skipped.
    """
    failed = [found for found in properties if found.failed]
    failed.sort(key=lambda found: found.name != "weight_names")
    same: dict[tuple[str, str], list[Property]] = {}
    for found in failed:
        _, reason = found.failed[0]
        same.setdefault((found.layer, reason), []).append(found)
    lines = []
    for (layer, reason), group in same.items():
        names = ", ".join(found.name for found in group[:3])
        if len(group) == 1:
            names = group[0].first_failure()
        elif len(group) > 3:
            names += f" and {len(group) - 3} more"
        lines.append(f"FAIL  {layer}: {names}: {reason}")
    return lines


def skips(properties: list[Property]) -> list[str]:
    """Return a line for each reason for which properties were skipped, or some of their cases."""
    layers_by_reason: dict[str, set[str]] = {}
    for found in properties:
        for reason in found.skipped:
            layers_by_reason.setdefault(reason, set()).add(found.layer)
    lines = []
    for reason, layers in layers_by_reason.items():
        names = ", ".join(sorted(layers))
        lines.append(f"skip  {names}: {reason}")
    return lines


def pytest_terminal_summary(terminalreporter: Any) -> None:
    properties = properties_of(terminalreporter.stats)
    terminalreporter.ensure_newline()
    for line in [*failures(properties), *skips(properties)]:
        terminalreporter.write_line(line)
    if not properties:  # such as with --collect-only
        return
    outcomes = [found.outcome() for found in properties]
    hold = outcomes.count("hold")
    fail = outcomes.count("fail")
    skip = outcomes.count("skip")
    holds = "property holds" if hold == 1 else "properties hold"
    fails = "fails" if fail == 1 else "fail"
    terminalreporter.write_line(f"{hold} {holds}, {fail} {fails}, {skip} skipped")
