"""Small releases of a package with layers, and a project that copies from them."""

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from tinyblock.copies import Release, main

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tinyblock"
LOCK, LICENSE = "tinyblock.lock", "LICENSE.tinyblock"
LAYERS = ("norm", "mlp", "rope", "block")

# Two lines of each file, too far apart to conflict.
FIRST, LAST = "first = 1", "last = 1"
FIRST_OF_NEW = "first = 2  # since 0.2.0"
SOURCE = f'''"""{{layer}}: a part of a network."""

{{imports}}
{FIRST}


class {{layer}}:
    pass


{LAST}
'''


def make_release(folder, version, repository=""):
    """Write a release: four layers, and their tests. One layer imports two others."""
    imports = {
        "norm": "import math\nimport torch\nfrom einops import rearrange\n",
        "mlp": "import torch.nn\n",
        "rope": "import torch\n",
        "block": "from .mlp import Mlp\nfrom .norm import Norm\n",
        "parallelize": "",
        "typecheck": "",
        "contract/__init__": "",
        "contract/checks": "import torch\n",
        "contract/conftest": "import pytest\n\nfrom .checks import check\n",
        "contract/test_norm": "from . import checks\n",
        "contract/test_mlp": "from . import checks\n",
        "contract/test_rope": "from . import checks\n",
        "contract/test_block": "from .checks import check\n",
    }
    (folder / "contract").mkdir(parents=True)
    for name, lines in imports.items():
        layer = name.rpartition("/")[2].capitalize()
        source = SOURCE.format(layer=layer, imports=lines)
        (folder / f"{name}.py").write_text(source, encoding="utf-8")
    (folder / "LICENSE").write_text("MIT\n\nCopyright (c) 2026 Someone\n\nText\n")
    return Release(folder, version, LAYERS, repository)


def edit(path, old, new):
    """Replace what occurs once."""
    text = path.read_bytes().decode()
    assert text.count(old) == 1
    path.write_bytes(text.replace(old, new).encode())


def snapshot(folder):
    """Return the content of all files below a folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
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
    """A project with a folder of copies, whose path has a space and an umlaut."""

    def __init__(self, root, release, capfd):
        self.root = root / "project"
        self.folder = self.root / "läyers of mine"
        self.release = release
        self._capfd = capfd
        self.root.mkdir()

    def run(self, *argv, release=None):
        code = main([str(argument) for argument in argv], release or self.release)
        return Done(code, *self._capfd.readouterr())

    def add(self, *argv, release=None):
        done = self.run("add", *argv, "--to", self.folder, release=release)
        assert done.code == 0, done.err
        return done

    def assert_rejected(self, expected, *argv):
        """Assert that a command fails with one line, and changes nothing."""
        before = snapshot(self.root)
        done = self.run(*argv)
        assert (done.code, done.out) == (2, ""), done
        assert done.err.count("\n") == 1, done
        assert re.match(f"tinyblock: error: .*(?:{expected})", done.err), done
        assert snapshot(self.root) == before

    def path(self, name):
        return self.folder / name

    def original(self, name):
        return self.release.original(name).text

    def names(self):
        return set(snapshot(self.folder)) - {LOCK, LICENSE}

    def start(self, *argv, before_replace="pass"):
        """Start a command in a process of its own, without torch, and return the process.

        `before_replace` is run before each file is replaced; `count` numbers these.
        """
        code = PROCESS.format(before_replace=before_replace)
        command = [sys.executable, "-c", code, str(PACKAGE)]
        command += [str(self.release.root), self.release.version]
        command += [str(argument) for argument in argv]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL)


PROCESS = """
import itertools, os, pathlib, signal, sys, time, types
package = types.ModuleType("tinyblock")
package.__path__, package.LAYERS, package.__version__ = [sys.argv[1]], (), "0"
sys.modules["tinyblock"] = package
from tinyblock import copies

numbers, replace = itertools.count(1), os.replace
def counted(old, new):
    count = next(numbers)
    {before_replace}
    replace(old, new)
os.replace = counted
layers = ("norm", "mlp", "rope", "block")
release = copies.Release(pathlib.Path(sys.argv[2]), sys.argv[3], layers)
sys.exit(copies.main(sys.argv[4:], release))
"""
