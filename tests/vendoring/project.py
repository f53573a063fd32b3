"""Releases of tinyblock, and a project that copies from them."""

import re
from pathlib import Path
from typing import NamedTuple

from tinyblock.vendoring.catalogue import Upstream
from tinyblock.vendoring.cli import main

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tinyblock"
LOCK, LICENSE = "tinyblock.lock", "LICENSE.tinyblock"
FIRST, LAST = (
    "# first = 1",
    "# last = 1",
)  # lines of each file, too far apart to conflict
FIRST_OF_NEW = "# first = 2, since 0.2.0"


def release(folder, version):
    """Copy the package, with these lines in each file."""
    for path in (PACKAGE / "LICENSE", *PACKAGE.rglob("*.py")):
        copied, text = (
            folder / path.relative_to(PACKAGE),
            path.read_text(encoding="utf-8"),
        )
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.write_text(
            text.replace("\n\n", f"\n\n{FIRST}\n", 1) + f"{LAST}\n", encoding="utf-8"
        )
    return Upstream(folder, version)


def edit(path, old, new):
    """Replace what is there once."""
    text = path.read_bytes().decode()
    assert text.count(old) == 1
    path.write_bytes(text.replace(old, new).encode())


def snapshot(folder):
    """Return the content of all files below a folder, and None for each folder."""
    paths = {
        path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*"))
    }
    return {
        name: path.read_bytes() if path.is_file() else None
        for name, path in paths.items()
    }


class Done(NamedTuple):
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str

    @property
    def rows(self):
        """What was printed for each file."""
        return dict(
            re.split("  +", line, maxsplit=1)
            for line in self.out.splitlines()
            if "  " in line
        )


class Project:
    """A folder of copies in a project that is not tinyblock."""

    def __init__(self, root, upstream, capsys):
        self.root, self.upstream, self._capsys = root / "host", upstream, capsys
        self.folder = self.root / "läyers of mine"
        self.root.mkdir()

    def run(self, *argv, upstream=None):
        code = main([str(argument) for argument in argv], upstream or self.upstream)
        return Done(code, *self._capsys.readouterr())

    def add(self, *argv, upstream=None):
        done = self.run("add", *argv, "--to", self.folder, upstream=upstream)
        assert done.code == 0, done.err
        return done

    def assert_rejected(self, expected, *argv):
        """Assert that a command fails with one line, and changes nothing."""
        before = snapshot(self.root)
        code, out, err = self.run(*argv)
        assert (code, out, err.count("\n")) == (2, "", 1), (argv, err)
        assert re.match(f"tinyblock: error: .*(?:{expected})", err), err
        assert snapshot(self.root) == before

    def path(self, name):
        return self.folder / name

    def original(self, name):
        return self.upstream.find(name).text

    def names(self):
        return {
            name
            for name, content in snapshot(self.folder).items()
            if content is not None
        } - {LOCK, LICENSE}
