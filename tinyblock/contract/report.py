"""What `tinyblock verify` prints: the failures of each test, and what did not run."""

import re
import textwrap
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from .target import foreign, found

FOLDER = Path(__file__).parent
UNWRITTEN = "not written yet"
SHOWN = 3  # failures of a test that differ
# What differs between two messages about one defect.
VARYING = re.compile(r"\b(float|bfloat|int)\d+|\bnan\b|\binf\b|\d[\d.e+-]*|[-() ,]")
CAUSES = (
    "Usual mistakes, by the test that fails: docs/verify.md in tinyblock's repository"
)
BEYOND = (
    'Only the tests marked numbers ran. -m "not numbers" runs the others, which tinyblock '
    "promises: there, a right layer fails if it has no reset_parameters, accepts wrong "
    "options, or casts its table of RoPE. Initial weights alone: "
    '-m "not numbers" -k initial_weights'
)


def layer_of(path):
    """Return the layer of a page: "rope" for test_rope.py."""
    return Path(path).stem.removeprefix("test_")


class Report:
    """A plugin of pytest, which prints lines in place of tracebacks."""

    def __init__(self, config):
        self.config = config
        # Each test, such as ("rope", "test_equation"), in the order in which they ran.
        self.failed = defaultdict(list)  # the case and the message of each failure
        self.ran = Counter()
        self.unwritten = Counter()
        self.skipped = Counter()

    def pytest_runtest_logreport(self, report):
        page, _, item = report.nodeid.partition("::")
        name, _, case = item.partition("[")
        test = (layer_of(page), name)
        if report.skipped:
            is_unwritten = UNWRITTEN in report.longrepr[2]
            (self.unwritten if is_unwritten else self.skipped)[test] += 1
        elif report.failed:
            self.failed[test].append((case.removesuffix("]"), message_of(report)))
        if report.failed or (report.when == "call" and not report.skipped):
            self.ran[test] += 1

    def pytest_sessionfinish(self, session):
        if session.exitstatus == pytest.ExitCode.OK and self.unwritten:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self.errors():
            session.exitstatus = pytest.ExitCode.USAGE_ERROR

    def pytest_terminal_summary(self, terminalreporter):
        show = terminalreporter.write_line
        show("")
        # A wrong norm makes the block fail, too, so the norm comes first.
        for layer in found:
            for test in self.failed:
                if test[0] == layer:
                    self.show_failures(test, show)
        for (layer, test), count in self.unwritten.items():
            show(f"NOT WRITTEN {layer}: {test}, {count} ended in NotImplementedError")
        for error in self.errors():
            show(error)
        if foreign and not self.config.option.markexpr:
            if self.skipped:
                count = self.skipped.total()
                show(
                    f"{count} skipped: the layers lack their option or input (see -rs)"
                )
            if self.failed:
                show(CAUSES)
            elif not self.unwritten and not self.errors():
                show(BEYOND)

    def errors(self):
        """Return a line for each layer that was not tested."""
        errors = []
        for layer in found:
            equation = (layer, "test_equation")
            tried = self.ran[equation] + self.unwritten[equation]
            if not (FOLDER / f"test_{layer}.py").exists():
                add = f"`tinyblock add {layer} --to DIR --with-tests` copies them"
                errors.append(f"ERROR {layer}: its tests are not beside it; {add}")
            elif layer in foreign and self.skipped[equation] and not tried:
                errors.append(f"ERROR {layer}: no case of the equation could run (-rs)")
        return errors

    def show_failures(self, test, show):
        """Show a line for each of the first failures that differ in more than numbers."""
        layer, name = test
        alike = defaultdict(list)
        for case, message in self.failed[test]:
            alike[VARYING.sub("", message)].append((case, message))
        for same in list(alike.values())[:SHOWN]:
            case, message = same[0]
            count = f"{len(same)} of {self.ran[test]}"
            first = f", first [{case}]" if case else ""
            text = textwrap.shorten(message, 250)
            show(f"FAILED {layer}: {name}, {count}{first}: {text}")


def message_of(report):
    """Return what failed, without the names of the exceptions that tests raise."""
    message = report.longrepr.reprcrash.message
    return re.sub("^(Failed|AssertionError): ", "", message)
