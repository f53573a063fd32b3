"""The scripts run on a GPU at tiny sizes. Other tests read what they print."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.cuda
SCRIPTS = Path(__file__).parents[2] / "scripts"
TINY = ["--seq-len", "16", "--d-model", "64", "--num-heads", "4", "--rounds", "2"]


def run(script, device, *options):
    """Run a script, and return what it prints."""
    call = [sys.executable, SCRIPTS / script, "--device", device, *options]
    done = subprocess.run(call, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_profiler_runs(device):
    assert torch.cuda.get_device_name() in run("profile_block.py", device, *TINY)


def test_profiler_runs_a_compiled_step(device):
    options = [*TINY, "--mode", "step", "--compile"]
    assert torch.cuda.get_device_name() in run("profile_block.py", device, *options)


def test_comparison_runs(device):
    options = ["--cases", "*-f32-tiny-token-eager", "--rounds", "2"]
    assert torch.cuda.get_device_name() in run("compare.py", device, *options)
