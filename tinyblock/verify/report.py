"""The plugin by which pytest runs the pages of a contract, and prints a line for each cause."""

import importlib
import shutil
import textwrap
import traceback
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from .changes import Change
from .imports import explain_import
from .lines import Failure, Layer, cause_of, lines_of
from .search import observe

CAUSES = (
    "Common mistakes, by the test that fails: docs/verify.md in tinyblock's repository"
)
UNTESTED = (
    "gradients, because the result has none for x: detach, .data, or no_grad cuts the "
    "graph, in the layer or in an adapter"
)
BEYOND = (
    '-m "not numbers" tests what tinyblock promises beyond this: a right layer fails if it, '
    "for example, has no reset_parameters, accepts wrong options, or casts its table of RoPE. "
    'Initial weights alone: -m "not numbers" -k initial_weights'
)


class Report:
    """Test the layers of a folder."""

    def __init__(self, folder: Path, layers: list[str]) -> None:
        self.files = {layer: folder / f"{layer}.py" for layer in layers}
        self.layers = {layer: Layer(layer) for layer in layers}
        self.broken: dict[str, list[str]] = {}  # layers, by why they are not imported
        self.broken_by: set[object] = set()  # the causes
        self.foreign: list[str] = []  # layers that are no copies of tinyblock's

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Function]
    ) -> None:
        """Test the equation first, and leave out what only tinyblock promises."""
        if not items:
            return
        target = importlib.import_module(f"{items[0].module.__package__}.target")
        self.foreign = [layer for layer in self.layers if target.is_foreign(layer)]
        for layer in self.layers:
            try:
                target.load(layer)
            except (Exception, SystemExit) as error:
                self.add_broken(layer, error)
        broken = self.broken_layers()
        kept: list[pytest.Function] = []
        left_out: list[pytest.Function] = []
        for item in items:
            layer = layer_of(item)
            is_promise = not item.get_closest_marker("numbers")
            is_beyond = is_promise and layer in self.foreign
            is_left_out = layer in broken or (is_beyond and not config.option.markexpr)
            (left_out if is_left_out else kept).append(item)
        config.hook.pytest_deselected(items=left_out)
        items[:] = sorted(kept, key=lambda item: item.originalname != "test_equation")

    def add_broken(self, layer: str, error: BaseException) -> None:
        self.broken_by.add(cause_of(error))
        reason = explain_import(error, self.files[layer], self.files.values())
        layers = self.broken.setdefault(reason, [])
        if layer not in layers:
            layers.append(layer)

    def broken_layers(self) -> set[str]:
        return {layer for layers in self.broken.values() for layer in layers}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Function, call: pytest.CallInfo[None]
    ) -> Generator[None, Any, Any]:
        report = yield
        if report.failed and call.excinfo:
            report.category = self.add_failure(item, call.excinfo.value)
        elif report.passed and report.when == "call":
            self.layers[layer_of(item)].has_passed = True
        return report

    def pytest_report_teststatus(self, report: Any) -> tuple[str, str, str] | None:
        """Count what cannot be tested, such as what is not written, apart from failures."""
        category = getattr(report, "category", "")
        return (category, "N", category.upper()) if category else None

    def add_failure(self, item: pytest.Function, error: BaseException) -> str:
        """Add a failed test, and return what pytest shall count it as, or ""."""
        layer = self.layers[layer_of(item)]
        of_cases = {}
        for title, each in getattr(error, "failures", {"": error}).items():
            if isinstance(each, ModuleNotFoundError | SyntaxError):
                # A function of an adapter imports the solution.
                self.add_broken(layer.name, each)
            elif cause_of(each) in self.broken_by:
                continue  # another layer imports the broken one
            elif function := unwritten_function(each):
                layer.unwritten.add(function)
            elif item.originalname == "test_gradient_of_x" and is_failure(each):
                layer.has_no_gradient = True
            else:
                of_cases[title] = each
        if not of_cases:
            return "not written or tested"
        ran = getattr(error, "ran", 0)
        layer.failures.append(Failure(item.originalname, of_cases, ran))
        if item.originalname == "test_equation" and not layer.observations:
            layer.observations = observe(item.cls().every())
        return ""

    def pytest_terminal_summary(
        self, terminalreporter: Any, config: pytest.Config
    ) -> None:
        def show(line: str) -> None:
            terminalreporter.write_line(wrapped(line))

        show("")
        for reason, layers in self.broken.items():
            terminalreporter.write_line(f"ERROR {', '.join(layers)}: {reason}")
        known: dict[Change, str] = {}
        for layer in self.layers.values():
            for line, *below in lines_of(layer, known):
                show(f"FAILED {layer.name}: {line}")
                for each in below:
                    terminalreporter.write_line(f"    {each}")
        for line in self.not_tested():
            show(line)
        if self.foreign and not config.option.markexpr:
            for line in self.conclusions():
                show(line)

    def not_tested(self) -> Iterator[str]:
        for layer in self.layers.values():
            if layer.unwritten:
                functions = ", ".join(sorted(layer.unwritten))
                yield f"NOT WRITTEN {layer.name}: NotImplementedError in {functions}"
        cut = [layer.name for layer in self.layers.values() if layer.has_no_gradient]
        if cut:
            yield f"NOT TESTED {', '.join(cut)}: {UNTESTED}"

    def conclusions(self) -> Iterator[str]:
        """Yield which layers are right, and what to read about the others."""
        if any(layer.failures for layer in self.layers.values()):
            yield CAUSES
        broken = self.broken_layers()
        right = [
            name
            for name, layer in self.layers.items()
            if layer.is_right and name not in broken
        ]
        if right:
            yield f"RIGHT {', '.join(right)}"
        if right == list(self.layers):
            yield BEYOND


def wrapped(line: str) -> str:
    """Wrap a line at the width of the terminal, and leave its words whole."""
    lines = textwrap.wrap(
        line,
        shutil.get_terminal_size().columns,
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines)


def is_failure(error: BaseException) -> bool:
    """Return whether the contract says what is wrong, and the layer raises no error."""
    return isinstance(error, pytest.fail.Exception)


def unwritten_function(error: BaseException) -> str:
    """Return the function that raises NotImplementedError in place of code, or "".

    torch itself raises this error from C++, where it lacks an operation.
    """
    if not isinstance(error, NotImplementedError):
        return ""
    raised = traceback.extract_tb(error.__traceback__)[-1]
    return raised.name if (raised.line or "").startswith("raise ") else ""


def layer_of(item: pytest.Item) -> str:
    """Return the layer of a page: "rope" for test_rope.py."""
    return item.path.stem.removeprefix("test_")
