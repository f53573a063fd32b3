"""Copy layers into a project, and keep the copies up to date: the command `tinyblock`.

    layers/rope.py                  the copy: a header, the layer, and the user's edits
    layers/.tinyblock/rope.py.base  the base: what tinyblock wrote as that copy

The copy minus its base is the user's edits. What this release writes minus the base is
what changed in tinyblock. `update` lets git merge the two. Users commit both files, and
there is no other state: repeat a command that was interrupted, and git merges again.

This file runs on Python 3.10, and only `verify` requires packages. So it reads the files
of tinyblock as text, and imports none of them.
"""

import argparse
import difflib
import importlib.util
import io
import os
import re
import shlex
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath
from tempfile import TemporaryDirectory
from typing import NoReturn

ROOT = Path(__file__).parent
# The first line of each layer's docstring, by the name that `add` takes.
TITLES = {
    path.stem: path.read_text("utf-8").partition("\n")[0].strip('"')
    for path in sorted(ROOT.glob("*.py"))
    if path.stem not in ("__init__", "__main__", "copies")
}
INIT = (ROOT / "__init__.py").read_text("utf-8")
VERSION = re.findall(r'^__version__ = "(.+)"', INIT, re.MULTILINE)[0]
LICENSE = "LICENSE.tinyblock"
# flake8 and ruff skip a file with the third line, and formatters with the fourth. ruff
# reports a list of rules in its place as unused, and deletes it.
HEADER = f"""\
# Copied from tinyblock {{version}}: {{name}}
# Copyright (c) 2026 The tinyblock authors, MIT license: see {LICENSE}
# flake8: noqa
# fmt: off
"""
LEADING_COMMENTS = re.compile(r"\A\ufeff?(#.*\n|\r?\n)*")
COPIED_FROM = re.compile(r"^(\ufeff?# Copied from tinyblock )(\S+)(?=: )", re.MULTILINE)
IMPORT = re.compile(r"^from \.(\w+) import (\([^)]*\)|.*)", re.MULTILINE)
NAME = re.compile(r"([\w*]+)(?:\s+as\s+\w+)?")  # of an import; "*" for all
# What `git diff --check` calls a leftover conflict marker.
MARKER = re.compile(r"^(<{7}|\|{7}|={7}|>{7})(\s|$)", re.MULTILINE)
CONFLICT = "conflict markers: resolve them"


class CommandError(Exception):
    """A command failed. The message is one line."""


@dataclass(frozen=True)
class Copy:
    """A file in a folder of copies, its base, and what this release writes as both.

    The lines of the texts end with "\\n". The text of a missing file is "".
    """

    name: str  # such as rope.py or contract/test_rope.py
    path: Path
    base_path: Path
    text: str
    base: str
    is_newer: bool  # than this release
    new: str  # "" if this release has no such file, or an older one
    missing_imports: list[str]

    @property
    def version(self) -> str:
        return version_in(self.base)

    @property
    def is_outdated(self) -> bool:
        return self.new not in ("", renumber(self.base))

    @property
    def has_conflict(self) -> bool:
        return MARKER.search(self.text) is not None

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
            found.append(f"not in tinyblock {VERSION}")
        elif self.is_outdated and self.version != VERSION:
            found.append(f"outdated: {self.version} -> {VERSION}")
        elif self.is_outdated:
            found.append(f"outdated: tinyblock {VERSION} has changed since")
        return ", ".join(found)

    def plan(self) -> tuple[str, str]:
        """Return what `update` does, and the exact text that it writes ("": none)."""
        if self.new and not self.text:
            return "copied", with_line_ends_of(self.base_path, self.new)
        if self.new and not self.base:
            return "copied", with_line_ends_of(self.path, self.new)
        if not self.is_outdated or self.has_conflict:
            return self.state or "up to date", ""
        if self.text == self.base:
            return "updated", with_line_ends_of(self.path, self.new)
        text = self.merge()
        return CONFLICT if MARKER.search(text) else "merged with your edits", text

    def merge(self) -> str:
        """Return the user's edits, merged by git with the changes in tinyblock.

        git does not see the headers. An edited one stays as it is, because a line that
        a tool deletes would conflict with any change beside it.
        """
        header, yours = split_header(renumber(read_exactly(self.path)))
        base_header, base = split_header(
            with_line_ends_of(self.path, renumber(self.base))
        )
        new_header, new = split_header(with_line_ends_of(self.path, self.new))
        if header == base_header:
            header = new_header
        command = ["git", "merge-file", "--stdout", "--diff3"]
        command += ["-L", "yours", "-L", f"tinyblock {self.version}, copied"]
        command += ["-L", f"tinyblock {VERSION}", "yours", "base", "new"]
        with TemporaryDirectory() as folder:
            Path(folder, "yours").write_bytes(yours.encode())
            Path(folder, "base").write_bytes(base.encode())
            Path(folder, "new").write_bytes(new.encode())
            done = subprocess.run(command, cwd=folder, capture_output=True, check=False)
        if done.returncode > 127:  # up to 127 it is the number of conflicts
            reason = done.stderr.decode(errors="replace").strip()
            raise CommandError(f"git cannot merge {self.path}: {reason}")
        return header + done.stdout.decode()


