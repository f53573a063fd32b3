"""Copy layers into a project, and keep the copies up to date: the command `tinyblock`.

    layers/rope.py                  the copy: a head, the layer, and the user's edits
    layers/.tinyblock/rope.py.base  the base: what tinyblock wrote as that copy
    layers/.tinyblock/version       the newest tinyblock that wrote here

The copy minus its base is the user's edits. This release minus the base is what changed
in tinyblock. `update` lets git merge the two, and replaces the copy and the base.

If only one of them were replaced, the next `update` would merge a change twice, or take
it for an edit. So a command works in two phases. It writes all new texts beside the old
files, first copies (rope.py.partial), then bases (.tinyblock/rope.py.base.partial). Then
these partial files take the places of the old files, in the same order. Wherever a
command is stopped, the partial files that exist tell the next one what to do:

    rope.py.partial              neither file has changed: delete both partial files
    only rope.py.base.partial    the copy has changed: let the base follow

This file runs on Python 3.10, and only `verify` requires packages. So it reads the files
of tinyblock as bytes, and imports none of them.
"""

import argparse
import difflib
import io
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parent
INIT = (ROOT / "__init__.py").read_text("utf-8")
VERSION = re.findall(r'^__version__ = "(.+)"', INIT, re.MULTILINE)[0]
# The files that can be copied. The others are of use to tinyblock alone.
SOURCES = {
    path.relative_to(ROOT).as_posix(): path.read_bytes()
    for path in sorted([*ROOT.glob("*.py"), *ROOT.glob("contract/*.py")])
    if path.name not in ("__init__.py", "__main__.py", "copies.py")
}
# The first line of each layer's docstring, by the name that `add` takes.
TITLES = {
    PurePath(name).stem: source.decode().splitlines()[0].strip('"')
    for name, source in SOURCES.items()
    if "/" not in name
}
LICENSE = "LICENSE.tinyblock"
# What a copy begins with. flake8 and ruff skip a file with the line `flake8: noqa`, and
# formatters with the last line. ruff reports a list of rules in place of the former as
# unused, and deletes it. Its rule PGH004, which requires such a list, needs its own line.
HEAD = f"""\
# Copied from tinyblock: {{name}}
# Copyright (c) 2026 The tinyblock authors, MIT license: see {LICENSE}
# ruff: noqa: PGH004
# flake8: noqa
# fmt: off
"""
COPIED_FROM = re.compile(rb"# Copied from tinyblock: (\S+)")
IMPORT = re.compile(rb"^\s*from \.(\w+) import\b", re.MULTILINE)
# Not =======, which may underline a heading. Python reports one that is left over.
MARKER = re.compile(rb"^(<{7}|>{7})(\s|$)", re.MULTILINE)
CONFLICT = "conflict markers: resolve them"
NOT_RELEASED = f"not in tinyblock {VERSION}"


class CommandError(Exception):
    """A command failed. The message is one line."""


@dataclass(frozen=True)
class Copy:
    """A file in a folder of copies, its base, and what this release writes as both.

    All have the line ends of the copy.
    """

    folder: Path
    name: str  # such as rope.py or contract/test_rope.py
    text: bytes | None  # None if there is no file
    base: bytes  # empty if there is no file
    source: bytes  # empty if this release has no such file
    new: bytes  # a head and the source, or empty

    @property
    def path(self) -> Path:
        return self.folder / self.name

    @property
    def is_own(self) -> bool:
        """Return whether the user has a file or package of this name that is not a copy.

        A file without a base is a copy if it is as in this release.
        """
        if self.text is None:
            package = self.path.with_suffix("")
            return not self.base and any(package.glob("*.py"))
        return not self.base and self.text not in (self.source, self.new)

    @property
    def is_outdated(self) -> bool:
        return self.new not in (b"", self.base)

    def plan(self) -> tuple[str, bytes | None]:
        """Return what `update` does with a copy, in words, and the copy's next text.

        The base then becomes `self.new`. None leaves the copy and its base alone.
        """
        if self.is_own:
            return "kept, because it is not a copy with a base", None
        if self.text and MARKER.search(self.text):
            return CONFLICT, None
        if not self.new:
            return NOT_RELEASED, None
        if self.text is None or not self.base:  # if there is a text, it is the new one
            return "copied", self.new
        if not self.is_outdated:
            return "up to date" if self.text == self.base else "edited", None
        if self.text in (self.base, self.new):
            return "updated", self.new
        text = self.merge(self.text)
        return CONFLICT if MARKER.search(text) else "merged with your edits", text

    def merge(self, text: bytes) -> bytes:
        """Return the user's text, into which git merges the changes in tinyblock."""
        if not shutil.which("git"):
            raise CommandError(f"git must be on PATH to merge {self.path}: install it")
        release = f"tinyblock {VERSION}"
        sides = {"yours": text, "as it was copied": self.base, release: self.new}
        command = ["git", "merge-file", "--stdout", "--diff3", *sides]
        with TemporaryDirectory() as folder:
            for name, side in sides.items():  # git writes the names beside its markers
                Path(folder, name).write_bytes(side)
            done = subprocess.run(command, cwd=folder, capture_output=True)
        # git exits with the number of conflicts, or with more than 127 after an error. A
        # program that only stands for git, as on a new Mac, prints no file.
        expected = range(1, 128) if MARKER.search(done.stdout) else [0]
        if not done.stdout or done.returncode not in expected:
            reason = done.stderr.decode(errors="replace").strip()
            raise CommandError(f"git cannot merge {self.path}: {reason}")
        return done.stdout

    def imports(self) -> list["Copy"]:
        """Return the files of tinyblock that the copy imports from beside it."""
        names = [
            PurePath(self.name).with_name(f"{module.decode()}.py").as_posix()
            for module in sorted(set(IMPORT.findall(self.text or b"")))
        ]
        return [read_copy(self.folder, name) for name in names if name in SOURCES]

    def state(self) -> list[str]:
        """Return how the copy differs from its base, and the base from this release."""
        found = []
        if self.text is None:
            found.append("missing")
        elif MARKER.search(self.text):
            found.append(CONFLICT)
        elif self.text != self.base:
            found.append("edited")
        if not self.new:
            found.append(NOT_RELEASED)
        elif self.is_outdated:
            found.append(f"outdated: tinyblock {VERSION} has changed it")
        return found


