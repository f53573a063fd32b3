"""The command `tinyblock`: copy layers into a project, and keep the copies up to date.

    layers/rope.py                  the copy: a header, the layer, and the user's edits
    layers/.tinyblock/rope.py.base  the base: what tinyblock wrote as that copy

The copy minus its base is the user's edits. What this release writes minus the base is
what changed in tinyblock. `update` lets git merge the two. Users commit both files, and
there is no other state.
"""

import argparse
import difflib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
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

    A text is "" where there is no file.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name  # such as rope.py or contract/test_rope.py
        self.path = folder / name
        self.base_path = folder / ".tinyblock" / f"{name}.base"
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
        version = version_in(self.text) or self.version  # users may delete headers
        # An update was interrupted after it wrote the copy, and before it wrote the base.
        self.is_half_updated = (
            version == __version__ != self.version and not self.is_newer
        )
        if version != self.version and not self.is_half_updated:
            raise CommandError(
                f"{self.path} is from tinyblock {version}, but its base is from "
                f"{self.version}: restore it together with {self.base_path}"
            )

    @property
    def is_outdated(self) -> bool:
        is_changed = renumber(self.base) != self.new
        return self.new != "" and (is_changed or self.is_half_updated)

    @property
    def has_conflict(self) -> bool:
        return MARKERS.search(self.text) is not None

    @property
    def state(self) -> str:
        """What distinguishes the copy from its base, and its base from this release."""
        found = []
        if not self.text:
            found.append("missing")
        elif self.has_conflict:
            found.append(CONFLICT)
        elif self.text != self.base:
            found.append("edited")
        if self.is_newer:
            found.append(f"from the newer tinyblock {self.version}")
        elif not self.new:
            found.append(f"not in tinyblock {__version__}")
        elif self.is_outdated:
            found.append(f"outdated: {self.version} -> {__version__}")
        return ", ".join(found)

    def plan(self) -> tuple[str, str]:
        """Return what `update` does, and the text that it writes ("": none)."""
        if self.new and not (self.base and self.text):
            return "copied", self.new
        if not self.is_outdated:
            return self.state or "up to date", ""
        if self.text in (self.base, self.new):
            return "updated", self.new
        if self.has_conflict and not self.is_half_updated:
            return self.state, ""
        text = self.text if self.is_half_updated else self.merge()
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


def version_in(text: str) -> str:
    """Return the version in a header, or "" if there is none."""
    found = VERSION.search(text)
    return found[2] if found else ""


def numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


def renumber(text: str) -> str:
    """Write this version into a header: the number is neither an edit nor a change."""
    return VERSION.sub(rf"\g<1>{__version__}", text, count=1)


def imports_of(name: str, text: str) -> set[str]:
    """Return the files that lines such as `from .ffn import SwiGLU` read."""
    folder = PurePosixPath(name).parent
    modules = re.findall(r"^from \.(\w+) import", text, re.MULTILINE)
    return {(folder / f"{module}.py").as_posix() for module in modules}


def with_imports(names: Iterable[str]) -> list[str]:
    """Return files of this release, and those that they import."""
    found: list[str] = []
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.append(name)
            waiting += imports_of(name, read(ROOT / name))
    return sorted(found)


def copies_in(folder: Path, layers: Sequence[str]) -> list[Copy]:
    """Return the copies that a folder has of these layers and their tests.

    Without layers, return all copies.
    """
    bases = folder / ".tinyblock"
    layer_of = {}
    for base in sorted(bases.rglob("*.base")):
        name = base.relative_to(bases).with_suffix("")
        layer_of[name.as_posix()] = name.stem.removeprefix("test_")
    absent = set(layers) - set(layer_of.values())
    if absent or not layer_of:
        what = ", ".join(sorted(absent)) or "a layer"
        raise CommandError(f"{folder} has no copy of {what}: `tinyblock add` writes it")
    selected = layers or layer_of.values()
    return [Copy(folder, name) for name in layer_of if layer_of[name] in selected]


def bring_up_to_date(folder: Path, copies: Iterable[Copy]) -> int:
    """Write and update copies, all or none, and return the exit code."""
    done = {}
    texts = {folder / LICENSE: read(ROOT / "LICENSE")}
    for copy in copies:
        done[copy.name], text = copy.plan()
        if text:
            texts[copy.path] = text
            texts[copy.base_path] = copy.new
    replace_files(texts)
    print_table(done)
    return int(any(outcome.startswith(CONFLICT) for outcome in done.values()))