def read_copy(folder: Path, name: str) -> Copy:
    """Read a copy, which may be missing, and its base."""
    path = folder / name
    base_path = base_of(folder, name)
    if is_own(folder, name):
        raise CommandError(
            f"{path} is not a copy with a base: move it away, or restore {base_path}"
        )
    text = read(path)
    base = read(base_path)
    version = version_in(text)  # users may delete headers
    # An interrupted update leaves a copy from this release with an older base.
    if version not in ("", version_in(base), VERSION):
        raise CommandError(
            f"{path} is from tinyblock {version}, but its base is from "
            f"{version_in(base)}: restore it together with {base_path}"
        )
    missing_imports = [  # a missing copy with a base is reported by itself
        imported
        for imported in sorted(imports_of(name, text))
        if not is_module(folder / imported) and not base_of(folder, imported).exists()
    ]
    is_newer = numbers(version_in(base)) > numbers(VERSION)
    return Copy(
        name=name,
        path=path,
        base_path=base_path,
        text=text,
        base=base,
        is_newer=is_newer,
        new="" if is_newer else written_as(name),
        missing_imports=missing_imports,
    )


def is_own(folder: Path, name: str) -> bool:
    """Return whether the user has a file of this name that is not a copy.

    A file as tinyblock writes it is a copy: by hand, or by a command that was
    interrupted before it wrote the base.
    """
    if not (folder / name).exists() or read(base_of(folder, name)):
        return False
    return read(folder / name) not in (read(ROOT / name), written_as(name))


def is_module(path: Path) -> bool:
    """Return whether Python can import a file such as ffn.py, or a folder ffn."""
    return path.exists() or path.with_suffix("").is_dir()


def written_as(name: str) -> str:
    """Return what this release writes as a copy, or "" if it has no such file."""
    source = read(ROOT / name)
    return HEADER.format(version=VERSION, name=name) + source if source else ""


def layer_name(path: str) -> str:
    """Return the layer of a file: "rope" for rope, rope.py and layers/test_rope.py."""
    return PurePath(path).name.removesuffix(".py").removeprefix("test_")


def base_of(folder: Path, name: str) -> Path:
    return folder / ".tinyblock" / f"{name}.base"


def version_in(text: str) -> str:
    """Return the version in a header, or "" if there is none."""
    found = COPIED_FROM.search(text)
    return found[2] if found else ""


def numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


def split_header(text: str) -> tuple[str, str]:
    """Return the comments that a file begins with, and the layer below."""
    layer = LEADING_COMMENTS.sub("", text, count=1)
    return text.removesuffix(layer), layer


