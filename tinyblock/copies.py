"""Copy layers into a project, and keep the copies up to date: the command `tinyblock`.

    layers/rope.py                  the copy: a header, the layer, and the user's edits
    layers/.tinyblock/rope.py.base  the base: what tinyblock wrote as that copy

The copy minus its base is the user's edits. What this release writes minus the base is
what changed in tinyblock. `update` lets git merge the two. Users commit both files, and
there is no other state: repeat a command that was interrupted, and git merges again.
"""

import argparse
import difflib
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePath, PurePosixPath
from tempfile import TemporaryDirectory
from typing import NoReturn

from . import LAYERS, __version__

ROOT = Path(__file__).parent
NAMES = [layer.__name__.rpartition(".")[2] for layer in LAYERS]
NAMES += ["parallelize", "typecheck"]
LICENSE = "LICENSE.tinyblock"
HEADER = f"""\
# Copied from tinyblock {{version}}: {{name}}
# Copyright (c) 2026 The tinyblock authors, MIT license: see {LICENSE}
# flake8: noqa: E501, F722, F821, N812
# fmt: off
"""
VERSION = re.compile(r"^(# Copied from tinyblock )(\S+)(?=: )", re.MULTILINE)
MARKERS = re.compile(r"^(<{7}|>{7}) ", re.MULTILINE)
CONFLICT = "conflict markers: resolve them"


class CommandError(Exception):
    """A command failed. The message is one line."""


class Copy:
    """A file in a folder of copies, its base, and what this release writes as both.

    The text of a missing file is "".
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name  # such as rope.py or contract/test_rope.py
        self.path = folder / name
        self.base_path = base_path(folder, name)
        self.text = read(self.path)
        self.base = read(self.base_path)
        self.version = version_in(self.base)
        self.is_newer = numbers(self.version) > numbers(__version__)
        source = read(ROOT / name)
        self.new = ""
        if source and not self.is_newer:
            self.new = HEADER.format(version=__version__, name=name) + source
        if not self.base and self.text not in ("", source, self.new):
            raise CommandError(
                f"{self.path} is not a copy with a base: move it away, or restore "
                f"{self.base_path}"
            )
        version = version_in(self.text)  # users may delete headers
        # An interrupted update leaves a copy from this release with an older base.
        if version not in ("", self.version, __version__):
            raise CommandError(
                f"{self.path} is from tinyblock {version}, but its base is from "
                f"{self.version}: restore it together with {self.base_path}"
            )
        self.missing_imports = [  # a missing copy with a base is reported by itself
            imported
            for imported in sorted(imports_of(name, self.text))
            if not (folder / imported).exists()
            and not (folder / imported).with_suffix("").is_dir()
            and not base_path(folder, imported).exists()
        ]

    @property
    def is_outdated(self) -> bool:
        return self.new not in ("", renumber(self.base))

    @property
    def has_conflict(self) -> bool:
        return MARKERS.search(self.text) is not None

    @property
    def requires_work(self) -> bool:
        is_broken = not self.text or self.has_conflict or self.missing_imports
        return bool(is_broken or self.is_outdated)

    @property
    def state(self) -> str:
        """How the copy differs from its base, and the base from this release."""
        found = []
        if not self.text:
            found.append("missing")
        elif self.has_conflict:
            found.append(CONFLICT)
        elif self.text != self.base:
            found.append("edited")
        if self.missing_imports:
            found.append(f"imports missing files: {', '.join(self.missing_imports)}")
        if self.is_newer:
            found.append(f"from the newer tinyblock {self.version}")
        elif not self.new:
            found.append(f"not in tinyblock {__version__}")
        elif self.is_outdated and self.version != __version__:
            found.append(f"outdated: {self.version} -> {__version__}")
        elif self.is_outdated:
            found.append(f"outdated: tinyblock {__version__} has changed since")
        return ", ".join(found)

    def plan(self) -> tuple[str, str]:
        """Return what `update` does, and the text that it writes ("": none)."""
        if self.new and not (self.base and self.text):
            return "copied", self.new
        if not self.is_outdated or self.has_conflict:
            return self.state or "up to date", ""
        if self.text in (self.base, self.new):
            return "updated", self.new
        text = self.merge()
        return CONFLICT if MARKERS.search(text) else "merged with your edits", text

    def merge(self) -> str:
        """Return the user's edits, merged by git with the changes in tinyblock."""
        sides = {  # git marks conflicts with the names of the files
            "yours": renumber(self.text),
            f"tinyblock {self.version}, copied": renumber(self.base),
            f"tinyblock {__version__}": self.new,
        }
        command = ["git", "merge-file", "-p", "--diff3", *sides]
        with TemporaryDirectory() as folder:
            for name, text in sides.items():
                Path(folder, name).write_text(text, encoding="utf-8", newline="\n")
            done = subprocess.run(
                command, cwd=folder, capture_output=True, encoding="utf-8", check=False
            )
        if done.returncode > 127:  # up to 127 it is the number of conflicts
            raise CommandError(f"git cannot merge {self.path}: {done.stderr.strip()}")
        return done.stdout


