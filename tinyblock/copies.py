"""Copy layers into a project, and keep the copies up to date: the command `tinyblock`.

    layers/rope.py                  the copy: a header, the layer, and the user's edits
    layers/.tinyblock/rope.py.base  the base: what tinyblock wrote as that copy

The copy minus its base is the user's edits. What this release writes minus the base is
what changed in tinyblock. `update` lets git merge the two. Users commit both files, and
there is no other state: repeat a command that was interrupted, and git merges again.
Each file is replaced whole, and never a file that is not a copy.

This file runs on Python 3.10, and only `verify` requires packages. So it reads the files
of tinyblock as text, and imports none of them.
"""

import argparse
import ast
import difflib
import importlib
import importlib.util
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import NoReturn

ROOT = Path(__file__).parent
# These are of use to tinyblock alone.
NOT_COPIED = ("__init__.py", "__main__.py", "copies.py", "contract/mistakes.py")
# The first line of each layer's docstring, by the name that `add` takes.
TITLES = {
    path.stem: path.read_text("utf-8").partition("\n")[0].strip('"')
    for path in sorted(ROOT.glob("*.py"))
    if path.name not in NOT_COPIED
}
INIT = (ROOT / "__init__.py").read_text("utf-8")
VERSION = re.findall(r'^__version__ = "(.+)"', INIT, re.MULTILINE)[0]
LICENSE = "LICENSE.tinyblock"
# flake8 and ruff skip a file with the line `flake8: noqa`, and formatters with the last
# line. ruff reports a list of rules in place of the former as unused, and deletes it. Its
# rule PGH004, which requires such a list, needs a line of its own.
HEADER = f"""\
# Copied from tinyblock {{version}}: {{name}}
# Copyright (c) 2026 The tinyblock authors, MIT license: see {LICENSE}
# ruff: noqa: PGH004
# flake8: noqa
# fmt: off
"""
LEADING_COMMENTS = re.compile(r"\A\ufeff?(#.*\n|\r?\n)*")
COPIED_FROM = re.compile(
    r"^(\ufeff?# Copied from tinyblock )(\S+): (\S+)", re.MULTILINE
)
# What `git diff --check` calls a leftover conflict marker.
MARKER = re.compile(r"^(<{7}|\|{7}|={7}|>{7})(\s|$)", re.MULTILINE)
CONFLICT = "conflict markers: resolve them"
BASE_AGAIN = "edited, and has a base again"


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
    def has_conflict_with_this_release(self) -> bool:
        return f"\n>>>>>>> tinyblock {VERSION}\n" in self.text

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

    def plan(self) -> tuple[str, dict[Path, str]]:
        """Return what `update` does, and the exact texts of the files that it writes.

        The files are written in this order. After a stop between a base and a copy, the
        copy is missing. After a stop between a copy and a base, the base is missing or
        old, and git merges again: it takes what both sides have.
        """
        if not self.new:
            return self.state, {}
        new_base = {self.base_path: with_line_ends_of(self.base_path, self.new)}
        new_copy = {self.path: with_line_ends_of(self.path, self.new)}
        if not self.text:
            restored = {self.path: with_line_ends_of(self.base_path, self.new)}
            return "copied", new_base | restored
        if not self.base:
            if self.text != self.new and version_in(self.text) == VERSION:
                return BASE_AGAIN, new_base
            return "copied", new_copy | new_base
        if self.has_conflict_with_this_release and self.version != VERSION:
            return CONFLICT, new_base  # an update was stopped before it wrote the base
        if self.has_conflict:
            return self.state, {}
        if not self.is_outdated:
            return "up to date" if self.text == self.base else "edited", {}
        if self.text == self.base:
            return "updated", new_copy | new_base
        text = self.merge()
        row = CONFLICT if MARKER.search(text) else "merged with your edits"
        return row, {self.path: text} | new_base

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
            try:
                done = subprocess.run(command, cwd=folder, capture_output=True)
            except FileNotFoundError as error:
                raise CommandError(
                    f"git must be on PATH to merge your edits of {self.path}: install it"
                ) from error
        merged = done.stdout.decode()
        # git exits with the number of conflicts, or with more than 127 after an error. A
        # program that only stands for git, as on a new Mac, prints no file.
        conflicts = done.returncode
        is_marked = MARKER.search(merged) is not None
        if not merged or not 0 <= conflicts <= 127 or is_marked != (conflicts > 0):
            reason = done.stderr.decode(errors="replace").strip()
            raise CommandError(f"git cannot merge {self.path}: {reason}")
        return header + merged