def renumber(text: str) -> str:
    """Write this version into a header. A new number is neither an edit nor a change."""
    return COPIED_FROM.sub(rf"\g<1>{VERSION}", text, count=1)


def imports_of(name: str, text: str) -> dict[str, list[str]]:
    """Return the files that a file imports, and the names that it imports from each.

    `from .ffn import SwiGLU` in block.py becomes {"ffn.py": ["SwiGLU"]}.
    """
    folder = PurePosixPath(name).parent
    found: defaultdict[str, list[str]] = defaultdict(list)
    for module, clause in IMPORT.findall(text):
        without_comments = re.sub("#.*", "", clause)
        found[(folder / f"{module}.py").as_posix()] += NAME.findall(without_comments)
    return found


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
        hint = f"{started_as()} add {what} --to {shlex.quote(str(folder))}"
        raise CommandError(f"{folder} has no copy of {what}: run `{hint}`")
    return [
        read_copy(folder, name)
        for name in names
        if not layers or layer_name(name) in layers
    ]


def bring_up_to_date(folder: Path, copies: Iterable[Copy]) -> int:
    """Write and update copies and what they import, and return the exit code."""
    waiting = list(copies)
    rows: dict[str, str] = {}
    importers = defaultdict(list)  # of the files that are not copies
    license_text = with_line_ends_of(folder / LICENSE, read(ROOT / "LICENSE"))
    texts = {folder / LICENSE: license_text}
    while waiting:
        copy = waiting.pop()
        if copy.name in rows:
            continue
        rows[copy.name], text = copy.plan()
        if text:
            texts[copy.path] = text  # before its base, so that git merges again
            texts[copy.base_path] = with_line_ends_of(copy.base_path, copy.new)
        for imported, names in imports_of(copy.name, text or copy.text).items():
            if not (ROOT / imported).exists():
                continue
            path = folder / imported
            is_folder = not path.exists() and path.with_suffix("").is_dir()
            if is_folder or is_own(folder, imported):
                what = ", ".join(names)
                importers[imported].append(f"{copy.name} imports {what} from it")
            else:
                waiting.append(read_copy(folder, imported))
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    for name, imports in importers.items():
        rows[name] = f"kept, because it is not a copy: {'; '.join(sorted(imports))}"
    print_table(dict(sorted(rows.items())))
    return int(any(row.startswith(CONFLICT) for row in rows.values()))


# The commands. Each returns its exit code.


def list_(arguments: argparse.Namespace) -> int:
    """List the files that can be copied."""
    print_table(TITLES)
    return 0


