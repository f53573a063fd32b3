"""A tinyblock of stand-ins, in several releases, and a project that copies from them."""

import os
import re
from pathlib import Path
from typing import NamedTuple

from tinyblock.vendoring.catalogue import LAYER_NAMES, NAMES, Upstream
from tinyblock.vendoring.cli import main

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tinyblock"
LOCK, LICENCE = "tinyblock.lock", "LICENSE.tinyblock"
IMPORTS = {"block": ("attention", "ffn", "rmsnorm"), "transformer": ("block", "ffn", "rmsnorm", "rope")}
PROMISES = {"attention": ("rope",), "block": ("attention", "rmsnorm"), "transformer": ("block",)}
FIRST, MIDDLE, LAST = "first = 1", "middle = 1", "last = 1"  # lines of each layer, too far apart to clash
FIRST_OF_NEW = "first = 2  # since 0.2.0"


def _layer(name):
    lines = [f'"""The {name}, in short.\n\nConvention: {name} stays\nas it is. The rest is longer.\nSource: none.\n"""']
    lines += ["import math", "import einops.layers", "from torch import nn"]
    lines += [f"from .{sibling} import middle as {sibling}" for sibling in IMPORTS.get(name, ())]
    gap = "\n" * 9
    lines += [f'__all__ = ["{name.title()}"]', FIRST, gap, MIDDLE, gap, LAST]
    return "\n".join(lines) + "\n"


def _promises(name):
    imports = [f"from .{needed} import formula\n" for needed in PROMISES.get(name, ())]
    return "".join(["from .harness import run\n", *imports])


FILES = {
    "LICENSE": "Anybody may.\n",
    "typecheck.py": "import beartype  # é, and no newline at the end",
    "contract/__init__.py": "",
    "contract/harness.py": f"import torch\n{FIRST}\n",
    "contract/loading.py": "import ast\n",
    "contract/test_contract.py": "from . import loading\nfrom .harness import run\n",
    "contract/verify.py": "from . import harness, loading\n",
    **{f"{name}.py": _layer(name) for name in NAMES},
    **{f"contract/{name}.py": _promises(name) for name in LAYER_NAMES},
}


def release(folder, version, changed=None, left_out=""):
    """Write a release of the stand-ins, with some files changed."""
    for name, text in {**FILES, **(changed or {})}.items():
        if name != left_out:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(text.encode())
    return Upstream(folder, version)


def edit(path, old, new):
    """Replace what is there once."""
    text = path.read_bytes().decode()
    assert text.count(old) == 1
    path.write_bytes(text.replace(old, new).encode())


def snapshot(folder):
    """Everything below a folder: names, kinds, contents, where links lead."""
    return {
        path.relative_to(folder).as_posix(): os.readlink(path)
        if path.is_symlink()
        else path.is_dir() or path.read_bytes()
        for path in sorted(folder.rglob("*"))
    }


class Done(NamedTuple):
    """How a command ended; of what it wrote to stderr the lines that are its own, as torch may add warnings."""

    code: int
    out: str
    err: str


class Project:
    """A folder of copies in a project that is not tinyblock."""

    def __init__(self, root, upstream, capsys):
        self.root, self.upstream, self._capsys = root / "host", upstream, capsys
        self.folder = self.root / "läyers of mine"
        self.root.mkdir()

    def run(self, *argv, upstream=None):
        code = main([str(argument) for argument in argv], upstream or self.upstream)
        out, err = self._capsys.readouterr()
        return Done(code, out, "".join(line for line in err.splitlines(True) if line.startswith("tinyblock:")))

    def add(self, *argv, upstream=None):
        done = self.run("add", *argv, "--to", self.folder, upstream=upstream)
        assert done.code == 0, done.err
        return done

    def states(self, upstream=None):
        """Return what `check` says of each copy."""
        out = self.run("check", self.folder, upstream=upstream).out
        return dict(re.split("  +", line)[:2] for line in out.splitlines())

    def assert_refused(self, expected, *argv, upstream=None):
        """Assert that a command refuses in one line, and changes nothing."""
        before = snapshot(self.root)
        code, out, err = self.run(*argv, upstream=upstream)
        assert (code, out, err.count("\n")) == (2, "", 1), (argv, err)
        assert re.match(f"tinyblock: error: .*(?:{expected})", err), err
        assert snapshot(self.root) == before

    def commands(self):
        """Return each command that reads the folder."""
        names = ("check", "diff", "update")
        return [("add", "ffn", "--to", self.folder), *((name, self.folder) for name in names)]

    def path(self, name):
        return self.folder / name

    def names(self):
        files = (path for path in self.folder.rglob("*") if path.is_file())
        return {path.relative_to(self.folder).as_posix() for path in files} - {LOCK, LICENCE}
