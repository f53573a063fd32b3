"""Kernels, from events as torch.profiler gives them; on a CPU, which attention kernel runs."""

from types import SimpleNamespace

import pytest
import torch
from lab.kernels import (
    attention_kernel,
    counted_on_gpu,
    gpu_seconds,
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
    assert summary.count == 4
    assert summary.busy_seconds == pytest.approx(32e-6)
    assert summary.busy_fraction == pytest.approx(0.5)
    assert summary.launch_bound
    assert not summarize_kernels(events, seconds=33e-6).launch_bound


def test_kernels_are_counted_after_the_label_whatever_the_clock_of_the_host():
    # What begins before the label does not count. If the GPU has no label, that of the host decides. It begins at 100,
    # so that gemm, which begins at 95, does not count either.
    before = [event("add_", 0, 10), event("aten::mm", 101, 150, "CPU")]
    counted = [event("gemm", 95, 120), event("add", 130, 140), event("mul", 150, 160)]
    on_gpu = event("counted", 95, 160, annotation=True)
    on_host = event("counted", 100, 200, "CPU")
    assert counted_on_gpu([*counted, on_host, on_gpu, *before]) == counted
    assert counted_on_gpu([*counted, on_host, *before]) == counted[1:]


def test_kernels_that_nobody_saw_are_none():
    assert summarize_kernels([], seconds=1.0) is None
    assert summarize_kernels([event("Memset", 0, 1)], seconds=1.0) is None
    assert kernel_report(lambda: None, torch.device("cpu"), 1.0) is None


class FakeGpu:
    """A GPU that works through a queue of 1,000 launches; when the queue is full, a launch waits for a free place."""

    LAUNCH = 10e-6  # seconds of the host
    QUEUE = 1000

    def __init__(self):
        self.host_time = 0.0
        self.ends = [0.0]

    def launch(self, seconds):
        self.host_time += self.LAUNCH
        if len(self.ends) > self.QUEUE:
            self.host_time = max(self.host_time, self.ends[-self.QUEUE])
        start = max(self.host_time, self.ends[-1])
        self.ends.append(start + seconds)

    def synchronize(self):
        self.host_time = max(self.host_time, self.ends[-1])

    def event(self, enable_timing):
        found = SimpleNamespace()

        def record():
            found.at = self.ends[-1]

        found.record = record
        found.query = lambda: self.host_time >= found.at
        found.synchronize = self.synchronize
        found.elapsed_time = lambda end: 1e3 * (end.at - found.at)
        return found


# 500 kernels fit once, and not three times. 1,500 do not fit at all.
@pytest.mark.parametrize(
    ("kernels", "calls", "expected"),
    [
        (100, 5 * 3, [100 * 2e-6] * 5),
        (500, 3 * 3 + 5 * 1, [500 * 2e-6] * 5),
        (1500, 3 * 3 + 3 * 1, None),
    ],
)
def test_gpu_seconds_queues_no_more_calls_than_the_stream_takes(
    kernels, calls, expected, monkeypatch
):
    gpu = FakeGpu()
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.synchronize)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: gpu.launch(cycles / 2e9))
    ran = []

    def run():
        ran.append(1)
        for _ in range(kernels):
            gpu.launch(2e-6)

    host_seconds = kernels * gpu.LAUNCH
    found = gpu_seconds(run, host_seconds)
    assert found == pytest.approx(expected)
    assert len(ran) == 1 + calls


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