def read_copy(folder: Path, name: str) -> Copy:
    """Read a copy and its base, each of which may be missing."""
    text = read(folder / name)
    base = read(base_of(folder, name)) or b""
    if MARKER.search(base):
        raise CommandError(
            f"{base_of(folder, name)} has conflict markers: take the whole file from the "
            "branch with the newer tinyblock"
        )
    copied_from = COPIED_FROM.match(base)
    # A renamed copy has its old name in its base.
    copied = copied_from[1].decode() if copied_from else name
    source = SOURCES.get(copied, b"")
    new = HEAD.format(name=copied).encode() + source if source else b""
    base, source, new = (
        with_line_ends_of(text or base, each) for each in (base, source, new)
    )
    return Copy(folder, name, text, base, source, new)


def base_of(folder: Path, name: str) -> Path:
    return folder / ".tinyblock" / f"{name}.base"


def layer_name(path: str) -> str:
    """Return the layer of a file: "rope" for rope, rope.py and layers/test_rope.py."""
    return PurePath(path).stem.removeprefix("test_")


def read(path: Path) -> bytes | None:
    """Return what is in a file, or None if there is no file."""
    return path.read_bytes() if path.is_file() else None


def with_line_ends_of(example: bytes, text: bytes) -> bytes:
    """Return a text with the line ends of most lines of an example."""
    text = text.replace(b"\r\n", b"\n")
    has_crlf = example.count(b"\r\n") > example.count(b"\n") / 2
    return text.replace(b"\n", b"\r\n") if has_crlf else text


# Folders of copies.


@contextmanager
def opened(folder: Path) -> Iterator[None]:
    """Let one command at a time work on a folder, and first make up for a stopped one.

    Commands do not wait on Windows, nor where a network's disk cannot be locked.
    """
    with ExitStack() as stack:
        with suppress(ImportError, OSError):
            import fcntl

            lock = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX)
        version = read(folder / ".tinyblock" / "version") or b""
        if newest_in(version) > newest_in(VERSION.encode()):
            raise CommandError(
                f"{folder} has copies from a newer tinyblock than this one, {VERSION}: "
                "update tinyblock"
            )
        if (folder / ".tinyblock").exists():  # otherwise the files are the user's
            recover(folder)
        yield


def newest_in(text: bytes) -> list[int]:
    """Return the newest version in a text. In a merge of branches, git writes two."""
    versions = re.findall(rb"(\d+)\.(\d+)\.(\d+)", text)
    return max((list(map(int, version)) for version in versions), default=[])


def names_in(folder: Path) -> list[str]:
    """Return the names of the copies that have a base, or the partial file of one."""
    bases = folder / ".tinyblock"
    files = [path.relative_to(bases).as_posix() for path in bases.rglob("*.base*")]
    return sorted({file.rpartition(".base")[0] for file in files})


