"""What every test needs: one thread, equal random numbers on every run, and a clean compiler."""

import gc
import os

import einops
import pytest

# Before torch starts. The tensors are small, and threads would wait for each other.
os.environ["OMP_NUM_THREADS"] = "1"

# What the tests import stays. It is 700,000 objects, among which each search for garbage
# takes half a second.
gc.disable()


def pytest_configure(config):
    """Hide a GPU, except from `pytest -m cuda`: results must not depend on the machine."""
    if config.option.markexpr != "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_finish():
    import torch  # not above: the first process of pytest-xdist runs no test

    # torch.compile takes half the time if it does not trace these (docs/hosts.md).
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
