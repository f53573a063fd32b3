"""Where and when a measurement was taken."""

import datetime
import os
import platform
import re
import subprocess
from pathlib import Path

import torch


def environment(device: torch.device) -> str:
    """Return, in one line, what a reader must know to repeat a measurement."""
    return (
        f"{device_name(device)}; torch {torch.__version__}, "
        f"python {platform.python_version()}, tinyblock {commit_of(Path(__file__).parent)}; "
        f"{datetime.date.today().isoformat()}"
    )


def device_name(device: torch.device) -> str:
    """Return the GPU's name, or the processor's with its threads and instructions."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    model = None
    if cpuinfo.exists():
        model = re.search(r"model name\s*: (.*)", cpuinfo.read_text())
    name = model[1] if model else platform.processor() or platform.machine()
    threads = f"{torch.get_num_threads()} of {os.cpu_count()} threads"
    return f"{name}, {threads}, {torch.backends.cpu.get_cpu_capability()}"


def commit_of(folder: Path) -> str:
    """Return the commit of a checkout; "unknown" without git or a repository."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
