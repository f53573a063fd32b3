"""Where a measurement was taken: everything that a reader needs in order to repeat it."""

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
    started_by = ["python"] if launched() == 1 else ["torchrun", "--nproc-per-node", os.environ["LOCAL_WORLD_SIZE"]]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join([*started_by, *sys.argv]),
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
        "driver": _driver_version() if device.type == "cuda" else None,
        "cudnn": torch.backends.cudnn.version() if device.type == "cuda" else None,
        "norm_kernels": _norm_kernels() if device.type == "cuda" else None,
    }


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    found = {}
    for package in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def device_name(device: torch.device) -> str:
    """Return the name of the GPU as its driver gives it, or that of the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()


def _cpu_name() -> str:
    """Return the processor's model, and the widest matrix instructions that torch uses on it."""
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.*)", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else None
    model = found[1] if found else platform.processor() or platform.machine()
    return f"{model}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}"


def _commit() -> str | None:
    """Return the commit of the checkout, with "+changes" where its files differ; None outside a checkout."""
    describe = ["describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=+changes"]
    return _output(["git", "-C", str(Path(__file__).resolve().parent), *describe])


def _driver_version() -> str | None:
    versions = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return versions and versions.splitlines()[0].strip()  # one line for each GPU


def _norm_kernels() -> str | None:
    """Return the packages with which torch 2.13 and later replace their own RMSNorm on Hopper, if both are there."""
    found = versions("nvidia-cutlass-dsl", "apache-tvm-ffi")
    return ", ".join(map(" ".join, found.items())) if len(found) == 2 else None


def _output(command: list[str]) -> str | None:
    """Return what a command prints; None where it is not to be had, or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
