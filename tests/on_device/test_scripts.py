"""The scripts run on a GPU at tiny sizes. Other tests read what they print."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from on_device.comparing import only_on_cuda

SCRIPTS = Path(__file__).parents[2] / "scripts"
PROFILE = "profile_block.py --seq-len 16 --d-model 64 --num-heads 4 --rounds 2"
COMMANDS = [
    PROFILE,
    f"{PROFILE} --mode step --compile",
    "compare_peers.py --cases *-bf16-tiny-token-eager --peers control --rounds 2",
    "exactness.py",
]


@only_on_cuda
@pytest.mark.parametrize("command", COMMANDS)
def test_script_runs(command, device):
    script, *options = command.split()
    call = [sys.executable, str(SCRIPTS / script), "--device", device, *options]
    done = subprocess.run(call, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert torch.cuda.get_device_name() in done.stdout
