"""Select the layers, and the tests that hold for them.

The layers are those in the folder above, or in the folder or files of `--layers`. Copies
of tinyblock's layers pass all tests. For other layers, only the tests marked `numbers`
run: what every correct layer does, whoever wrote it.
"""

import re
import textwrap
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import torch

from . import target

EQUATION = "test_equation"
# The reports of each test that ran, by titles such as "rope: test_equation".
reports: defaultdict[str, list[pytest.TestReport]] = defaultdict(list)
skipped: Counter[str] = Counter()  # the number of tests, by the reason


def pytest_addoption(parser):
    parser.addoption(
        "--layers",
        action="append",
        help="test the layers here (default: the folder above)",
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "cuda: needs a GPU")
    config.addinivalue_line("markers", "numbers: holds for every correct layer")
    paths = config.getoption("layers", default=None) or [target.ABOVE]
    for path in paths:
        target.select(config.invocation_params.dir / path)
    for layer in target.foreign:
        try:
            target.load(layer)
        except (ImportError, SyntaxError) as error:
            raise pytest.UsageError(
                f"{layer}.py cannot be imported: {error}; check PYTHONPATH and packages"
            ) from error
    if target.foreign and config.option.maxfail > 1:
        config.option.maxfail = 0  # one defect may fail in many cases


def pytest_ignore_collect(collection_path):
    """Leave out the files of layers that are not there."""
    layer = collection_path.stem.removeprefix("test_")
    return True if layer in target.ALL and layer not in target.found else None


def pytest_collection_modifyitems(config, items):
    """Leave out what only tinyblock guarantees, and test the equation first."""
    left_out = []
    for item in items:
        if item.path.parent != Path(__file__).parent:
            continue
        # The names of a file, and of a case of test_every_layer.py, start with a layer.
        named = re.search("|".join(target.ALL), item.path.stem + item.name)
        if named is None:  # no layer has such a case
            continue
        layer = named[0]
        item.user_properties.append(("title", f"{layer}: {item.originalname}"))
        is_beyond = layer in target.foreign and not item.get_closest_marker("numbers")
        if is_beyond and not config.option.markexpr:
            left_out.append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
    if target.foreign:
        items.sort(key=lambda item: item.originalname != EQUATION)


def pytest_runtest_logreport(report):
    title = dict(report.user_properties).get("title")
    if title is None:
        return
    ran = reports[title]  # also if each of its cases is skipped
    if report.skipped:
        skipped[report.longrepr[2]] += 1
    elif report.failed or report.when == "call":
        ran.append(report)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # after the summary of pytest
def pytest_sessionfinish(session):
    """Show a line for each test that failed in a layer, and what was left out."""
    result = yield
    config = session.config
    show = config.get_terminal_writer().line
    for title, ran in reports.items():
        failed = [report for report in ran if report.failed]
        if failed and config.option.tbstyle == "no":  # as in contract.ini
            first = failed[0].nodeid.partition("[")[2].removesuffix("]")
            count = f"{len(failed)} of {len(ran)}"
            message = failed[0].longrepr.reprcrash.message
            reason = textwrap.shorten(message.removeprefix("Failed: "), 250)
            show(f"FAILED {title}, {count}, first [{first}]: {reason}")
        layer, _, test = title.partition(": ")
        if layer in target.foreign and test == EQUATION and not ran:
            show(f"ERROR {layer}: no case of the equation could run")
            session.exitstatus = pytest.ExitCode.USAGE_ERROR
    if target.foreign and not config.option.markexpr:
        reasons = [f"{reason} ({count})" for reason, count in skipped.items()]
        show(", ".join(reasons))
        names = ", ".join(sorted(target.foreign))
        show(
            f"Only the tests of numbers ran for {names}: these files, or what they import, are "
            'not copies of tinyblock\'s. Pass -m "not numbers" to run the other tests, of '
            "which some require tinyblock's own methods"
        )
    return result


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    return request.param