def add(arguments: argparse.Namespace) -> int:
    """Copy layers, and what they import, into a folder."""
    names = [f"{layer}.py" for layer in arguments.layers]
    if arguments.with_tests:
        names += ["contract/__init__.py", "contract/conftest.py"]
        pages = [f"contract/test_{layer}.py" for layer in arguments.layers]
        names += [page for page in pages if (ROOT / page).exists()]
    copies = [read_copy(arguments.folder, name) for name in names]
    code = bring_up_to_date(arguments.folder, copies)
    if not (arguments.folder / "typecheck.py").exists():
        folder = shlex.quote(str(arguments.folder))
        print(
            "Copies check no shapes by themselves. "
            f"`{started_as()} add typecheck --to {folder}` copies a file that does"
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
            new = f"tinyblock {VERSION}: {copy.name}"
            print_diff(renumber(copy.base), copy.new, base, new)
    return 0


def update(arguments: argparse.Namespace) -> int:
    """Merge changes in tinyblock with your edits, and restore missing copies."""
    copies = copies_in(arguments.folder, arguments.layers)
    return bring_up_to_date(arguments.folder, copies)


def verify(arguments: argparse.Namespace) -> int:
    """Test layers with the tests beside them or, if there are none, tinyblock's own."""
    required = ("torch", "pytest", "einops", "jaxtyping")
    missing = [name for name in required if importlib.util.find_spec(name) is None]
    if missing:
        raise CommandError(
            f"verify requires {', '.join(missing)}: install them for "
            f"{sys.executable}, or start the command with another Python"
        )
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
    # Not splitlines(), which also splits at a form feed within a line.
    sides = (io.StringIO(old).readlines(), io.StringIO(new).readlines())
    for line in difflib.unified_diff(*sides, old_name, new_name):
        print(line.removesuffix("\n"))
        if not line.endswith("\n"):
            print("\\ No newline at end of file")


def read_exactly(path: Path) -> str:
    """Return the text of a file with its own line ends, or "" if there is no file."""
    if not path.exists():
        return ""
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise CommandError(
            f"{path} must be text in UTF-8, got the byte "
            f"{error.object[error.start]:#x} at {error.start}: save it as UTF-8"
        ) from error


def read(path: Path) -> str:
    """Return the text of a file with "\\n" as line ends, or "" if there is no file."""
    return read_exactly(path).replace("\r\n", "\n")


def with_line_ends_of(path: Path, text: str) -> str:
    """Return a text, whose lines end with "\\n", with the line ends of a file."""
    there = read_exactly(path)
    has_crlf = there.count("\r\n") > there.count("\n") / 2
    return text.replace("\n", "\r\n") if has_crlf else text


def started_as() -> str:
    """Return how the user typed the command, for hints."""
    python = PurePath(sys.executable).name
    if not __package__:
        return f"{python} {shlex.quote(sys.argv[0])}"
    if Path(sys.argv[0]) == Path(__file__).with_name("__main__.py"):
        return f"{python} -m tinyblock"
    return "tinyblock"


class Parser(argparse.ArgumentParser):
    """Report wrong arguments like other errors, in one line without the usage."""

    def error(self, message: str) -> NoReturn:
        raise CommandError(message)


def add_folder_and_layers(command: argparse.ArgumentParser) -> None:
    """Add the arguments of the commands that work on copies."""
    command.add_argument(
        "folder", type=Path, metavar="DIR", help="read the copies in this folder"
    )
    command.add_argument(
        "layers",
        nargs="*",
        type=layer_name,
        metavar="LAYER",
        help="select a layer and its test (default: select all copies)",
    )


def parser() -> Parser:
    main_parser = Parser(started_as(), description=__doc__.partition("\n")[0])
    commands = main_parser.add_subparsers(metavar="COMMAND", required=True)

    command = commands.add_parser("list", help=list_.__doc__, description=list_.__doc__)
    command.set_defaults(run=list_)

    command = commands.add_parser("add", help=add.__doc__, description=add.__doc__)
    command.set_defaults(run=add)
    command.add_argument(
        "layers",
        nargs="+",
        type=layer_name,
        choices=TITLES,
        metavar="LAYER",
        help=f"copy this layer; `{started_as()} list` prints the names",
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
        help="also copy the tests of these layers (default: copy no tests)",
    )

    command = commands.add_parser(
        "check", help=check.__doc__, description=check.__doc__
    )
    command.set_defaults(run=check)
    add_folder_and_layers(command)

    command = commands.add_parser("diff", help=diff.__doc__, description=diff.__doc__)
    command.set_defaults(run=diff)
    add_folder_and_layers(command)
    side = command.add_mutually_exclusive_group()
    side.add_argument(
        "--mine", action="store_true", help="show your edits (default: both)"
    )
    side.add_argument(
        "--upstream",
        action="store_true",
        help="show later changes in tinyblock (default: both)",
    )

    command = commands.add_parser(
        "update", help=update.__doc__, description=update.__doc__
    )
    command.set_defaults(run=update)
    add_folder_and_layers(command)

    command = commands.add_parser(
        "verify", help=verify.__doc__, description=verify.__doc__
    )
    command.set_defaults(run=verify)
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
    except (CommandError, OSError) as error:
        print(f"tinyblock: error: {error}", file=sys.stderr)
        return 2
    return code
