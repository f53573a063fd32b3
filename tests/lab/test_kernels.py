"""Kernels, from events as torch.profiler gives them; on a CPU, which attention kernel runs."""

import pytest
import torch
from lab.kernels import (
    attention_kernel,
    counted_on_gpu,
    kernel_report,
    summarize_kernels,
)
from profiles import event
from torch.nn.attention import SDPBackend, sdpa_kernel


def test_summarize_kernels_counts_kernels_and_the_time_that_any_runs():
    # The second is on another stream, 5 us of it at the same time. The copy is no kernel, but the GPU is busy with it.
    times = {
        "gemm": (0, 10),
        "softmax": (5, 12),
        "add": (20, 30),
        "within": (21, 22),
        "Memcpy DtoD": (40, 50),
    }
    events = [event(name, *time) for name, time in times.items()]
    summary = summarize_kernels(events, seconds=64e-6)
    assert (summary["count"], summary["launch_bound"]) == (4, True)
    assert (summary["busy_seconds"], summary["busy_fraction"]) == pytest.approx(
        (32e-6, 0.5)
    )
    assert summarize_kernels(events, seconds=33e-6)["launch_bound"] is False


def test_kernels_are_counted_after_the_label_whatever_the_clock_of_the_host():
    # Of the first call, the profiler has lost two of three kernels: they must not count, nor make a difference.
    of_first = [event("gemm", 0, 10), event("aten::mm", 101, 150, "CPU")]
    of_second = [event("gemm", 95, 120), event("add", 130, 140), event("mul", 150, 160)]
    on_gpu, on_host = (
        event("counted", 95, 160, annotation=True),
        event("counted", 100, 200, "CPU"),
    )
    assert counted_on_gpu([*of_second, on_host, on_gpu, *of_first]) == of_second
    assert counted_on_gpu([*of_second, on_host, *of_first]) == of_second[1:]


def test_kernels_that_nobody_saw_are_none():
    assert summarize_kernels([], seconds=1.0) is None
    assert summarize_kernels([event("Memset", 0, 1)], seconds=1.0) is None
    assert kernel_report(lambda: None, torch.device("cpu"), 1.0) is None


@pytest.mark.parametrize(
    ("backend", "name"),
    [(SDPBackend.FLASH_ATTENTION, "flash"), (SDPBackend.MATH, "math")],
)
def test_attention_kernel_is_the_one_that_runs(backend, name):
    q = torch.randn(1, 2, 4, 8)
    with sdpa_kernel(backend):
        assert (
            attention_kernel(
                lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q)
            )
            == name
        )
