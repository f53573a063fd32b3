"""`tinyblock verify`: run the pages of a contract, and print a line for each failure.

No project has a copy of this file.
"""

import textwrap
import traceback
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
    verify = Verify(folder, found)
    code = pytest.main(
        [
            *map(str, pages),
            f"--config-file={CONTRACT / 'contract.ini'}",
            f"--rootdir={contract}",
            f"--confcutdir={contract}",
            *options,
        ],
        plugins=[verify],
    )
    return int(code) if code in (0, 1) and not verify.broken else 2


class Verify:
    """Test the layers of a folder, and print a line for each test that fails."""

    __name__ = "tinyblock verify"  # by which the contract's conftest.py finds it

    def __init__(self, folder, layers):
        self.folder = folder
        self.layers = layers
        self.failed = {}  # the message of each test, such as ("rope", "test_equation")
        self.unwritten = defaultdict(set)  # functions of each layer
        self.broken = defaultdict(list)  # layers that cannot be imported, by the reason

    def start(self, target):
        """Let the contract test the layers of the folder."""
        self.target = target
        target.folder = self.folder

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
            layer = layer_of(item)
            is_promise = not item.get_closest_marker("numbers")
            is_beyond = is_promise and self.target.is_foreign(layer)
            is_left_out = layer in broken or (is_beyond and not config.option.markexpr)
            (left_out if is_left_out else kept).append(item)
        config.hook.pytest_deselected(items=left_out)
        items[:] = sorted(kept, key=lambda item: "::test_equation[" not in item.nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if report.failed:
            self.add_failure(layer_of(item), item.name, call.excinfo)
        return report

    def add_failure(self, layer, test, excinfo):
        error = excinfo.value.__cause__
        if isinstance(error, ModuleNotFoundError | SyntaxError):
            # A function of an adapter imports the solution.
            reason = explain(error, self.folder / f"{layer}.py")
            if layer not in self.broken[reason]:
                self.broken[reason].append(layer)
        elif function := unwritten_function(error):
            self.unwritten[layer].add(function)
        else:
            mistake = name_mistake(getattr(excinfo.value, "wrong", None))
            message = excinfo.exconly().removeprefix("Failed: ")
            self.failed[layer, test] = f"{mistake}{message}"

    def pytest_terminal_summary(self, terminalreporter, config):
        show = terminalreporter.write_line
        show("")
        for reason, layers in self.broken.items():
            show(f"ERROR {', '.join(layers)}: {reason}")
        for layer in self.layers:
            for (of_layer, test), message in self.failed.items():
                if of_layer == layer:
                    show(f"FAILED {layer}: {test}: {textwrap.shorten(message, 300)}")
        for layer, functions in self.unwritten.items():
            names = ", ".join(sorted(functions))
            show(f"NOT WRITTEN {layer}: NotImplementedError in {names}")
        is_foreign = any(self.target.is_foreign(layer) for layer in self.layers)
        if not is_foreign or config.option.markexpr:
            return
        if self.failed:
            show(CAUSES)
        elif not self.unwritten and not self.broken:
            show(f"RIGHT {', '.join(self.layers)}")
            show(BEYOND)


def name_mistake(wrong):
    """Return the name of a usual mistake that explains wrong results, and ": ", or ""."""
    if not wrong:
        return ""
    from . import mistakes  # not above: most runs need none

    mistake = mistakes.name_mistake(wrong)
    return mistake and f"{mistake}: "


def unwritten_function(error):
    """Return the function that raises NotImplementedError in place of code, or "".

    torch itself raises this error from C++, where it lacks an operation.
    """
    if not isinstance(error, NotImplementedError):
        return ""
    raised = traceback.extract_tb(error.__traceback__)[-1]
    return raised.name if (raised.line or "").startswith("raise ") else ""


def layer_of(item):
    """Return the layer of a page: "rope" for test_rope.py."""
    return item.path.stem.removeprefix("test_")
