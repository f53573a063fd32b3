"""What only a GPU has: its own clock, its kernels, and its memory."""

import pytest
import torch
from lab.timing import clock_of
from profiling.measure import measure
from profiling.runs import Settings, record_run
from torch import nn

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="requires a GPU"),
]
GPU = torch.device("cuda")


def test_events_tell_the_time_between_them():
    clock = clock_of(GPU)
    begin = clock.begin()
    a = torch.ones(256, 256, device=GPU)
    for _ in range(10):
        a = a @ a
    end = clock.end()
    before = clock.now()
    assert clock.seconds(begin, end) > 0
    assert clock.seconds(begin, end) < 60
    assert clock.now() >= before


def test_each_launch_of_a_recorded_run_is_a_kernel():
    x = torch.ones(64, 64, device=GPU)

    def run():
        for _ in range(10):
            torch.sin(x)

    recording = record_run(run, clock_of(GPU))
    # A session may lose its first kernels.
    assert 0 < sum(kernel.launches for kernel in recording.kernels) <= 10
    assert recording.busy_s > 0


def test_profile_has_the_parts_kernels_and_memory_of_a_training_step():
    def rates(device, dtypes, clock):
        small = {
            "memory copy": lambda: 1e-9,
            "an operation on one number": lambda: 1e-6,
        }
        return {f"matmul {str(each)[6:]}": (lambda: 1e-12) for each in dtypes} | small

    def build(device, dtype):
        return nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU()).to(device, dtype)

    settings = Settings(GPU, torch.float32, "step", rounds=2)
    clock = clock_of(GPU)
    profile = measure(build, (2, 3, 8), "a model", settings, clock, rates)
    rows = {row.name: row for row in profile.rows}
    assert list(rows) == ["0", "1", "AdamW", "rest", "GPU idle"]
    assert rows["0"].flops == {"float32": 3 * 2 * 6 * 8 * 8}
    assert rows["0"].overhead_s is rows["0"].between_s is None
    idle = profile.whole.total_s - profile.recording.busy_s
    assert rows["GPU idle"].total_s == pytest.approx(idle)
    # Weights, two states, and x; gradients come at the peak.
    held = 3 * 8 * 8 * 4 + 2 * 3 * 8 * 4
    assert profile.memory.peak_bytes > held + 8 * 8 * 4
