"""Select the layers: those in the folder above, or in the folder or file of `--layers`."""

from pathlib import Path

import pytest
import torch

from . import target


def pytest_addoption(parser):
    parser.addoption(
        "--layers", action="append", help="(default: the folder above the tests)"
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "cuda: needs a GPU")
    paths = config.getoption("layers", default=None) or [Path(__file__).parents[1]]
    for path in paths:
        target.select(config.invocation_params.dir / path)


def pytest_ignore_collect(collection_path):
    """Leave out the pages of layers that are not there."""
    layer = collection_path.stem.removeprefix("test_")
    return True if layer in target.ALL and layer not in target.found else None


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    return request.param
