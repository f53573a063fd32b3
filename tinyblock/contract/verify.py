"""`tinyblock verify`: run the pages of a contract, and print a line for each failure.

No project has a copy of this file.
"""

import re
import textwrap
from collections import defaultdict
from pathlib import Path

import pytest

from .imports import explain

CAUSES = (
    "Usual mistakes, by the test that fails: docs/verify.md in tinyblock's repository"
)
BEYOND = (
    '-m "not numbers" tests what tinyblock promises beyond this: a right layer fails if it '
    "has no reset_parameters, accepts wrong options, or casts its table of RoPE. "
    'Initial weights alone: -m "not numbers" -k initial_weights'
)


CONTRACT = Path(__file__).parent
# A wrong norm makes the block fail, too, so the norm comes first.
LAYERS = ("rmsnorm", "ffn", "rope", "attention", "block", "transformer")


def run(path: Path, layers: list[str], options: list[str]) -> int:
    """Test these layers of a folder, or all, or the layer of a file.

    Return the exit code: 0, 1 for failures, 2 for an error.
    """
    folder = path if path.is_dir() else path.parent
    contract = folder / "contract"
    if not (contract / "conftest.py").is_file():
        contract = CONTRACT
    layers = layers or ([path.stem] if path.is_file() else list(LAYERS))
    found = [layer for layer in layers if (folder / f"{layer}.py").is_file()]
    if not found:
        raise FileNotFoundError(
            f"{path} must exist, and be or contain one of {', '.join(LAYERS)}"
        )
    pages = [contract / f"test_{layer}.py" for layer in found]
    missing = [page.stem.removeprefix("test_") for page in pages if not page.exists()]
    if missing:
        add = f"`tinyblock add {' '.join(missing)} --to DIR --with-tests` copies them"
        raise FileNotFoundError(f"{contract} lacks the tests of {missing}: {add}")
    code = pytest.main(
        [
            *map(str, pages),
            f"--config-file={CONTRACT / 'contract.ini'}",
            f"--rootdir={contract}",
            f"--confcutdir={contract}",
            *options,
        ],
        plugins=[Verify(folder, found)],
    )
    return int(code) if code in (0, 1) else 2


class Verify:
    """Test the layers of a folder, and print a line for each test that fails."""

    __name__ = "tinyblock verify"  # by which the contract's conftest.py finds it

    def __init__(self, folder, layers):
        self.folder = folder
        self.layers = layers
        self.failed = {}  # the message of each test, such as ("rope", "test_equation")
        self.skipped = {}  # the reason of each test
        self.equations = set()  # layers whose equation was computed
        self.broken = defaultdict(list)  # layers that cannot be imported, by the reason

    def start(self, target, checks):
        """Let the contract test the layers of the folder, and name mistakes."""
        self.target = target
        self.unwritten = checks.UNWRITTEN
        target.folder = self.folder
        checks.name_mistake = name_mistake

    @property
    def has_foreign(self):
        return any(self.target.is_foreign(layer) for layer in self.layers)

    def pytest_collection_modifyitems(self, config, items):
        """Test the equation first, and leave out what only tinyblock promises."""
        for layer in self.layers:
            try:
                self.target.load(layer)
            except (Exception, SystemExit) as error:
                self.broken[explain(error, self.folder / f"{layer}.py")].append(layer)
        broken = [layer for layers in self.broken.values() for layer in layers]
        kept, left_out = [], []
        for item in items:
            layer = layer_of(item.nodeid)
            is_promise = not item.get_closest_marker("numbers")
            is_beyond = is_promise and self.target.is_foreign(layer)
            is_left_out = layer in broken or (is_beyond and not config.option.markexpr)
            (left_out if is_left_out else kept).append(item)
        config.hook.pytest_deselected(items=left_out)
        items[:] = sorted(kept, key=lambda item: "::test_equation[" not in item.nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        error = getattr(call.excinfo and call.excinfo.value, "__cause__", None)
        if isinstance(error, ModuleNotFoundError | SyntaxError):
            # A function of an adapter imports the solution.
            layer = layer_of(item.nodeid)
            reason = explain(error, self.folder / f"{layer}.py")
            if layer not in self.broken[reason]:
                self.broken[reason].append(layer)
        elif report.failed:
            self.failed[layer_of(item.nodeid), item.name] = message_of(report)
        elif report.skipped:
            self.skipped[layer_of(item.nodeid), item.name] = report.longrepr[2]
        has_run = call.when == "call" and not report.skipped
        if has_run and item.originalname == "test_equation":
            self.equations.add(layer_of(item.nodeid))
        return report

    def pytest_sessionfinish(self, session):
        if session.exitstatus == pytest.ExitCode.OK and self.unwritten_layers():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self.errors(session.config):
            session.exitstatus = pytest.ExitCode.USAGE_ERROR

    def pytest_terminal_summary(self, terminalreporter, config):
        show = terminalreporter.write_line
        show("")
        for error in self.errors(config):
            show(error)
        for layer in self.layers:
            for (of_layer, test), message in self.failed.items():
                if of_layer == layer:
                    show(f"FAILED {layer}: {test}: {textwrap.shorten(message, 300)}")
        for layer, functions in self.unwritten_layers().items():
            names = ", ".join(sorted(functions))
            show(f"NOT WRITTEN {layer}: NotImplementedError in {names}")
        if not self.has_foreign or config.option.markexpr:
            return
        if self.failed:
            show(CAUSES)
        elif not self.unwritten_layers() and not self.errors(config):
            show(f"RIGHT {', '.join(self.layers)}")
            show(BEYOND)

    def unwritten_layers(self):
        """Return the functions of each layer that raise NotImplementedError."""
        functions = defaultdict(set)
        for (layer, _), reason in self.skipped.items():
            if self.unwritten in reason:
                functions[layer].add(reason.rpartition(": ")[2])
        return functions

    def errors(self, config):
        """Return a line for each layer that was not tested."""
        errors = []
        for reason, layers in self.broken.items():
            errors.append(f"ERROR {', '.join(layers)}: {reason}")
        broken = [layer for layers in self.broken.values() for layer in layers]
        for layer in self.layers:
            reason = self.skipped.get((layer, "test_equation[cpu-float32]"))
            is_tested = layer in self.equations or layer in self.unwritten_layers()
            if reason and not is_tested and layer not in broken:
                errors.append(f"ERROR {layer}: no case of its equation ran: {reason}")
        return errors


def name_mistake(failures):
    """Return the name of a usual mistake that explains failures, or ""."""
    from . import mistakes  # not above: most runs need none

    return mistakes.name_mistake(failures)


def layer_of(nodeid):
    """Return the layer of a page: "rope" for test_rope.py::test_equation."""
    page, _, _ = nodeid.partition("::")
    return Path(page).stem.removeprefix("test_")


def message_of(report):
    """Return what failed, without the names of the exceptions that tests raise."""
    message = report.longrepr.reprcrash.message
    return re.sub("^(Failed|AssertionError): ", "", message)
