"""Record where a measurement was taken: everything that a reader needs in order to repeat it."""

import datetime
import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import torch

import tinyblock

from .processes import launched


def environment(device: torch.device, seed: int) -> dict[str, object]:
    """Return machine, device, driver, versions, threads, commit, seed, command and date, ready for JSON."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": _command(),
        "commit": _commit(),
        "seed": seed,
        "tinyblock": tinyblock.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "os": platform.platform(),
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "device": device_name(device),
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "driver": _driver() if device.type == "cuda" else None,
        "cudnn": torch.backends.cudnn.version() if device.type == "cuda" else None,
        "norm_kernels": _norm_kernels() if device.type == "cuda" else None,
    }


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of the packages that are installed."""
    found = {}
    for package in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def device_name(device: torch.device) -> str:
    """Return the name of the GPU as its driver gives it, or that of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return _cpu_name()


def _command() -> str:
    """Return the command that started this program."""
    started_by = ["python"]
    if launched() > 1:
        started_by = ["torchrun", "--nproc-per-node", os.environ["LOCAL_WORLD_SIZE"]]
    return shlex.join([*started_by, *sys.argv])


def _commit() -> str | None:
    """Return the commit of the checkout, with "+changes" if its files differ; None outside of a checkout."""
    folder = str(Path(__file__).resolve().parent)
    describe = ["describe", "--always", "--exclude=*", "--abbrev=12"]
    return _output("git", "-C", folder, *describe, "--dirty=+changes")


def _driver() -> str | None:
    """Return the version of the GPU's driver."""
    query = ["--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    return _output("nvidia-smi", *query)


def _norm_kernels() -> str | None:
    """Return the versions of two packages; with both, torch 2.13 and later replace their own RMSNorm on Hopper."""
    found = versions("nvidia-cutlass-dsl", "apache-tvm-ffi")
    if len(found) < 2:
        return None
    return ", ".join(f"{package} {version}" for package, version in found.items())


def _cpu_name() -> str:
    """Return the processor's model, and the widest matrix instructions that torch uses on it."""
    instructions = torch.backends.cpu.get_cpu_capability()
    return f"{_cpu_model()}, {os.cpu_count()} cores, {instructions}"


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        found = re.search(r"^model name\s*: (.*)", cpuinfo.read_text(), re.MULTILINE)
        if found:
            return found[1]
    return platform.processor() or platform.machine()


def _output(*command: str) -> str | None:
    """Return what a command prints; None if it does not exist or fails."""
    try:
        finished = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return finished.stdout.strip()
