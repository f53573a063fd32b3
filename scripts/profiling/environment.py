"""Where a measurement was taken: everything that a reader needs in order to repeat it."""

import datetime
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import torch

import tinyblock


def environment(device: torch.device, seed: int) -> dict[str, object]:
    """Return machine, device, driver, versions, threads, commit, seed, command and date, ready for JSON."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *sys.argv]),
        "commit": commit(),
        "seed": seed,
        "tinyblock": tinyblock.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "os": platform.platform(),
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "device": device_name(device),
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "driver": driver_version() if device.type == "cuda" else None,
    }


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def cpu_name() -> str:
    """Return the processor's model, and the widest matrix instructions that torch uses on it."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = lines[0].split(":", 1)[1].strip() if lines else model
    return f"{model}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}"


def commit() -> str | None:
    """Return the commit of the checkout, with "+changes" where its files differ; None outside a checkout."""
    git = ["git", "-C", str(Path(__file__).resolve().parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        status = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+changes" if status.stdout.strip() else "")


def driver_version() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.splitlines()[0].strip()
