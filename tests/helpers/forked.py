"""Run pytest or a program in a process of its own, in which torch is imported already."""

import os
import runpy
import sys
import tempfile

import processes
import pytest

from tinyblock import copies


def verify(*arguments, folder="."):
    """Return the exit code of `tinyblock verify`, and what it prints."""
    return _run(_become_command, ["verify", *map(str, arguments)], folder)


def run_pytest(*arguments, folder=".", without=()):
    """Return the exit code of pytest in a folder, and what it prints.

    The packages in `without` cannot be imported.
    """
    return _run(_become_pytest, arguments, folder, without)


def run_program(path, *arguments, folder="."):
    """Return the exit code of a Python program in a folder, and what it prints.

    It can import from the folder, and has not imported tinyblock and jaxtyping.
    """
    command = [str(path), *map(str, arguments)]
    return _run(_become_program, command, folder)


def _run(function, arguments, folder, *more):
    with tempfile.NamedTemporaryFile("r") as output:
        process = processes.start(
            function, arguments, os.path.abspath(folder), *more, output=output.name
        )
        process.join()
        return process.exitcode, output.read()


def _become_command(arguments, folder):
    os.chdir(folder)
    sys.exit(copies.main(arguments))


def _become_program(command, folder):
    os.chdir(folder)
    _forget("tinyblock", "jaxtyping")
    sys.argv = command
    sys.path.insert(0, folder)
    runpy.run_path(command[0], run_name="__main__")


def _forget(*packages):
    for name in list(sys.modules):
        if name.partition(".")[0] in packages:
            del sys.modules[name]


def _become_pytest(arguments, folder, without):
    os.chdir(folder)
    # A project may have modules of tinyblock's name, and pytest warns where jaxtyping, one
    # of its plugins, is imported already.
    _forget("tinyblock", "jaxtyping", *without)
    for name in without:
        sys.modules[name] = None  # type: ignore[assignment]  # as Python documents it
    sys.exit(pytest.main(list(arguments)))
