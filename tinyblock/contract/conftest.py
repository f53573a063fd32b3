"""Find the layers, and give each test of their pages its cases.

The layers are those in the folder above, or in the folder or files of `--layers`. Copies
of tinyblock's layers pass all tests. For other layers, only the tests marked `numbers`
run: what every correct layer does, whoever wrote it.
"""

import sys
import sysconfig
import traceback
from pathlib import Path

import pytest
import torch

from .checks import HALVES, UNITS, name_of
from .report import UNWRITTEN, Report, layer_of
from .target import ABOVE, ALL, foreign, found, load, select

FOLDER = Path(__file__).parent


def pytest_addoption(parser):
    parser.addoption(
        "--layers",
        action="append",
        help="test the layers here (default: the folder above)",
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "cuda: needs a GPU")
    config.addinivalue_line("markers", "numbers: holds for every correct layer")
    paths = config.getoption("layers", default=None)
    for path in paths or [ABOVE]:
        select(config.invocation_params.dir / path)
    for layer in found:
        if layer in foreign:
            import_foreign(layer)
    if paths:  # the command is `tinyblock verify`
        config.pluginmanager.register(Report(config))


def import_foreign(layer):
    """Import a layer that is not a copy. An error ends the run, and shows its cause."""
    try:
        load(layer)
    except Exception as error:
        shown = traceback.TracebackException.from_exception(error)
        python = ("<frozen ", sysconfig.get_path("stdlib"), str(FOLDER))
        shown.stack[:] = [
            frame for frame in shown.stack if not frame.filename.startswith(python)
        ]
        if not isinstance(error, ModuleNotFoundError):
            print("".join(shown.format()), file=sys.stderr)
            raise pytest.UsageError(f"{layer}.py cannot be imported") from None
        installed = sysconfig.get_path("purelib")
        [*_, last] = (
            frame for frame in shown.stack if not frame.filename.startswith(installed)
        )
        repair = "install it; if it is the solution: pip install --no-deps -e PATH"
        if (error.name or "").startswith("tests"):
            repair = "run verify in the folder of the solution, or set PYTHONPATH to it"
        raise pytest.UsageError(
            f"{last.filename}, line {last.lineno}: {error}: {repair}"
        ) from None


def pytest_ignore_collect(collection_path):
    """Leave out the pages of layers that are not there."""
    layer = layer_of(collection_path)
    return True if layer in ALL and layer not in found else None


def pytest_generate_tests(metafunc):
    """Pass the tables of a page as arguments, as every_layer.py describes them."""
    from . import every_layer  # not above: its marks are known after pytest_configure

    page, test, arguments = metafunc.module, metafunc.function, metafunc.fixturenames
    if test is not getattr(every_layer, test.__name__, test):
        pytest.fail(
            f"{test.__name__} hides the test of this name in every_layer.py: rename it",
            pytrace=False,
        )
    if "case" in arguments and "dtype" in arguments:
        give_cases(metafunc, "dtype", UNITS, page.CASES)
    elif "case" in arguments and "half" in arguments:
        rounded = {
            title: case for title, case in page.CASES.items() if case.rounds_once
        }
        give_cases(metafunc, "half", HALVES, rounded)
    elif "case" in arguments:
        metafunc.parametrize("case", page.CASES.values(), ids=page.CASES)
    if "typical" in arguments:
        typical = [page.CASES[title] for title in page.TYPICAL]
        metafunc.parametrize("typical", typical, ids=page.TYPICAL)
    if "option" in arguments:
        wrong = [
            (option, value)
            for option, values in page.REJECTED.items()
            for value in values
        ]
        metafunc.parametrize(("option", "value"), wrong)
    if "device" in arguments and torch.cuda.is_available():
        on_cuda = pytest.param("cuda", marks=pytest.mark.cuda)
        metafunc.parametrize("device", ["cpu", on_cuda])


def give_cases(metafunc, argument, dtypes, cases):
    """Pass each case in each dtype. Every correct layer computes common cases in float32."""
    found = []
    for dtype in dtypes:
        for title, case in cases.items():
            # Only a norm must be exact in a half precision, built and called in it.
            is_norm = case.layer == "rmsnorm" and dtype in HALVES
            is_common = case.is_common and (dtype == torch.float32 or is_norm)
            marks = [pytest.mark.numbers] if is_common else []
            name = f"{title}, {name_of(dtype)}"
            found.append(pytest.param(case, dtype, id=name, marks=marks))
    metafunc.parametrize(("case", argument), found)


@pytest.fixture
def device():
    """The CPU, and a GPU if there is one."""
    return "cpu"


def pytest_collection_modifyitems(config, items):
    """Leave out what only tinyblock guarantees, and let verify test the equation first."""
    if foreign or config.getoption("layers", default=None):
        items.sort(key=lambda item: not item.name.startswith("test_equation["))
    if not foreign:
        return
    left_out = [
        item
        for item in items
        if item.path.parent == FOLDER
        and layer_of(item.path) in foreign
        and not item.get_closest_marker("numbers")
        and not config.option.markexpr
    ]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Skip what a student has not written."""
    try:
        return (yield)
    except NotImplementedError as error:
        raised = traceback.extract_tb(error.__traceback__)[-1].line or ""
        # torch itself raises this error from C++, where it lacks an operation.
        if layer_of(item.path) in foreign and raised.startswith("raise "):
            pytest.skip(UNWRITTEN)
        raise