def read_copy(folder: Path, name: str) -> Copy:
    """Read a copy, which may be missing, and its base."""
    path = folder / name
    base_path = base_of(folder, name)
    text = read(path)
    version = version_in(text)  # users may delete headers
    if is_own(folder, name):
        other = f"run `add` of tinyblock {version}" if version else "move it away"
        raise CommandError(
            f"{path} is not a copy with a base: restore {base_path}, or {other}"
        )
    base = without_stray_spaces(read(base_path))
    if base and (not version_in(base) or MARKER.search(base)):
        raise CommandError(
            f"{base_path} must be as tinyblock wrote it: restore it or, after a merge of "
            "two branches, take the whole file from the branch with the newer version"
        )
    # An interrupted update leaves a copy from this release with an older base.
    if version not in ("", version_in(base), VERSION):
        raise CommandError(
            f"{path} is from tinyblock {version}, but its base is from "
            f"{version_in(base)}: restore it together with {base_path}"
        )
    missing_imports = [  # a missing copy with a base is reported by itself
        imported
        for imported in sorted(imports_of(folder, name, text))
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
        # A renamed copy has the name of its source in its base.
        new="" if is_newer else written_as(source_in(base) or name),
        missing_imports=missing_imports,
    )


def is_own(folder: Path, name: str) -> bool:
    """Return whether the user has a file of this name that is not a copy.

    A file as tinyblock writes it is a copy, and so is a file from this release: copied
    by hand, or by a command that was interrupted, or without the base that it had.
    """
    if not (folder / name).exists() or read(base_of(folder, name)):
        return False
    text = read(folder / name)
    return text != read(ROOT / name) and version_in(text) != VERSION


def is_module(path: Path) -> bool:
    """Return whether Python can import a file such as ffn.py, or a folder ffn."""
    return path.exists() or path.with_suffix("").is_dir()


def is_in_release(name: str) -> bool:
    """Return whether this release has a file that can be copied."""
    return name not in NOT_COPIED and (ROOT / name).is_file()


def written_as(name: str) -> str:
    """Return what this release writes as a copy, or "" if it has no such file."""
    if not is_in_release(name):
        return ""
    return HEADER.format(version=VERSION, name=name) + read(ROOT / name)


def layer_name(path: str) -> str:
    """Return the layer of a file: "rope" for rope, rope.py and layers/test_rope.py."""
    return PurePath(path).name.removesuffix(".py").removeprefix("test_")


def base_of(folder: Path, name: str) -> Path:
    return folder / ".tinyblock" / f"{name}.base"


def version_in(text: str) -> str:
    """Return the version in a header, or "" if there is none."""
    found = COPIED_FROM.search(split_header(text)[0])
    return found[2] if found else ""


def source_in(text: str) -> str:
    """Return the name of the copied file in a header, or "" if there is none."""
    found = COPIED_FROM.search(split_header(text)[0])
    return found[3] if found else ""


def numbers(version: str) -> list[int]:
    """Return three numbers, so that a release candidate is not newer than the release."""
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


def split_header(text: str) -> tuple[str, str]:
    """Return the comments that a file begins with, and the layer below."""
    layer = LEADING_COMMENTS.sub("", text)
    return text.removesuffix(layer), layer


def renumber(text: str) -> str:
    """Write this version into a header. A new number is neither an edit nor a change."""
    header, layer = split_header(text)
    return COPIED_FROM.sub(rf"\g<1>{VERSION}: \g<3>", header, count=1) + layer


def without_stray_spaces(text: str) -> str:
    """Undo what a tool may do to a base, in which no line ends with a space."""
    lines = text.removeprefix("\ufeff").rstrip().split("\n")
    return "\n".join(line.rstrip() for line in lines) + "\n" if text.strip() else ""


