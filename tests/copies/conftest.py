"""A project with copies of layers, and releases of tinyblock."""

import re
import shutil
from pathlib import Path

import pytest

from tinyblock import copies

PACKAGE = copies.ROOT


class Project:
    """A folder of copies in an empty directory, and the release of the command."""

    folder = Path("läyers of mine")
    rope = folder / "rope.py"

    def __init__(self, monkeypatch, capsys):
        self.monkeypatch = monkeypatch
        self.capsys = capsys

    def release(self, version, **lines):
        """Install a release. Its files end with these lines."""
        root = Path(f"{version}, {len(lines)} lines")
        shutil.copytree(PACKAGE, root, ignore=shutil.ignore_patterns("__pycache__"))
        self.monkeypatch.setattr(copies, "ROOT", root)
        self.monkeypatch.setattr(copies, "VERSION", version)
        for name, line in lines.items():
            append(root / f"{name}.py", line)

    def run(self, command, *arguments, code=0):
        """Run a command on the folder, and return what it prints for each file."""
        folder = f"--to={self.folder}" if command == "add" else str(self.folder)
        found = copies.main([command, folder, *arguments])
        self.printed = "".join(self.capsys.readouterr())
        assert found == code, self.printed
        return dict(re.findall(r"^(\S+\.py) +(.*)", self.printed, re.MULTILINE))

    def edit(self, name, old, new):
        """Replace a text that a copy has, and keep all else, line ends included."""
        text = self.exactly(name)
        assert old in text
        self.write(name, text.replace(old, new, 1))

    def append(self, name, line):
        """Let a copy end with a line."""
        append(self.folder / name, line)

    def exactly(self, name):
        """Return a copy with its own line ends."""
        return (self.folder / name).read_bytes().decode()

    def write(self, name, text):
        (self.folder / name).write_bytes(text.encode())

    def base(self, name):
        return self.folder / ".tinyblock" / f"{name}.base"


def append(path, line):
    with path.open("a", encoding="utf-8", newline="") as file:
        file.write(f"{line}\n")


@pytest.fixture
def empty(tmp_path, monkeypatch, capsys):
    """Release 0.1.0, and no copies."""
    monkeypatch.chdir(tmp_path)
    project = Project(monkeypatch, capsys)
    project.release("0.1.0")
    return project


@pytest.fixture
def project(empty):
    """Release 0.1.0, and its block and rope with what they import."""
    empty.run("add", "rope", "block")
    return empty
