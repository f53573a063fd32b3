"""What every test needs: one thread, the same random numbers on every run, and a clean compiler."""

import os
import sys

import pytest

# Before torch starts. The tensors are small: a second thread would do less than it costs to wait for it.
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(autouse=True)
def _same_start():
    import torch  # not above: pytest-xdist's first process runs no test, and need not wait for it

    torch.manual_seed(0)
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()


def pytest_collection_modifyitems(config, items):
    """Measure coverage of the package in its own tests alone: counting adds half to the time of a test."""
    for item in items:
        if config.getoption("cov_source", None) and item.path.parent.name in (
            "lab",
            "peers",
            "profiling",
            "training",
        ):
            item.add_marker("no_cover")  # of pytest-cov


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config, log):
    """With --dist loadfile, give a process a whole file at a time, but the properties of the contract one by one."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

    class Files(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid):
            return (
                nodeid
                if nodeid.startswith("tinyblock/contract/")
                else super()._split_scope(nodeid)
            )

    return Files(config, log)
