"""What every test needs: one thread, equal random numbers on every run, and a clean compiler.

A test may be skipped for a reason of a list. Any other skip fails.
"""

import gc
import os

import einops
import pytest

# Before torch starts. The tensors are small, and threads would wait for each other.
os.environ["OMP_NUM_THREADS"] = "1"
# Small graphs have few equal operations, and to note each one takes longer than to repeat it.
os.environ["TORCH_FAKE_TENSOR_DISPATCH_CACHE"] = "0"

# What the tests import stays. It is 700,000 objects, among which each search for garbage
# takes half a second.
gc.disable()
# A test leaves little garbage. By default, Python looks for it after 700 new objects.
gc.set_threshold(10_000)


NO_GPU = "requires a GPU"
SKIPS = {
    NO_GPU,
    "pytorch issue 196678: see docs/layers.md",
    "requires Python 2.7",
    "requires Python 3.6",
    "requires Python 3.9",
    "requires Python 3.10",
    "requires the extra dev",
    "requires the extra examples",
    "requires the model that `make story` downloads",
}


class OnlySkips:
    """Make a test or a file fail that is skipped, or xfails, for another reason."""

    def __init__(self, reasons):
        self.reasons = reasons

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self):
        return self.checked((yield))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_make_collect_report(self):
        return self.checked((yield))

    def checked(self, report):
        if not report.skipped:
            return report
        reason = getattr(report, "wasxfail", None)
        if reason is None:
            _, _, skipped = report.longrepr
            reason = skipped.removeprefix("Skipped: ")
        if reason not in self.reasons:
            report.outcome = "failed"
            report.longrepr = (
                f"tests/conftest.py must list why this is skipped: {reason}"
            )
        return report


def pytest_addoption(parser):
    parser.addoption(
        "--all-packages",
        action="store_true",
        help="fail each test that is skipped, unless it requires a GPU",
    )


def pytest_configure(config):
    """Hide a GPU, except from `pytest -m cuda`: results must not depend on the machine."""
    if config.option.markexpr != "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    reasons = {NO_GPU} if config.option.all_packages else SKIPS
    config.pluginmanager.register(OnlySkips(reasons))


def pytest_collection_finish():
    import torch  # not above: the first process of pytest-xdist runs no test

    # torch.compile takes half the time if it does not trace these (docs/your_model.md).
    # One test in tests/layers/test_pytorch.py lets it trace a copy, as it does for users.
    for function in (einops.einsum, einops.rearrange, einops.repeat):
        torch.compiler.allow_in_graph(function)
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _same_start():
    import torch

    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # torch.manual_seed formats the stack of its callers for CUDA, in 1 ms
        torch.default_generator.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture
def fake_processes():
    """Be the first of four processes, of which the others do nothing."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()
