"""What only a GPU has: its own clock, its kernels, and its memory."""

import pytest
import torch
from lab.timing import GpuClock
from torch import nn

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="requires a GPU"),
]


def test_profile_has_the_parts_kernels_and_memory_of_a_training_step(profile_of):
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU()).to("cuda")
    profile = profile_of(model, "step", by=GpuClock(), device="cuda")
    rows = {row.name: row for row in profile.rows}
    assert list(rows) == ["0", "1", "AdamW", "rest", "GPU idle"]
    assert rows["0"].flops == {"float32": 3 * 2 * 10 * 4 * 4}
    assert rows["0"].overhead_s is rows["0"].between_s is None
    assert rows["0"].total_s > 0  # by events
    assert profile.recording.busy_s > 0
    idle = profile.whole.total_s - profile.recording.busy_s
    assert rows["GPU idle"].total_s == pytest.approx(idle)
    # Weights, two states, and x; gradients come at the peak.
    assert profile.memory.peak_bytes > 4 * 64 + 160
