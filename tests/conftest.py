"""What every test needs: the same random numbers on every run, and a clean compiler."""

import warnings

import pytest
import torch

with warnings.catch_warnings():  # inductor's own import uses a deprecated part of torch
    warnings.simplefilter("ignore", DeprecationWarning)
    import torch._inductor.compile_fx


torch.set_num_threads(1)  # the tensors are small: a second thread costs more than it does


@pytest.fixture(autouse=True)
def _same_start():
    torch.manual_seed(0)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()
