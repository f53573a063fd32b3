"""Run pytest in a process of its own, in which torch is imported already."""

import os
import subprocess
import sys
import tempfile
from unittest import mock

import processes
import pytest

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
    folder = os.path.abspath(folder)
    with tempfile.NamedTemporaryFile("r") as output:
        process = processes.start(
            _become_pytest, arguments, folder, without, output=output.name
        )
        process.join()
        return process.exitcode, output.read()


def _become_pytest(arguments, folder, without):
    os.chdir(folder)
    # A project may have modules of tinyblock's name, and pytest warns where jaxtyping, one
    # of its plugins, is imported already.
    for name in list(sys.modules):
        if name.partition(".")[0] in ("tinyblock", "jaxtyping", *without):
            del sys.modules[name]
    for name in without:
        sys.modules[name] = None  # type: ignore[assignment]  # as Python documents it
    sys.exit(pytest.main(list(arguments)))
