"""Run pytest in a copy of this process, which has imported torch: that takes seconds."""

import gc
import os
import subprocess
import sys
import tempfile
import warnings
from unittest import mock

import pytest

# Otherwise each copy of this process would import them, in a second: torch.testing
# compares DTensors, and torch.autograd.grad takes sizes that are symbols.
import torch.distributed.tensor
import torch.fx.experimental.symbolic_shapes  # noqa: F401

from tinyblock import copies


def verify(*arguments):
    """Return the exit code of `tinyblock verify`, and what its pytest prints."""
    printed = []

    def run(command, check):
        assert command[:3] == [sys.executable, "-m", "pytest"]
        code, text = run_pytest(*command[3:])
        printed.append(text)
        return subprocess.CompletedProcess(command, code)

    with mock.patch.object(subprocess, "run", run):
        code = copies.main(["verify", *map(str, arguments)])
    return code, "".join(printed)


def run_pytest(*arguments, folder=".", without=()):
    """Return the exit code of pytest in a folder, and what it prints.

    The packages in `without` cannot be imported.
    """
    with tempfile.TemporaryFile("w+") as output:
        with warnings.catch_warnings():
            # Python 3.12 warns, because a process of pytest-xdist has two threads.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            _become_pytest(arguments, folder, without, output)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output.seek(0)
        return code, output.read()


def _become_pytest(arguments, folder, without, output):
    code: int = pytest.ExitCode.INTERNAL_ERROR
    try:
        sys.stdout = sys.stderr = output
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        os.chdir(folder)
        gc.freeze()  # pytest collects garbage at its end
        warnings.resetwarnings()
        # The layers are imported anew, and a project may have modules of these names.
        for name in list(sys.modules):
            if name.partition(".")[0] in ("tinyblock", "tests", "typecheck"):
                del sys.modules[name]
        for name in without:
            sys.modules[name] = None  # type: ignore[assignment]  # as Python documents it
        code = pytest.main(list(arguments))
        output.flush()
    finally:
        os._exit(code)  # without what pytest and coverage do at the end of this process
