"""A project with copies of layers, and releases of tinyblock."""

import contextlib
import functools
import io
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "tinyblock"


@dataclass
class Project:
    """A folder in which commands run, and the copies in a package of this folder."""

    root: Path
    name = "my_package/cöpies"
    tinyblock: Path = field(init=False)  # the release that runs

    @property
    def folder(self):
        return self.root / self.name

    def release(self, version, **lines):
        """Let the commands be of this release, whose files end with these lines."""
        self.tinyblock = Path(tempfile.mkdtemp(dir=self.root.parent), "tinyblock")
        unneeded = shutil.ignore_patterns("__pycache__")
        shutil.copytree(PACKAGE, self.tinyblock, ignore=unneeded)
        self.change(
            "__init__.py", '__version__ = "0.1.0"', f'__version__ = "{version}"'
        )
        for name, line in lines.items():
            with (self.tinyblock / f"{name}.py").open("ab") as file:
                file.write(f"{line}\n".encode())

    def change(self, name, old, new):
        """Replace a text in a file of the release."""
        replace(self.tinyblock / name, old, new)

    def edit(self, name, old, new):
        """Replace a text in a copy, and keep all else, line ends included."""
        replace(self.folder / name, old, new)

    def write(self, name, text):
        """Let a copy have this text, or be missing."""
        path = self.folder / name
        if text is None:
            path.unlink()
        else:
            path.write_bytes(text)

    def append(self, name, line):
        """Let a copy end with a line."""
        with (self.folder / name).open("ab") as file:
            file.write(f"{line}\n".encode())

    def run(self, command, *arguments, code=0):
        """Run a command on the copies, and return what it prints."""
        folder = f"--to={self.name}" if command == "add" else self.name
        main = main_of(self.tinyblock / "copies.py")
        printed = io.StringIO()
        with (
            contextlib.chdir(self.root),
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(printed),
        ):
            found = main([command, folder, *arguments])
        assert found == code, f"{command} {' '.join(arguments)}: {printed.getvalue()}"
        return printed.getvalue()

    def start(self, command, *arguments, **options):
        """Run a command in a process of its own, with Python alone."""
        return subprocess.run(
            [sys.executable, "-I", "-S", self.tinyblock, command, *arguments],
            cwd=self.root,
            capture_output=True,
            text=True,
            check=False,
            **options,
        )

    def rows(self, command, *arguments, code=0):
        """Run a command on the copies, and return its row for each file."""
        printed = self.run(command, *arguments, code=code)
        return dict(re.findall(r"^(\S+\.py) +(.*)", printed, re.MULTILINE))

    def contents(self):
        """Return the bytes of each file in the folder of copies."""
        return {
            path.relative_to(self.folder).as_posix(): path.read_bytes()
            for path in self.folder.rglob("*")
            if path.is_file()
        }

    def base(self, name):
        return self.folder / ".tinyblock" / f"{name}.base"

    def written(self, name):
        """Return what the release writes as a copy, as docs/copy.md describes it."""
        header = f"""\
# Copied from tinyblock: {name}
# Copyright (c) 2026 The tinyblock authors, MIT license: see LICENSE.tinyblock
# ruff: noqa: PGH004
# flake8: noqa
# fmt: off
"""
        return header.encode() + (self.tinyblock / name).read_bytes()


@functools.cache
def main_of(path):
    """Return the command of a release. To compile it takes longer than to run it."""
    return runpy.run_path(str(path))["main"]


def replace(path, old, new):
    text = path.read_bytes().decode()
    assert old in text, f"{path} must have {old!r}"
    path.write_bytes(text.replace(old, new, 1).encode())


@pytest.fixture
def empty():
    """Release 0.1.0, and no copies."""
    # In memory where Linux has a folder for this: a command waits for the disk after each file.
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        project = Project(Path(folder, "project"))
        project.root.mkdir()
        project.release("0.1.0")
        yield project


@pytest.fixture
def project(empty):
    """Release 0.1.0, and its block and rope with what they import."""
    empty.run("add", "rope", "block")
    return empty
