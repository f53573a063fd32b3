"""What only a GPU has: its own clock, its kernels, and its memory."""

import pytest
import torch
from lab.timing import GpuClock
from profiling.runs import record_run
from torch import nn

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="requires a GPU"),
]


def test_events_tell_the_time_between_them():
    clock = GpuClock()
    before, begin = clock.now(), clock.begin()
    a = torch.ones(256, 256, device="cuda")
    for _ in range(10):
        a = a @ a
    end, after = clock.end(), clock.now()
    assert 0 < clock.seconds(begin, end) < 60
    assert after >= before


def test_each_launch_of_a_recorded_run_is_a_kernel():
    x = torch.ones(64, 64, device="cuda")
    recording = record_run(lambda: [torch.sin(x) for _ in range(10)], GpuClock())
    # A session may lose its first kernels.
    assert 0 < sum(kernel.launches for kernel in recording.kernels) <= 10
    assert recording.busy_s > 0


def test_profile_has_the_parts_kernels_and_memory_of_a_training_step(profile_of):
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU()).to("cuda")
    profile = profile_of(model, "step", by=GpuClock(), device="cuda")
    rows = {row.name: row for row in profile.rows}
    assert list(rows) == ["0", "1", "AdamW", "rest", "GPU idle"]
    assert rows["0"].flops == {"float32": 3 * 2 * 10 * 4 * 4}
    assert rows["0"].overhead_s is rows["0"].between_s is None
    idle = profile.whole.total_s - profile.recording.busy_s
    assert rows["GPU idle"].total_s == pytest.approx(idle)
    # Weights, two states, and x; gradients come at the peak.
    assert profile.memory.peak_bytes > 4 * 64 + 160