def recover(folder: Path) -> None:
    """Complete or undo, for each copy, what a stopped command has begun."""
    # The last two have no base.
    for name in (*SOURCES, *names_in(folder), LICENSE, ".tinyblock/version"):
        new_copy = partial_of(folder / name)
        new_base = partial_of(base_of(folder, name))
        if new_copy.exists():
            new_base.unlink(missing_ok=True)  # first: alone, it would mean the opposite
            new_copy.unlink()
        elif new_base.exists():
            new_base.replace(os.path.realpath(base_of(folder, name)))


def write(folder: Path, texts: dict[Path, bytes]) -> None:
    """Write all partial files, then let them take their places, both in this order.

    Each file is the whole old one or the whole new one at any moment. A link stays one,
    and a file keeps its mode.
    """
    try:
        for path, text in texts.items():
            partial = partial_of(path)
            partial.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            if path.exists():
                shutil.copymode(path, partial)
        for path in texts:
            partial_of(path).replace(os.path.realpath(path))
    except OSError:  # as on a full disk
        recover(folder)
        raise


def partial_of(path: Path) -> Path:
    """Return where the next text of a file is written: beside what it may link to."""
    return Path(f"{os.path.realpath(path)}.partial")


def copies_in(folder: Path, layers: Sequence[str]) -> list[Copy]:
    """Return a folder's copies of these layers and of their tests, or all copies."""
    require_bases(folder)
    names = names_in(folder)
    absent = sorted(set(layers) - set(map(layer_name, names)))
    if absent or not names:
        raise CommandError(f"{folder} has no copy of {' '.join(absent) or 'a layer'}")
    selected = [name for name in names if not layers or layer_name(name) in layers]
    return [read_copy(folder, name) for name in selected]


def require_bases(folder: Path) -> None:
    """Require a base of each file that says in its first line that it is a copy.

    Otherwise it would never be updated again.
    """
    for path in sorted([*folder.glob("*.py"), *folder.glob("contract/*.py")]):
        name = path.relative_to(folder).as_posix()
        copied_from = COPIED_FROM.match(read(path) or b"")
        if not copied_from or read(base_of(folder, name)):
            continue
        copied = copied_from[1].decode()
        is_duplicate = copied != name and (folder / copied).exists()
        if not is_duplicate:
            raise CommandError(
                f"{path} was copied as {copied}, and has no base "
                f"{base_of(folder, name)}: restore it, rename it with the copy, or delete "
                "the first line of the copy to keep it as your own"
            )


def bring_up_to_date(folder: Path, copies: Sequence[Copy]) -> int:
    """Write and update copies and what they import, and return the exit code."""
    waiting = list(copies)
    rows: dict[str, str] = {}
    texts: dict[Path, bytes] = {}
    bases: dict[Path, bytes] = {}
    while waiting:
        copy = waiting.pop()
        if copy.name in rows:
            continue
        rows[copy.name], text = copy.plan()
        if text is not None:
            texts[copy.path] = text
            bases[base_of(folder, copy.name)] = copy.new
            copy = replace(copy, text=text)
        if not copy.is_own:
            waiting += copy.imports()
    if bases:
        # The version is first, so that a stop lets in no older tinyblock.
        first = {folder / ".tinyblock" / "version": f"{VERSION}\n".encode()}
        if not (folder / LICENSE).exists():
            first[folder / LICENSE] = (ROOT / "LICENSE").read_bytes()
        write(folder, first | texts | bases)
    print_table(dict(sorted(rows.items())))
    return int(CONFLICT in rows.values())


# The commands. Each returns its exit code.


def list_(arguments: argparse.Namespace) -> int:
    """List the files that can be copied."""
    print_table(TITLES)
    return 0


def add(arguments: argparse.Namespace) -> int:
    """Copy layers, and what they import, into a folder."""
    folder, layers = arguments.folder, arguments.layers
    names = [f"{layer}.py" for layer in layers]
    tests = [f"contract/test_{layer}.py" for layer in layers]
    tests = [test for test in tests if test in SOURCES]
    if arguments.with_tests and tests:
        names += ["contract/conftest.py", *tests]
    folder.mkdir(parents=True, exist_ok=True)
    with opened(folder):
        copies = [read_copy(folder, name) for name in names]
        for copy in copies:
            if copy.is_own:
                raise CommandError(
                    f"{copy.path} is not a copy with a base: move your file or folder away"
                )
        code = bring_up_to_date(folder, copies)
    if not (folder / "typecheck.py").exists():
        print("Copies check no shapes. `add typecheck` copies a file that does")
    return code