# The commands. Each returns its exit code.


def list_(arguments: argparse.Namespace) -> int:
    """List what can be copied."""
    titles = {}
    for name in NAMES:
        titles[name] = read(ROOT / f"{name}.py").partition("\n")[0].strip('"')
    print_table(titles)
    return 0


def add(arguments: argparse.Namespace) -> int:
    """Copy layers, and what they import, into a folder."""
    names = with_imports(f"{layer}.py" for layer in arguments.layers)
    if arguments.with_tests:
        tests = sorted(ROOT.glob("contract/*.py"))
        names += [f"contract/{path.name}" for path in tests]
    copies = [Copy(arguments.folder, name) for name in names]
    code = bring_up_to_date(arguments.folder, copies)
    print("Copies check no shapes until you apply typecheck.py: see docs/vendoring.md")
    return code


def check(arguments: argparse.Namespace) -> int:
    """Report the copies that are edited, outdated, missing, or in conflict."""
    copies = copies_in(arguments.folder, arguments.layers)
    states = {copy.name: copy.state for copy in copies if copy.state}
    print_table(states)
    print(f"{len(copies) - len(states)} of {len(copies)} copies are pristine")
    return int(
        any(not copy.text or copy.has_conflict or copy.is_outdated for copy in copies)
    )


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
    imported: set[str] = set()
    for copy in copies:  # what only this release imports: users may drop an import
        imported |= imports_of(copy.name, copy.new) - imports_of(copy.name, copy.base)
    # These come first: after an interrupted update they would not be found again.
    new = [Copy(arguments.folder, name) for name in with_imports(imported)]
    return bring_up_to_date(arguments.folder, new + copies)


def verify(arguments: argparse.Namespace) -> int:
    """Test copies against the contract beside them, or else tinyblock's own."""
    if importlib.util.find_spec("pytest") is None:
        raise CommandError("verify requires pytest: install it")
    path = arguments.path.resolve()
    contract = (path if path.is_dir() else path.parent) / "contract"
    if not (contract / "conftest.py").is_file():
        contract = ROOT / "contract"
    command = [sys.executable, "-m", "pytest", str(contract), f"--layers={path}"]
    command += ["-c", str(ROOT / "contract" / "contract.ini"), f"--rootdir={contract}"]
    code = subprocess.run([*command, *arguments.pytest], check=False).returncode
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


def replace_files(texts: dict[Path, str]) -> None:
    """Write files in this order, each in one step, after all texts are on the disk."""
    written = {}
    try:
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            written[path] = path.with_name(f".{path.name}.new")
            written[path].write_text(text, encoding="utf-8", newline="\n")
        for path, temporary in written.items():
            os.replace(temporary, path)
    finally:
        for temporary in written.values():
            temporary.unlink(missing_ok=True)


class Parser(argparse.ArgumentParser):
    """Report wrong arguments as other errors: in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        raise CommandError(message)


def parser() -> Parser:
    main_parser = Parser("tinyblock", description=__doc__.partition("\n")[0])
    commands = main_parser.add_subparsers(metavar="COMMAND", required=True)
    for run in (list_, add, check, diff, update, verify):
        command = commands.add_parser(run.__name__.strip("_"), help=run.__doc__)
        command.set_defaults(run=run)
        if run is add:
            command.add_argument("layers", nargs="+", choices=NAMES, metavar="LAYER")
            command.add_argument(
                "--to", dest="folder", required=True, type=Path, metavar="DIR"
            )
            command.add_argument(
                "--with-tests", action="store_true", help="copy the contract, too"
            )
        if run in (check, diff, update):
            command.add_argument("folder", type=Path, metavar="DIR")
            command.add_argument("layers", nargs="*", metavar="LAYER")
        if run is diff:
            side = command.add_mutually_exclusive_group()
            side.add_argument("--mine", action="store_true")
            side.add_argument("--upstream", action="store_true")
        if run is verify:
            command.add_argument("path", type=Path, metavar="DIR_OR_FILE")
            command.add_argument("pytest", nargs=argparse.REMAINDER, metavar="...")
    return main_parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code: 0, 1 for findings, 2 for an error."""
    try:
        arguments = parser().parse_args(argv)
        return int(arguments.run(arguments))
    except (CommandError, OSError, UnicodeError) as error:
        print(f"tinyblock: error: {error}", file=sys.stderr)
        return 2