def layer_name(path: str) -> str:
    """Return the layer of a file: "rope" for rope, rope.py and layers/test_rope.py."""
    return PurePath(path).name.removesuffix(".py").removeprefix("test_")


def base_path(folder: Path, name: str) -> Path:
    return folder / ".tinyblock" / f"{name}.base"


def version_in(text: str) -> str:
    """Return the version in a header, or "" if there is none."""
    found = VERSION.search(text)
    return found[2] if found else ""


def numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


def renumber(text: str) -> str:
    """Write this version into a header. A new number is neither an edit nor a change."""
    return VERSION.sub(rf"\g<1>{__version__}", text, count=1)


def imports_of(name: str, text: str) -> set[str]:
    """Return the files that lines such as `from .ffn import SwiGLU` read."""
    folder = PurePosixPath(name).parent
    modules = re.findall(r"^from \.(\w+) import", text, re.MULTILINE)
    return {(folder / f"{module}.py").as_posix() for module in modules}


def copies_in(folder: Path, layers: Sequence[str]) -> list[Copy]:
    """Return the copies that a folder has of these layers and their tests.

    Without layers, return all copies.
    """
    if folder.is_file():
        raise CommandError(f"DIR must be a folder, got the file {folder}")
    bases = folder / ".tinyblock"
    names = [
        base.relative_to(bases).with_suffix("").as_posix()
        for base in sorted(bases.rglob("*.base"))
    ]
    absent = sorted(set(layers) - set(map(layer_name, names)))
    if absent or not names:
        what = " ".join(absent) or "LAYER"
        raise CommandError(
            f"{folder} has no copy of {what}: run `tinyblock add {what} --to {folder}`"
        )
    return [
        Copy(folder, name) for name in names if not layers or layer_name(name) in layers
    ]


def bring_up_to_date(folder: Path, copies: Iterable[Copy]) -> int:
    """Write and update copies and what they import, and return the exit code."""
    waiting = list(copies)
    done = {}
    texts = {folder / LICENSE: read(ROOT / "LICENSE")}
    while waiting:
        copy = waiting.pop()
        done[copy.name], text = copy.plan()
        if text:
            texts[copy.path] = text  # before its base, so that git merges again
            texts[copy.base_path] = copy.new
        for name in imports_of(copy.name, text or copy.text):
            is_yours = (folder / name).exists() and not base_path(folder, name).exists()
            if name not in done and (ROOT / name).exists() and not is_yours:
                waiting.append(Copy(folder, name))
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")
    print_table(dict(sorted(done.items())))
    return int(any(outcome.startswith(CONFLICT) for outcome in done.values()))


# The commands. Each returns its exit code.


def list_(arguments: argparse.Namespace) -> int:
    """List the files that can be copied."""
    titles = {}
    for name in NAMES:
        titles[name] = read(ROOT / f"{name}.py").partition("\n")[0].strip('"')
    print_table(titles)
    return 0


def add(arguments: argparse.Namespace) -> int:
    """Copy layers, and what they import, into a folder."""
    names = [f"{layer}.py" for layer in arguments.layers]
    if arguments.with_tests:
        names += [f"contract/{path.name}" for path in ROOT.glob("contract/*.py")]
    copies = [Copy(arguments.folder, name) for name in names]
    code = bring_up_to_date(arguments.folder, copies)
    if not (arguments.folder / "typecheck.py").exists():
        print(
            "Copies check no shapes by themselves: `tinyblock add typecheck` copies a "
            "file that does"
        )
    return code


def check(arguments: argparse.Namespace) -> int:
    """Report the copies that are edited, outdated, missing, or in conflict."""
    copies = copies_in(arguments.folder, arguments.layers)
    states = {copy.name: copy.state for copy in copies if copy.state}
    print_table(states)
    print(f"{len(copies) - len(states)} of {len(copies)} copies are pristine")
    return int(any(copy.requires_work for copy in copies))