def check(arguments: argparse.Namespace) -> int:
    """Report the copies that are edited, outdated, missing, or in conflict."""
    with opened(arguments.folder):
        copies = copies_in(arguments.folder, arguments.layers)
        states = {copy.name: copy.state() for copy in copies}
    found = {name: ", ".join(state) for name, state in states.items() if state}
    print_table(found)
    unedited = len(copies) - len(found)
    print(f"{unedited} of {len(copies)} copies are unedited and up to date")
    needs_no_work = {"edited", NOT_RELEASED}
    return int(any(not needs_no_work.issuperset(state) for state in states.values()))


def diff(arguments: argparse.Namespace) -> int:
    """Show your edits (--mine) and later changes in tinyblock (--upstream)."""
    with opened(arguments.folder):
        copies = copies_in(arguments.folder, arguments.layers)
    for copy in copies:
        base = base_of(copy.folder, copy.name).as_posix()
        if copy.text is not None and not arguments.upstream:
            print_diff(copy.base, copy.text, base, copy.path.as_posix())
        if copy.is_outdated and not arguments.mine:
            print_diff(copy.base, copy.new, base, f"tinyblock {VERSION}: {copy.name}")
    return 0


def update(arguments: argparse.Namespace) -> int:
    """Merge changes in tinyblock with your edits, and restore missing copies."""
    with opened(arguments.folder):
        copies = copies_in(arguments.folder, arguments.layers)
        return bring_up_to_date(arguments.folder, copies)


def verify(arguments: argparse.Namespace) -> int:
    """Test layers with the tests beside them or, if there are none, tinyblock's own."""
    # By its path, because the package tinyblock imports its layers.
    start = runpy.run_path(str(ROOT / "verify" / "start.py"))["start"]
    return int(start(arguments.path, arguments.rest))


def print_table(rows: dict[str, str]) -> None:
    width = max(map(len, rows), default=0)
    for name, text in rows.items():
        print(f"{name:{width}}  {text}")


def print_diff(old: bytes, new: bytes, old_name: str, new_name: str) -> None:
    # Not splitlines(), which also splits at a form feed within a line.
    old_lines, new_lines = (
        io.StringIO(text.decode(errors="backslashreplace")).readlines()
        for text in (old, new)
    )
    for line in difflib.unified_diff(old_lines, new_lines, old_name, new_name):
        print(line.removesuffix("\n"))
        if not line.endswith("\n"):
            print("\\ No newline at end of file")


def parser() -> argparse.ArgumentParser:
    description = __doc__.partition("\n")[0]
    main_parser = argparse.ArgumentParser("tinyblock", description=description)
    commands = main_parser.add_subparsers(metavar="COMMAND", required=True)

    parsers = {}
    for run in (list_, add, check, diff, update, verify):
        name = run.__name__.removesuffix("_")
        command = commands.add_parser(name, help=run.__doc__, description=run.__doc__)
        command.set_defaults(run=run)
        parsers[name] = command

    command = parsers["add"]
    text = "copy this layer; `list` prints the names"
    command.add_argument(
        "layers", nargs="+", type=layer_name, choices=TITLES, metavar="LAYER", help=text
    )
    text = "write into this folder (required)"
    command.add_argument(
        "--to", dest="folder", required=True, type=Path, metavar="DIR", help=text
    )
    text = "also copy the tests of these layers (default: copy no tests)"
    command.add_argument("--with-tests", action="store_true", help=text)

    for command in (parsers["check"], parsers["diff"], parsers["update"]):
        text = "read the copies in this folder"
        command.add_argument("folder", type=Path, metavar="DIR", help=text)
        text = "select a layer and its test (default: select all copies)"
        command.add_argument(
            "layers", nargs="*", default=(), type=layer_name, metavar="LAYER", help=text
        )
    side = parsers["diff"].add_mutually_exclusive_group()
    text = "show your edits (default: both)"
    side.add_argument("--mine", action="store_true", help=text)
    text = "show later changes in tinyblock (default: both)"
    side.add_argument("--upstream", action="store_true", help=text)

    command = parsers["verify"]
    text = "test the layers in this folder, or the one in this file"
    command.add_argument("path", type=Path, metavar="DIR_OR_FILE", help=text)
    text = "names of layers (default: all), then options of pytest, as -x or -k float64"
    command.add_argument("rest", nargs="...", metavar="...", help=text)
    return main_parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code: 0, 1 for findings, 2 for an error."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A console may lack a letter of the user's code, or of a folder's name.
        sys.stdout.reconfigure(errors="backslashreplace")
    typed = sys.argv[1:] if argv is None else argv
    try:
        arguments = parser().parse_args(typed or ["--help"])
        code = int(arguments.run(arguments))
        sys.stdout.flush()
    except BrokenPipeError:  # as in `tinyblock diff layers | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (CommandError, ModuleNotFoundError, OSError) as error:
        print(f"tinyblock: error: {error}", file=sys.stderr)
        return 2
    return code
