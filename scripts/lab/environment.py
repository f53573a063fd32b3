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
from dataclasses import dataclass
from pathlib import Path

import torch

import tinyblock

from .processes import launched


@dataclass(frozen=True)
class Environment:
    """Where, when and with which versions something was measured.

    date: when the measurement started, in UTC.
    command: the command line.
    commit: that of the checkout, followed by "+changes" if files differ from it; null outside of a checkout.
    seed: seed of weights and inputs.
    tinyblock: version.
    torch: version.
    python: version.
    os: name and version of the operating system.
    cpu: model, number of cores, and the widest instructions that torch uses.
    threads: number of threads that torch uses on the CPU.
    device: name of the GPU or of the CPU that was measured.
    cuda: version of CUDA; null on a CPU, like the next three.
    driver: version of the GPU's driver.
    cudnn: version of cuDNN.
    norm_kernels: versions of nvidia-cutlass-dsl and apache-tvm-ffi if both are installed: with them, torch 2.13 and
        later replace their own RMSNorm on Hopper.
    float32_matmul_precision: torch's setting; unless it is highest, float32 has no peak in the datasheet.
    """

    date: str
    command: str
    commit: str | None
    seed: int
    tinyblock: str
    torch: str
    python: str
    os: str
    cpu: str
    threads: int
    device: str
    cuda: str | None
    driver: str | None
    cudnn: int | None
    norm_kernels: str | None
    float32_matmul_precision: str


def environment(device: torch.device, seed: int) -> Environment:
    """Return the environment of this process."""
    on_gpu = device.type == "cuda"
    return Environment(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=_command(),
        commit=_commit(),
        seed=seed,
        tinyblock=tinyblock.__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        os=platform.platform(),
        cpu=_cpu_name(),
        threads=torch.get_num_threads(),
        device=device_name(device),
        cuda=torch.version.cuda if on_gpu else None,
        driver=_driver() if on_gpu else None,
        cudnn=torch.backends.cudnn.version() if on_gpu else None,
        norm_kernels=_norm_kernels() if on_gpu else None,
        float32_matmul_precision=torch.get_float32_matmul_precision(),
    )


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