def diff(arguments: argparse.Namespace) -> int:
    """Show your edits (--mine) and later changes in tinyblock (--upstream)."""
    for copy in copies_in(arguments.folder, arguments.layers):
        base = f"tinyblock {copy.version}: {copy.name}"
        if copy.text and not arguments.upstream:
            print_diff(copy.base, copy.text, base, copy.path.as_posix())
        if copy.is_outdated and not arguments.mine:
            new = f"tinyblock {__version__}: {copy.name}"
            print_diff(renumber(copy.base), copy.new, base, new)
    return 0


def update(arguments: argparse.Namespace) -> int:
    """Merge changes in tinyblock with your edits, and restore missing copies."""
    copies = copies_in(arguments.folder, arguments.layers)
    return bring_up_to_date(arguments.folder, copies)


def verify(arguments: argparse.Namespace) -> int:
    """Test layers with the tests beside them or, if there are none, tinyblock's own."""
    if importlib.util.find_spec("pytest") is None:
        raise CommandError("verify requires pytest: install it")
    path = arguments.path.resolve()
    folder = path if path.is_dir() else path.parent
    options = list(arguments.rest)
    files = []
    while options and not options[0].startswith("-"):
        files.append(folder / f"{layer_name(options.pop(0))}.py")
    contract = folder / "contract"
    if not (contract / "conftest.py").is_file():
        contract = ROOT / "contract"
    command = [sys.executable, "-m", "pytest", str(contract)]
    command += [f"--layers={file}" for file in files or [path]]
    command += ["-c", str(ROOT / "contract" / "contract.ini"), f"--rootdir={contract}"]
    code = subprocess.run([*command, *options], check=False).returncode
    return code if code in (0, 1) else 2


def print_table(rows: dict[str, str]) -> None:
    width = max(map(len, rows), default=0)
    for name, text in rows.items():
        print(f"{name:{width}}  {text}")


def print_diff(old: str, new: str, old_name: str, new_name: str) -> None:
    sides = (old.splitlines(), new.splitlines(), old_name, new_name)
    for line in difflib.unified_diff(*sides, lineterm=""):
        print(line)


def read(path: Path) -> str:
    """Return a text with "\\n" at the ends of lines, or "" if there is no file."""
    return path.read_text(encoding="utf-8") if path.exists() else ""


class Parser(argparse.ArgumentParser):
    """Report wrong arguments like other errors, in one line without the usage."""

    def error(self, message: str) -> NoReturn:
        raise CommandError(message)


def parser() -> Parser:
    main_parser = Parser("tinyblock", description=__doc__.partition("\n")[0])
    commands = main_parser.add_subparsers(metavar="COMMAND", required=True)
    for run in (list_, add, check, diff, update, verify):
        name = run.__name__.strip("_")
        command = commands.add_parser(name, help=run.__doc__, description=run.__doc__)
        command.set_defaults(run=run)
        if run is add:
            command.add_argument(
                "layers",
                nargs="+",
                type=layer_name,
                choices=NAMES,
                metavar="LAYER",
                help="copy this layer; `tinyblock list` prints the names",
            )
            command.add_argument(
                "--to",
                dest="folder",
                required=True,
                type=Path,
                metavar="DIR",
                help="write into this folder (required)",
            )
            command.add_argument(
                "--with-tests",
                action="store_true",
                help="also copy the tests of all layers (default: copy no tests)",
            )
        if run in (check, diff, update):
            command.add_argument(
                "folder",
                type=Path,
                metavar="DIR",
                help="read the copies in this folder",
            )
            command.add_argument(
                "layers",
                nargs="*",
                type=layer_name,
                metavar="LAYER",
                help="select a layer and its test (default: select all copies)",
            )
        if run is diff:
            side = command.add_mutually_exclusive_group()
            side.add_argument(
                "--mine", action="store_true", help="show your edits (default: both)"
            )
            side.add_argument(
                "--upstream",
                action="store_true",
                help="show later changes in tinyblock (default: both)",
            )
        if run is verify:
            command.add_argument(
                "path",
                type=Path,
                metavar="DIR_OR_FILE",
                help="test the layers in this folder, or the one in this file",
            )
            command.add_argument(
                "rest",
                nargs=argparse.REMAINDER,
                metavar="...",
                help="select layers by name (default: test all), then pass options to "
                "pytest, such as -x or -k float64",
            )
    return main_parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code: 0, 1 for findings, 2 for an error."""
    try:
        arguments = parser().parse_args(argv)
        return int(arguments.run(arguments))
    except (CommandError, OSError, UnicodeError) as error:
        print(f"tinyblock: error: {error}", file=sys.stderr)
        return 2