def imports_of(folder: Path, name: str, text: str) -> dict[str, list[str]]:
    """Return the files of tinyblock that a copy imports, and the names from each.

    In my_package/layers/block.py, `from .ffn import SwiGLU`, `from . import ffn` and
    `import my_package.layers.ffn` import ffn.py.
    """
    try:
        tree = ast.parse(text.encode())
    except (SyntaxError, ValueError):  # the user is not done with it
        return {}
    imports: list[tuple[int, str, list[str]]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module, names = node.module or "", [alias.name for alias in node.names]
            imports.append((node.level, module, names))
            # Each name may be a module, too.
            imports += [(node.level, f"{module}.{each}", []) for each in names]
        elif isinstance(node, ast.Import):
            imports += [(0, alias.name, []) for alias in node.names]
    found: defaultdict[str, list[str]] = defaultdict(list)
    for level, module, names in imports:
        file = file_of(folder.resolve(), name, level, module)
        if file:
            found[file] += names
    return found


def file_of(folder: Path, importer: str, level: int, module: str) -> str:
    """Return the file of tinyblock that a file in the folder imports as a module, or ""."""
    if level:  # 1 stands for the folder of the importer, 2 for the folder above it
        roots = (folder / importer).parents[level - 1 : level]
    elif (folder / "__init__.py").exists():
        roots = folder.parents[:]
    else:  # Python may also import a file from the folder itself
        roots = (folder, *folder.parents)
    for root in roots:
        path = root.joinpath(*module.split("."))
        if path.is_relative_to(folder):
            name = f"{path.relative_to(folder).as_posix()}.py"
            if is_in_release(name):
                return name
    return ""


def copies_in(folder: Path, layers: Sequence[str]) -> list[Copy]:
    """Return the copies that a folder has of these layers and their tests.

    Without layers, return all copies.
    """
    require_folder(folder)
    bases = folder / ".tinyblock"
    names = [
        base.relative_to(bases).with_suffix("").as_posix()
        for base in sorted(bases.rglob("*.base"))
    ]
    require_bases(folder, [name for name in names if read(base_of(folder, name))])
    absent = sorted(set(layers) - set(map(layer_name, names)))
    if absent and set(absent).issubset(TITLES):
        raise CommandError(
            f"{folder} has no copy of {' '.join(absent)}: run `{add_command(folder, absent)}`"
        )
    if absent or not names:
        what = f"copy of {' '.join(absent)}" if absent else "copies"
        raise CommandError(
            f"{folder} has no {what}: `{started_as()} list` prints what `add` can copy"
        )
    return [
        read_copy(folder, name)
        for name in names
        if not layers or layer_name(name) in layers
    ]


def require_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise CommandError(f"DIR must be a folder, got the file {folder}")
    if folder.is_symlink() and not folder.exists():
        raise CommandError(f"DIR must be a folder, got a link to nothing, {folder}")


def require_bases(folder: Path, names: Sequence[str]) -> None:
    """Require a base of each file that says in its header that it is a copy.

    Otherwise it would never be updated again. names: the copies that have a base.
    """
    versions = {}
    for path in sorted([*folder.glob("*.py"), *folder.glob("contract/*.py")]):
        name = path.relative_to(folder).as_posix()
        text = path.read_bytes().decode(errors="replace") if path.is_file() else ""
        source = source_in(text)
        if name in names or not source:
            continue
        if source == name:
            versions[name] = version_in(text)
        elif not (folder / source).exists():  # otherwise the user has duplicated it
            repair = f"rename it to {source}, and run `add`"
            if source in names:
                repair = f"rename {base_of(folder, source)} to {base_of(folder, name)}"
            raise CommandError(
                f"{path} was copied as {source}, and must have a base: {repair}, or "
                "delete its first line"
            )
    if not versions:
        return
    layers = sorted({layer_name(name) for name in versions} & TITLES.keys())
    command = add_command(folder, layers)
    if any(name.startswith("contract/") for name in versions):
        command += " --with-tests"
    raise CommandError(
        f"{', '.join(versions)} in {folder} must have bases: restore "
        f"{folder / '.tinyblock'}, or run `{command}` of tinyblock "
        f"{', '.join(sorted(set(versions.values())))}"
    )


def bring_up_to_date(folder: Path, copies: Iterable[Copy]) -> int:
    """Write and update copies and what they import, and return the exit code."""
    waiting = list(copies)
    rows: dict[str, str] = {}
    importers = defaultdict(list)  # of the files that are not copies
    texts: dict[Path, str] = {}
    if not (folder / LICENSE).exists():
        texts[folder / LICENSE] = read(ROOT / "LICENSE")
    while waiting:
        copy = waiting.pop()
        if copy.name in rows:
            continue
        rows[copy.name], written = copy.plan()
        texts |= written
        text = written.get(copy.path, copy.text)
        if MARKER.search(text):  # Python cannot read it
            text = copy.new
        for imported, names in imports_of(folder, copy.name, text).items():
            path = folder / imported
            is_folder = not path.exists() and path.with_suffix("").is_dir()
            if is_folder or is_own(folder, imported):
                what = f"{', '.join(names)} from it" if names else "it"
                importers[imported].append(f"{copy.name} imports {what}")
            else:
                waiting.append(read_copy(folder, imported))
    for path, text in texts.items():
        try:
            replace(path, text)
        except OSError as error:
            raise CommandError(
                f"{path} cannot be written: {error.strerror}: mend this, and repeat the "
                "command; no file is damaged"
            ) from error
    for name, imports in importers.items():
        rows[name] = f"kept, because it is not a copy: {'; '.join(sorted(imports))}"
    print_table(dict(sorted(rows.items())))
    warn_of_gitignore(folder, [base_of(folder, name) for name in rows])
    return int(any(row.startswith(CONFLICT) for row in rows.values()))


def replace(path: Path, text: str) -> None:
    """Write a file whole, or leave it as it is. It keeps its mode, and a link stays one.

    A file beside it gets the text, and takes its place when all is on the disk. A stop
    leaves this other file, which a repeated command writes again.
    """
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, partial)
        partial.replace(target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def warn_of_gitignore(folder: Path, bases: Iterable[Path]) -> None:
    """Name a base that git would leave out of a commit without a word."""
    names = [str(base.relative_to(folder)) for base in bases]
    command = ["git", "check-ignore", "--", *names]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True)
    except FileNotFoundError:  # there is no git
        return
    ignored = done.stdout.decode().splitlines()
    if ignored:
        print(
            f"git ignores {folder / ignored[0]}, without which a fresh clone cannot "
            "update: add the lines `!.tinyblock/` and `!*.base` to .gitignore"
        )


