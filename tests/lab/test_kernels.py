"""Counting kernels, from events as a profiler gives them."""

from types import SimpleNamespace

import pytest
import torch
from lab.kernels import kernel_report, summarize_kernels


def event(name, start, end, device="CUDA", annotation=False):
    return SimpleNamespace(
        name=name,
        time_range=SimpleNamespace(start=start, end=end),
        device_type=SimpleNamespace(name=device),
        is_user_annotation=annotation,
    )


def test_summarize_kernels_counts_kernels_and_the_time_that_any_runs():
    events = [
        event("gemm", 0, 10),
        event("softmax", 5, 12),  # on another stream, 5 us of it at the same time
        event("add", 20, 30),
        event("within", 21, 22),
        event("aten::mm", 0, 100, device="CPU"),
        event("Memcpy DtoD", 40, 50),
        event("Optimizer.step", 0, 90, annotation=True),
    ]
    summary = summarize_kernels(events, seconds=64e-6)
    assert summary["count"] == 4  # the copy is none, but the GPU is busy with it
    assert summary["busy_seconds"] == pytest.approx(32e-6)
    assert summary["busy_fraction"] == pytest.approx(0.5)
    assert summary["launch_bound"] is True
    assert summarize_kernels(events, seconds=33e-6)["launch_bound"] is False


def test_kernels_that_nobody_saw_are_none():
    assert summarize_kernels([], seconds=1.0) is None
    assert summarize_kernels([event("aten::mm", 0, 100, device="CPU"), event("Memset", 0, 1)], seconds=1.0) is None
    assert kernel_report(lambda: None, torch.device("cpu"), 1.0) is None
