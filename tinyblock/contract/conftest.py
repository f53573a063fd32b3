"""Select the layers, and the tests that hold for them.

The layers are those in the folder above, or in the folder or files of `--layers`. Copies
of tinyblock's layers pass all tests. For other layers, only the tests marked `numbers`
run: what every right layer does, whoever wrote it.
"""

import textwrap
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from . import target

EQUATION = "test_equation"
# The reports of each layer and test.
reports: defaultdict[tuple[str, str], list[Any]] = defaultdict(list)


def pytest_addoption(parser):
    parser.addoption(
        "--layers", action="append", help="(default: the folder above the tests)"
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "cuda: needs a GPU")
    config.addinivalue_line("markers", "numbers: holds for every right layer")
    paths = config.getoption("layers", default=None) or [target.ABOVE]
    for path in paths:
        target.select(config.invocation_params.dir / path)
    for layer in target.foreign:
        try:
            target.load(layer)
        except ImportError as error:
            raise pytest.UsageError(
                f"{layer}.py cannot be imported, check PYTHONPATH: {error}"
            ) from error
    if target.foreign and config.option.maxfail > 1:
        config.option.maxfail = 0  # one defect may fail in many cases


def pytest_ignore_collect(collection_path):
    """Leave out the pages of layers that are not there."""
    layer = collection_path.stem.removeprefix("test_")
    return True if layer in target.ALL and layer not in target.found else None


def pytest_collection_modifyitems(config, items):
    """Leave out what only tinyblock guarantees, and test the equation first."""
    left_out = []
    for item in items:
        if item.path.parent != Path(__file__).parent:
            continue
        layer = layer_of(item)
        item.user_properties.append(("layer", layer))
        is_beyond = layer in target.foreign and not item.get_closest_marker("numbers")
        if is_beyond and not config.option.markexpr:
            left_out.append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
    if target.foreign:
        items.sort(key=lambda item: item.originalname != EQUATION)


def layer_of(item):
    """Return the layer that a test is about, from its page or its parameters."""
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    for value in (item.path.stem.removeprefix("test_"), *parameters):
        layer = str(getattr(value, "layer", value)).partition(".")[0]
        if layer in target.ALL:
            return layer
    return None


def pytest_runtest_logreport(report):
    layer = dict(report.user_properties).get("layer")
    if layer and (report.when == "call" or not report.passed):
        test = report.nodeid.rpartition("::")[2].partition("[")[0]
        reports[layer, test].append(report)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # after the summary of pytest
def pytest_sessionfinish(session):
    """Show a line for each test that failed in a layer, and what was left out."""
    result = yield
    config = session.config
    show = config.get_terminal_writer().line
    skipped = Counter()
    for (layer, test), outcomes in reports.items():
        ran = [outcome for outcome in outcomes if not outcome.skipped]
        failed = [outcome for outcome in ran if outcome.failed]
        if failed and config.option.tbstyle == "no":  # as in contract.ini
            first = failed[0].nodeid.partition("[")[2].removesuffix("]")
            count = f"{len(failed)} of {len(ran)}"
            crash = getattr(failed[0].longrepr, "reprcrash", None)
            message = crash.message if crash else str(failed[0].longrepr)
            reason = textwrap.shorten(message.removeprefix("Failed: "), 250)
            show(f"FAILED {layer}: {test}, {count}, first [{first}]: {reason}")
        if layer in target.foreign and test == EQUATION and not ran:
            show(f"ERROR {layer}: no case of the equation could run")
            session.exitstatus = pytest.ExitCode.USAGE_ERROR
        skipped.update(report.longrepr[2] for report in outcomes if report.skipped)
    if target.foreign and not config.option.markexpr:
        reasons = [f"{reason} ({count})" for reason, count in skipped.items()]
        show(", ".join(reasons))
        names = ", ".join(sorted(target.foreign))
        show(
            f"Only the tests of numbers ran for {names}, which are no copies of "
            'tinyblock\'s layers: pass -m "not numbers" to run the other tests'
        )
    return result


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    return request.param