# The commands. Each returns its exit code.


def list_(arguments: argparse.Namespace) -> int:
    """List the files that can be copied."""
    print_table(TITLES)
    return 0


def add(arguments: argparse.Namespace) -> int:
    """Copy layers, and what they import, into a folder."""
    require_folder(arguments.folder)
    names = [f"{layer}.py" for layer in arguments.layers]
    pages = [f"contract/test_{layer}.py" for layer in arguments.layers]
    pages = [page for page in pages if is_in_release(page)]
    if arguments.with_tests and pages:
        names += ["contract/conftest.py", *pages]
    copies = [read_copy(arguments.folder, name) for name in names]
    code = bring_up_to_date(arguments.folder, copies)
    untested = [
        layer for layer in arguments.layers if f"contract/test_{layer}.py" not in pages
    ]
    if arguments.with_tests and untested:
        print(f"The contract has no tests of {', '.join(untested)}")
    if not (arguments.folder / "typecheck.py").exists():
        print(
            "Copies check no shapes by themselves. "
            f"`{add_command(arguments.folder, ['typecheck'])}` copies a file that does"
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
    # A package of its own, so that importing it takes neither tinyblock nor sys.path.
    package = ModuleType("tinyblock_contract")
    package.__path__ = [str(ROOT / "contract")]
    sys.modules[package.__name__] = package
    contract = importlib.import_module(f"{package.__name__}.verify")
    options = list(arguments.rest)
    layers = []
    while options and not options[0].startswith("-"):
        layers.append(layer_name(options.pop(0)))
    # `python3 tinyblock` puts this folder there, which would hide a user's rope.py.
    others = [path for path in sys.path if Path(path).resolve() != ROOT.resolve()]
    sys.path[:] = [os.getcwd(), *others]  # as `python -m pytest` does
    return int(contract.run(arguments.path.resolve(), layers, options))


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
        if path.is_symlink():
            raise CommandError(
                f"{path} is a link to {os.readlink(path)}, which does not exist: "
                "restore that file, or delete the link"
            )
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


def add_command(folder: Path, layers: Iterable[str]) -> str:
    return f"{started_as()} add {' '.join(layers)} --to {shlex.quote(str(folder))}"


def started_as() -> str:
    """Return how the user typed the command, for hints."""
    if Path(sys.argv[0]).is_dir():  # of a clone
        return f"{PurePath(sys.executable).name} {shlex.quote(sys.argv[0])}"
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
        default=(),  # otherwise an error says that it is required
        type=layer_name,
        metavar="LAYER",
        help="select a layer and its test (default: select all copies)",
    )


def parser() -> Parser:
    main_parser = Parser(started_as(), description=__doc__.partition("\n")[0])
    commands = main_parser.add_subparsers(metavar="COMMAND", required=True)

    def command_of(run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        name = run.__name__.removesuffix("_")
        command = commands.add_parser(name, help=run.__doc__, description=run.__doc__)
        command.set_defaults(run=run)
        return command

    command_of(list_)

    command = command_of(add)
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

    add_folder_and_layers(command_of(check))

    command = command_of(diff)
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

    add_folder_and_layers(command_of(update))

    command = command_of(verify)
    command.add_argument(
        "path",
        type=Path,
        metavar="DIR_OR_FILE",
        help="test the layers in this folder, or the one in this file",
    )
    rest = command.add_argument(
        "rest",
        nargs=argparse.REMAINDER,
        metavar="...",
        help="select layers by name (default: test all), then pass options to "
        "pytest, such as -x or -k float64",
    )
    rest.required = False  # otherwise an error names it beside a missing DIR_OR_FILE
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
