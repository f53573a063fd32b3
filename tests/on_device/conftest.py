"""Options and fixtures of the tests that need a GPU; with --device cpu --quick the same code runs without one."""

import json
import os
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from lab.environment import versions

os.environ.setdefault(
    "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
)  # before cuBLAS starts: else it cannot be deterministic
SCRIPTS = Path(__file__).parents[2] / "scripts"
START = time.monotonic()


def pytest_addoption(parser):
    add = parser.getgroup("tests on a device").addoption
    add(
        "--device",
        choices=("cuda", "cpu"),
        help="(default: CUDA, and the tests are skipped without a GPU)",
    )
    add(
        "--quick",
        action="store_true",
        help="tiny sizes, which show that everything runs; no figure is judged",
    )
    add(
        "--out",
        type=Path,
        help="folder for reports, pictures and traces (default: a temporary folder)",
    )
    add(
        "--seconds",
        type=float,
        help="skip the tests that are left after this time (default: no limit)",
    )


def pytest_configure(config):
    if config.getoption("device", None) == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError(
            f"--device cuda requires a GPU, but torch {torch.__version__} finds none; use --device cpu --quick"
        )


def pytest_report_header():
    found = [torch.cuda.get_device_name()] if torch.cuda.is_available() else ["no GPU"]
    found += [
        f"torch {torch.__version__}",
        f"CUDA {torch.version.cuda}",
        f"cuDNN {torch.backends.cudnn.version()}",
    ]
    packages = ("beartype", "transformers", "liger-kernel", "litgpt", "matplotlib")
    installed = versions(*packages)
    found += [
        f"{name} {installed[name]}" if name in installed else f"no {name}"
        for name in packages
    ]
    return ", ".join(found)


def seconds_left(config):
    limit = config.getoption("seconds", None)
    return None if limit is None else limit - (time.monotonic() - START)


def pytest_runtest_setup(item):
    left = seconds_left(item.config)
    if left is not None and left <= 0:
        pytest.skip("missing: no time was left")


@pytest.fixture(scope="session")
def device(pytestconfig):
    name = pytestconfig.getoption("device", None) or "cuda"
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("requires a GPU; --device cpu runs the same code without one")
    return torch.device(name)


@pytest.fixture(scope="session")
def quick(pytestconfig):
    return pytestconfig.getoption("quick", False)


# `uneven` is a sequence length, 64 more than a multiple of 128.
Sizes = namedtuple("Sizes", "d_model heads kv_heads seq longest uneven")


@pytest.fixture(scope="session")
def sizes(quick):
    return Sizes(64, 4, 2, 16, 32, 64) if quick else Sizes(512, 8, 2, 256, 4096, 704)


@pytest.fixture(scope="session")
def out(pytestconfig, tmp_path_factory):
    folder = pytestconfig.getoption("out", None) or tmp_path_factory.mktemp("out")
    folder.mkdir(parents=True, exist_ok=True)
    return folder.resolve()


@pytest.fixture(scope="session")
def run(pytestconfig, device, out):
    """Return a function that runs a script as a user does, and writes OUT/NAME.json and, what it prints, OUT/NAME.txt.

    It returns the JSON, or None without one, and the errors that were printed, or None after the time limit.
    """

    def run(script, name, *options):
        path = out / f"{name}.json"
        left = seconds_left(pytestconfig)
        path.unlink(missing_ok=True)
        if (
            left is not None and script == "compare_peers.py"
        ):  # which ends in time, with all that it has measured
            options += ("--seconds", str(max(0, left - 10)))
        command = [
            sys.executable,
            str(SCRIPTS / script),
            "--device",
            device.type,
            *options,
            "--json",
            str(path),
        ]
        with (out / f"{name}.txt").open("w") as report:
            try:
                done = subprocess.run(
                    command,
                    stdout=report,
                    stderr=subprocess.PIPE,
                    text=True,
                    timeout=left,
                    cwd=out,
                )
                errors = done.stderr
            except subprocess.TimeoutExpired:  # the file has what was finished
                errors = None
        return json.loads(path.read_text()) if path.exists() else None, errors

    return run
