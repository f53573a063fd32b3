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
    started_by = (
        ["python"]
        if launched() == 1
        else ["torchrun", "--nproc-per-node", os.environ["LOCAL_WORLD_SIZE"]]
    )
    of_gpu: dict[str, object] = dict.fromkeys(
        ("cuda", "driver", "cudnn", "norm_kernels")
    )
    if device.type == "cuda":
        # With both packages, torch 2.13 and later replace their own RMSNorm on Hopper.
        norm_kernels = versions("nvidia-cutlass-dsl", "apache-tvm-ffi")
        of_gpu = {
            "cuda": torch.version.cuda,
            "driver": _output(
                "nvidia-smi",
                "--query-gpu=driver_version",
                "--format=csv,noheader",
                "--id=0",
            ),
            "cudnn": torch.backends.cudnn.version(),
            "norm_kernels": ", ".join(map(" ".join, norm_kernels.items()))
            if len(norm_kernels) == 2
            else None,
        }
    # The commit of the checkout, with "+changes" where its files differ; None outside a checkout.
    describe = (
        "describe",
        "--always",
        "--exclude=*",
        "--abbrev=12",
        "--dirty=+changes",
    )
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join([*started_by, *sys.argv]),
        "commit": _output("git", "-C", str(Path(__file__).resolve().parent), *describe),
        "seed": seed,
        "tinyblock": tinyblock.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "os": platform.platform(),
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "device": device_name(device),
        **of_gpu,
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
    found = (
        re.search(r"^model name\s*: (.*)", cpuinfo.read_text(), re.MULTILINE)
        if cpuinfo.exists()
        else None
    )
    model = found[1] if found else platform.processor() or platform.machine()
    return f"{model}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}"


def _output(*command: str) -> str | None:
    """Return what a command prints; None where it is not to be had, or fails."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=30
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
