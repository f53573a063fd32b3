"""The command `tinyblock`: copy layers into a project, and keep the copies up to date.

header    The first lines of a copy: name, version, license, repository, and comments that
          keep linters and formatters from reporting or changing the copy.
original  What a release of tinyblock writes as a copy: a header, then the file of the release.
base      The original that a copy was taken from. A copy minus its base is the user's edits.
          The original in a later release minus the base is the changes in tinyblock.
lock      The file `tinyblock.lock` beside the copies, with the version and text of each base.
          With it, git can merge edits and changes without a network.

A command that writes first plans a step for each file. An error in the plan leaves all
files as they are. Then the command replaces the files one by one, each in a single
operation, and the lock after each file. An interrupted command leaves no file
half-written; repeat the command to complete it. Two commands that write in the same
folder take turns.

This file has three parts: releases and copies, the commands, and texts and files.
"""

import argparse
import ast
import difflib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from importlib.resources import files
from importlib.resources.abc import Traversable
from itertools import pairwise
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import NoReturn

from . import LAYERS, __version__

try:
    import fcntl
except ImportError:  # on Windows, where commands do not take turns
    fcntl = None  # type: ignore[assignment]

LOCK = "tinyblock.lock"
LICENSE = "LICENSE.tinyblock"  # the copy of LICENSE
WITHOUT_CONTRACT = ("parallelize", "typecheck")  # can be copied, but are no layers
TEST_SETUP = ("contract/__init__.py", "contract/conftest.py")  # no test imports these
CONFLICT_MARKS = re.compile(r"^(<{7}|>{7}) ", re.MULTILINE)

# What linters report of every layer, and the text that they report. The header
# disables a code only in a file with such a text, because ruff also reports
# codes that are disabled without need.
LINT_CODES = {
    "E501": r"^.{89}",  # lines of docstrings are longer than 88
    "F722": r'Tensor, "[^"]* ',  # names of axes are no Python expression
    "N812": r"functional as F$",
}


class CommandError(Exception):
    """A command failed. The message is one line."""


# Releases and copies


class State(Enum):
    """How a copy differs from its base and from this release, as `check` prints it."""

    MISSING = "missing"
    CONFLICT = "conflict markers"
    PRISTINE = "pristine"
    EDITED = "edited"
    OUTDATED = "outdated"
    EDITED_AND_OUTDATED = "edited, outdated"


class Outcome(Enum):
    """What a command did to a copy, as it prints it."""

    COPIED = "copied"
    RECORDED = "recorded"
    RECORDED_WITH_EDITS = "recorded, with your edits"
    UPDATED = "updated"
    MERGED = "merged with your edits"
    CONFLICT = "conflict markers: resolve them"
    KEPT = "edited, kept"
    UP_TO_DATE = "up to date"
    GONE = f"no longer in tinyblock: delete it, and its entry in {LOCK}"


@dataclass(frozen=True)
class Original:
    """What a release writes as a copy."""

    name: str  # of the copy, relative to the folder of copies
    version: str
    text: str

    @property
    def label(self) -> str:
        return f"tinyblock {self.version}: {self.name}"


@dataclass(frozen=True)
class Release:
    """The tinyblock that copies are taken from. Its files may be in a zip archive."""

    root: Traversable
    version: str
    layers: tuple[str, ...]
    repository: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The names that `add` accepts."""
        return (*self.layers, *WITHOUT_CONTRACT)

    def source(self, name: str) -> str | None:
        """Return the file that is copied as `name`, or None if this release has none."""
        path = self.root.joinpath("LICENSE" if name == LICENSE else name)
        return decode(path.read_bytes()) if path.is_file() else None

    def original(self, name: str) -> Original | None:
        """Return the text to write as `name`, or None if this release has no such file."""
        source = self.source(name)
        if source is None:
            return None
        header = "" if name == LICENSE else self._header(name, source)
        return Original(name, self.version, header + source)

    def _header(self, name: str, source: str) -> str:
        lines = [first_line(f"tinyblock {self.version}: {name}")]
        license_ = self.source(LICENSE) or ""
        lines += re.findall(r"^Copyright .*", license_, re.MULTILINE)[:1]
        lines.append("SPDX-License-Identifier: MIT")
        if self.repository:
            lines.append(self.repository)
        codes = [
            code
            for code, pattern in LINT_CODES.items()
            if re.search(pattern, source, re.MULTILINE)
        ]
        if codes:
            lines.append(f"flake8: noqa: {', '.join(codes)}")  # ruff reads it, too
        lines.append("fmt: off")
        return "".join(f"# {line}\n" for line in lines)

    def file_of(self, layer: str) -> str:
        """Return the file of a layer, or raise a CommandError that suggests a layer."""
        if layer in self.names:
            return f"{layer}.py"
        layer_of_name = self._names_in_lower_case()
        similar = difflib.get_close_matches(layer.casefold(), layer_of_name, n=1)
        fix = f": did you mean {layer_of_name[similar[0]]}?" if similar else ""
        raise CommandError(
            f"LAYER must be one of {', '.join(self.names)}, got {layer!r}{fix}"
        )

    def _names_in_lower_case(self) -> dict[str, str]:
        """Return the layer of each layer's name, and of each public class and function."""
        layers = {name.casefold(): name for name in self.names}
        for name in self.names:
            source = self.source(f"{name}.py") or ""
            for public in re.findall(r"^(?:class|def) (\w+)", source, re.MULTILINE):
                layers.setdefault(public.casefold(), name)
        return layers

    def imports(self, name: str) -> set[str]:
        """Return the files of this release that a file imports."""
        candidates = relative_imports(name, self.source(name) or "")
        return {file for file in candidates if self.source(file) is not None}


def installed_release() -> Release:
    """Return the tinyblock that is running."""
    return Release(
        root=files("tinyblock"),
        version=__version__,
        layers=tuple(layer.__name__.rpartition(".")[2] for layer in LAYERS),
        repository=installed_repository(),
    )


def installed_repository() -> str:
    """Return the repository in the metadata of the running tinyblock, or ""."""
    try:
        metadata = importlib.metadata.metadata("tinyblock")
    except importlib.metadata.PackageNotFoundError:  # it runs without installation
        return ""
    for label_and_url in metadata.get_all("Project-URL") or []:
        label, _, url = label_and_url.partition(", ")
        if label.casefold() == "repository":
            return str(url)
    return ""


@dataclass(frozen=True)
class Copy:
    """A file in a folder of copies, its base, and its original in this release."""

    path: Path
    content: bytes | None  # None: the file is missing
    base: Original
    original: Original | None  # None: this release has no such file

    @property
    def name(self) -> str:
        return self.base.name

    @property
    def text(self) -> str | None:
        return None if self.content is None else decode(self.content)

    @property
    def state(self) -> State:
        if self.text is None:
            return State.MISSING
        if CONFLICT_MARKS.search(self.text):
            return State.CONFLICT
        is_edited = self.text != self.base.text
        is_outdated = self.changes() != ""
        if is_edited and is_outdated:
            return State.EDITED_AND_OUTDATED
        if is_edited:
            return State.EDITED
        if is_outdated:
            return State.OUTDATED
        return State.PRISTINE

    def require_unchanged(self) -> None:
        """Raise a CommandError if the file has changed since it was read."""
        if content_of(self.path) != self.content:
            raise CommandError(
                f"{self.path} was changed by another program: run the command again"
            )

    def edits(self) -> str:
        """Return the user's edits as a unified diff."""
        path = self.path.as_posix()
        return unified_diff(self.base.text, self.text or "", self.base.label, path)

    def changes(self) -> str:
        """Return the changes in tinyblock since the base as a unified diff.

        A difference of the headers alone is no change.
        """
        new = self.original or self.base
        is_same = without_header(new.text) == without_header(self.base.text)
        if is_same:
            return ""
        old_text = self._with_new_version(self.base.text)
        return unified_diff(old_text, new.text, self.base.label, new.label)

    def merged(self, new: Original) -> "Step":
        """Return the step that merges the changes up to `new` with the user's edits."""
        text, has_conflicts = merge(
            mine=self._with_new_version(self.text or ""),
            base=self._with_new_version(self.base.text),
            theirs=new.text,
            labels=(self.path.as_posix(), self.base.label, new.label),
        )
        outcome = Outcome.CONFLICT if has_conflicts else Outcome.MERGED
        return Step(self, outcome, text, new)

    def _with_new_version(self, text: str) -> str:
        """Replace the version in the header, so that it neither differs nor conflicts."""
        new = self.original or self.base
        return text.replace(self.base.label, new.label, 1)


@dataclass(frozen=True)
class Step:
    """What a command does to one copy."""

    copy: Copy
    outcome: Outcome
    text: str | None  # of the copy afterwards
    base: Original  # of the copy afterwards

    def imports(self) -> set[str]:
        """Return the files that the copy may import, and that its original imports, too."""
        name = self.copy.name
        of_original = relative_imports(name, self.base.text)
        if self.outcome is Outcome.CONFLICT:  # conflict markers are no Python
            return of_original
        return of_original & relative_imports(name, self.text or "")


def step_to_release(copy: Copy) -> Step:
    """Return the step that brings a copy to this release, and keeps the user's edits."""
    new = copy.original
    if new is None:
        return Step(copy, Outcome.GONE, copy.text, copy.base)
    if copy.text == new.text:
        return Step(copy, Outcome.UP_TO_DATE, new.text, new)
    match copy.state:
        case State.MISSING:
            return Step(copy, Outcome.COPIED, new.text, new)
        case State.CONFLICT:
            return Step(copy, Outcome.CONFLICT, copy.text, copy.base)
        case State.OUTDATED:
            return Step(copy, Outcome.UPDATED, new.text, new)
        case State.EDITED:
            return Step(copy, Outcome.KEPT, copy.text, copy.base)
        case State.EDITED_AND_OUTDATED:
            return copy.merged(new)
        case State.PRISTINE:  # only the version differs
            return Step(copy, Outcome.UP_TO_DATE, copy.text, copy.base)


class Folder:
    """A folder of copies, and its lock."""

    def __init__(self, path: Path, release: Release) -> None:
        self.path = path
        self.release = release
        lock = self.inside(LOCK)
        self.has_lock = lock.exists()
        self.bases = parse_lock(lock) if self.has_lock else {}
        for base in self.bases.values():
            require_not_newer(base.version, release.version)

    def select(self, layers: Sequence[str] = ()) -> list[Copy]:
        """Return the copies of these layers and their tests; without layers, all copies."""
        copies_of: dict[str, list[Copy]] = {}
        for name in self.bases:
            layer = PurePosixPath(name).stem.removeprefix("test_")
            copies_of.setdefault(layer, []).append(self.copy(name))
        for layer in layers:
            if layer not in copies_of:
                known = [name for name in self.release.names if name in copies_of]
                raise CommandError(
                    f"LAYER must be one of the copies in {self.path} "
                    f"({', '.join(known)}), got {layer!r}"
                )
        selected = []
        for layer, copies in copies_of.items():
            if not layers or layer in layers:
                selected += copies
        return sorted(selected, key=lambda copy: copy.name)

    def copy(self, name: str) -> Copy:
        """Return a copy. Raise a CommandError if the file was not copied from tinyblock."""
        path = self.inside(name)
        content = content_of(path)
        text = decode(content or b"")
        original = self.release.original(name)
        if name in self.bases:
            base = self.bases[name]
            if original is not None and has_changes(text, base, original):
                base = original
            return Copy(path, content, base, original)
        if original is None:
            raise CommandError(f"tinyblock {self.release.version} has no {name}")
        if content is not None and not is_copy_by_hand(text, original):
            raise CommandError(
                f"{path} exists, but is not in {LOCK}: move it to another folder"
            )
        return Copy(path, content, original, original)

    def plan(self, names: Iterable[str], with_tests: bool = False) -> list[Step]:
        """Return the steps that bring files, and all that they import, to this release.

        With tests, each layer comes with its test. Nothing is written.
        """
        steps: dict[str, Step] = {}
        waiting = list(names)
        while waiting:
            name = waiting.pop()
            if name not in steps:
                steps[name] = self._step(name)
                waiting += self._needed_by(steps[name], with_tests)
        return [steps[name] for name in sorted(steps, key=layers_first)]

    def _needed_by(self, step: Step, with_tests: bool) -> list[str]:
        """Return the files of this release that a copy needs, apart from itself."""
        name = step.copy.name
        needed = step.imports()
        if name.startswith("contract/test_"):
            needed.update(TEST_SETUP)
        if with_tests:
            needed.add(f"contract/test_{name}")
        return [file for file in needed if self.release.source(file) is not None]

    def _step(self, name: str) -> Step:
        copy = self.copy(name)
        if name not in self.bases and copy.content is not None:
            return self._step_to_record(copy)
        return step_to_release(copy)

    def _step_to_record(self, copy: Copy) -> Step:
        """Return the step for a copy by hand: write the header if nothing is lost by that."""
        if copy.text in (self.release.source(copy.name), copy.base.text):
            return Step(copy, Outcome.RECORDED, copy.base.text, copy.base)
        return Step(copy, Outcome.RECORDED_WITH_EDITS, copy.text, copy.base)

    def carry_out(self, steps: Iterable[Step]) -> None:
        """Write the files, and the lock after each."""
        for step in steps:
            copy = step.copy
            if step.text is not None and step.text != copy.text:
                copy.require_unchanged()
                content = encode(step.text, like=copy.content or b"")
                replace_file(copy.path, content)
            if step.base != self.bases.get(copy.name):
                self.bases[copy.name] = step.base
                self._write_lock()

    def _write_lock(self) -> None:
        entries = {
            name: {"version": base.version, "text": base.text}
            for name, base in sorted(self.bases.items())
        }
        content = json.dumps(entries, indent=1) + "\n"
        replace_file(self.inside(LOCK), content.encode())

    def inside(self, name: str) -> Path:
        """Return the path of a file, or raise a CommandError if it is not in the folder."""
        path = self.path / name
        if self.path.resolve() not in path.resolve().parents:
            raise CommandError(f"{path} must be in {self.path}, got {path.resolve()}")
        return path


def require_not_newer(version: str, installed: str) -> None:
    """Raise a CommandError if copies are from a newer tinyblock than the installed one."""
    if numbers_of(version) > numbers_of(installed):
        raise CommandError(
            f"the copies are from tinyblock {version}, newer than the installed "
            f"{installed}: upgrade tinyblock"
        )


def numbers_of(version: str) -> tuple[int, ...]:
    """Return (1, 2, 3) for 1.2.3 and for 1.2.3.dev4."""
    release = re.match(r"[0-9.]*", version)
    assert release
    return tuple(int(number) for number in release[0].split(".") if number)


def parse_lock(path: Path) -> dict[str, Original]:
    """Return the bases that a lock contains, or raise a CommandError."""
    text = decode(path.read_bytes())
    bases = {}
    try:
        for name, entry in json.loads(text).items():
            bases[name] = Original(name, str(entry["version"]), str(entry["text"]))
    except (ValueError, TypeError, LookupError, AttributeError):
        problem = "is damaged"
        if CONFLICT_MARKS.search(text):
            problem = "has conflict markers"
        raise CommandError(
            f"{path} {problem}: restore it from your repository"
        ) from None
    return bases


def open_folder(path: Path, release: Release) -> Folder:
    """Return a folder that has a lock, or raise a CommandError."""
    if path.is_file():
        raise CommandError(
            f"{path} is a file: give the folder of the copies, {path.parent}"
        )
    folder = Folder(path, release)
    if not folder.has_lock:
        below = [*path.glob(f"*/{LOCK}"), *path.glob(f"*/*/{LOCK}")]
        fix = "`tinyblock add LAYER --to DIR` writes one"
        if below:
            fix = f"did you mean {below[0].parent}?"
        raise CommandError(f"there is no {LOCK} in {path}: {fix}")
    return folder


# The commands. Each returns its exit code.

EXAMPLES = """examples:
  tinyblock list
  tinyblock add rope --to my_project/layers
  tinyblock check my_project/layers
  tinyblock diff my_project/layers rope --upstream
  tinyblock update my_project/layers
  tinyblock verify my_project/layers -k "not causality"

exit codes: 0 success; 1 findings (an outdated or missing copy, a conflict, a failed
property); 2 error; 130 interruption
"""


def list_(arguments: argparse.Namespace, release: Release) -> int:
    """List what can be copied."""
    for name in release.names:
        source = release.source(f"{name}.py") or ""
        docstring = ast.get_docstring(ast.parse(source)) or ""
        title = re.split("[:,.]", docstring)[0]
        needs = ", ".join(needed_layers(name, release))
        if needs:
            title += f" (needs {needs})"
        print(f"{name:11}  {title}")
    return 0


def needed_layers(name: str, release: Release) -> list[str]:
    """Return the layers that a layer imports, but none that one of these imports, too."""
    direct = release.imports(f"{name}.py")
    indirect = set[str]()
    for file in direct:
        indirect |= release.imports(file)
    return [file.removesuffix(".py") for file in sorted(direct - indirect)]


def add(arguments: argparse.Namespace, release: Release) -> int:
    """Copy layers, and what they import, into a folder."""
    path = arguments.folder
    names = [release.file_of(layer) for layer in arguments.layers]
    if path.is_file():
        raise CommandError(f"{path} is a file: give the folder of the copies")
    path.mkdir(parents=True, exist_ok=True)
    with exclusive(path):
        folder = Folder(path, release)
        steps = folder.plan(names, arguments.with_tests)
        steps += folder.plan([LICENSE])
        folder.carry_out(steps)
    print_steps(steps)
    print_hints(folder, steps)
    return exit_code(steps)


def check(arguments: argparse.Namespace, release: Release) -> int:
    """Report edited, outdated and missing copies."""
    copies = open_folder(arguments.folder, release).select(arguments.layers)
    rows = []
    for copy in copies:
        if copy.state is not State.PRISTINE:
            rows.append((copy.name, describe_state(copy, release.version)))
    print_rows(rows)
    print_count(len(copies) - len(rows), "pristine")
    accepted = {State.PRISTINE}
    if not arguments.fail_on_edits:
        accepted.add(State.EDITED)
    return int(any(copy.state not in accepted for copy in copies))


def describe_state(copy: Copy, version: str) -> str:
    """Return the state of a copy; of an outdated copy, also its version and this one."""
    state = copy.state
    if state in (State.OUTDATED, State.EDITED_AND_OUTDATED):
        return f"{state.value}: {copy.base.version} -> {version}"
    return state.value


def diff(arguments: argparse.Namespace, release: Release) -> int:
    """Show your edits, and later changes in tinyblock."""
    copies = open_folder(arguments.folder, release).select(arguments.layers)
    diffs = []
    shows_edits = not arguments.upstream
    shows_changes = not arguments.mine
    if shows_edits:
        diffs += [copy.edits() for copy in copies]
    if shows_changes:
        diffs += [copy.changes() for copy in copies]
    patch = encode("".join(diffs))
    # As bytes: the encoding of the terminal must not change a patch.
    sys.stdout.buffer.write(patch)
    return 0


def update(arguments: argparse.Namespace, release: Release) -> int:
    """Merge later changes in tinyblock with your edits."""
    open_folder(arguments.folder, release)  # raises an error if there is no lock
    with exclusive(arguments.folder):
        folder = open_folder(arguments.folder, release)
        names = [copy.name for copy in folder.select(arguments.layers)]
        steps = folder.plan(names)
        folder.carry_out(steps)
    print_steps(steps)
    return exit_code(steps)


def verify(arguments: argparse.Namespace, release: Release) -> int:
    """Test copies, with your edits, against the contracts of tinyblock's layers."""
    target = arguments.target
    require_one_target(target, arguments.pytest)
    if importlib.util.find_spec("pytest") is None:
        raise CommandError("verify requires pytest: python -m pip install pytest")
    contract = release.root.joinpath("contract")
    if not isinstance(contract, Path):
        raise CommandError(f"verify cannot read {contract}: install tinyblock with pip")
    settings = str(contract / "contract.ini")  # instead of the user's
    options = ["-c", settings, f"--rootdir={contract}", "-p", "no:cacheprovider"]
    # With a space instead of "=", pytest would load the conftest.py of the target.
    tests = [str(contract), f"--layers={target}"]
    code = run_pytest([*options, *tests, *arguments.pytest])
    if code == NO_TESTS:
        raise CommandError(
            "the arguments for pytest must select at least one test, got none: "
            "`tinyblock verify TARGET --collect-only -q` lists the tests"
        )
    return code if code in (0, 1) else 2


HELP = ("-h", "--help")
PYTEST_FLAGS = re.compile("-[lqsvx]+")  # options of pytest that have no value
NO_TESTS = 5  # exit codes of pytest
WRONG_USAGE = 4


def require_target_first(argv: Sequence[str]) -> None:
    """Raise a CommandError for `verify -k x DIR`, which argparse would explain badly."""
    option = argv[1] if len(argv) > 1 else ""
    if argv[:1] == ["verify"] and option.startswith("-") and option not in HELP:
        raise CommandError(
            f"verify takes the target first: tinyblock verify TARGET {option} ..."
        )


def require_one_target(target: str, arguments: Sequence[str]) -> None:
    """Raise a CommandError for a second target, which pytest would not test."""
    for previous, argument in pairwise([target, *arguments]):
        is_option = argument.startswith("-")
        is_value = previous.startswith("-") and not PYTEST_FLAGS.fullmatch(previous)
        if not is_option and not is_value and Path(argument).exists():
            raise CommandError(
                f"verify takes one target, got {target} and {argument}: "
                "run it for each, or give the folder of both"
            )


RUN_PYTEST = """
import pathlib, sys, pytest
code = pytest.main(sys.argv[2:])
pathlib.Path(sys.argv[1]).write_text(str(int(code)))
"""


def run_pytest(arguments: Sequence[str]) -> int:
    """Run pytest in another process, and return its exit code.

    The process writes this code to a file, because a copy that calls sys.exit(0) ends
    the process with 0, too.
    """
    environment = os.environ.copy()
    environment.pop("PYTEST_ADDOPTS", None)
    with TemporaryDirectory() as folder:
        report = Path(folder, "exit-code")
        command = [sys.executable, "-c", RUN_PYTEST, str(report), *arguments]
        done = subprocess.run(
            command, env=environment, stderr=subprocess.PIPE, check=False
        )
        code = int(report.read_text()) if report.exists() else None
    errors = decode(done.stderr)
    if code == WRONG_USAGE:
        raise CommandError(usage_error_in(errors))
    print(errors, end="", file=sys.stderr)
    if code is None:
        advice = "see the error above"
        if done.returncode == 0:
            advice = "look for a call of sys.exit in the copies"
        raise CommandError(
            f"the tests ended early, with exit code {done.returncode}: {advice}"
        )
    return code


def usage_error_in(errors: str) -> str:
    """Return the message in what pytest prints about wrong arguments, without its usage."""
    messages = re.findall(r"(?:ERROR|error): (?!usage: )(.+)", errors)
    return messages[0] if messages else errors


def exit_code(steps: Sequence[Step]) -> int:
    """Return 1 if a copy has conflicts, else 0."""
    outcomes = [step.outcome for step in steps]
    return int(Outcome.CONFLICT in outcomes)


def print_steps(steps: Sequence[Step]) -> None:
    rows = [
        (step.copy.name, step.outcome.value)
        for step in steps
        if step.outcome is not Outcome.UP_TO_DATE
    ]
    print_rows(rows)
    print_count(len(steps) - len(rows), "up to date")


def print_rows(rows: Sequence[tuple[str, str]]) -> None:
    """Print names, and what there is to say about each, in columns."""
    width = max((len(name) for name, _ in rows), default=0)
    for name, shown in rows:
        print(f"{name:{width}}  {shown}")


def print_count(count: int, outcome: str) -> None:
    """Print how many copies have the usual outcome, unless none has it."""
    if count:
        print(f"{count} {outcome}")


def print_hints(folder: Folder, steps: Sequence[Step]) -> None:
    """Print what new copies need."""
    new = [step for step in steps if step.outcome is Outcome.COPIED]
    texts = {step.copy.name: step.text or "" for step in new}
    texts.pop(LICENSE, None)
    packages = imported_packages(texts.values())
    if packages:
        print(f"needs {', '.join(packages)}")
    # Tests have an __init__.py of their own.
    layers = [name for name in texts if "/" not in name]
    relative = [name for name in layers if relative_imports(name, texts[name])]
    if relative and not folder.inside("__init__.py").exists():
        where = folder.path / "__init__.py"
        print(f"{relative[0]} imports other copies: create {where}, which may be empty")
    if "block.py" in texts and "rope.py" not in folder.bases:
        command = f"tinyblock add rope --to {folder.path}"
        print(f"Block has no positional encoding unless you pass rope=: {command}")


def main(argv: Sequence[str] | None = None, release: Release | None = None) -> int:
    """Run a command with the files of a release (default: this one), and return the exit code."""
    release = release or installed_release()
    argv = sys.argv[1:] if argv is None else argv
    try:
        require_target_first(argv)
        arguments = parser_of(release).parse_args(argv)
        code: int = arguments.run(arguments, release)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # for example, of `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13
    except KeyboardInterrupt:
        print("tinyblock: interrupted", file=sys.stderr)
        return 130
    except (CommandError, OSError) as error:
        print(f"tinyblock: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


class OneLineParser(argparse.ArgumentParser):
    """Report wrong arguments in one line, without the usage, and exit with 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def parser_of(release: Release) -> OneLineParser:
    parser = OneLineParser(
        "tinyblock",
        description="Copy layers into your project, and keep the copies up to date.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=EXAMPLES,
    )
    version = f"tinyblock {release.version}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    add_command(commands, list_)

    adding = add_command(commands, add)
    names = ", ".join(release.names)
    folder = "new or existing folder"
    tests = "also copy the tests of the layers"
    adding.add_argument("layers", nargs="+", metavar="LAYER", help=names)
    adding.add_argument(
        "--to", dest="folder", required=True, type=_path, metavar="DIR", help=folder
    )
    adding.add_argument("--with-tests", action="store_true", help=tests)

    checking = add_command(commands, check)
    add_copies(checking)
    edits = "also exit with 1 if a copy has edits"
    checking.add_argument("--fail-on-edits", action="store_true", help=edits)

    diffing = add_command(commands, diff)
    add_copies(diffing)
    sides = diffing.add_mutually_exclusive_group()
    changes = "only changes in tinyblock"
    sides.add_argument("--mine", action="store_true", help="only your edits")
    sides.add_argument("--upstream", action="store_true", help=changes)

    updating = add_command(commands, update)
    add_copies(updating)

    verifying = add_command(commands, verify)
    target = "a folder, a .py file, or the name of an importable module"
    more = 'arguments for pytest, such as -k "not causality" or -v'
    verifying.add_argument("target", metavar="TARGET", help=target)
    verifying.add_argument("pytest", nargs=argparse.REMAINDER, metavar="...", help=more)
    return parser


def add_command(
    commands: "argparse._SubParsersAction[OneLineParser]",
    run: Callable[[argparse.Namespace, Release], int],
) -> OneLineParser:
    """Add a command with the name and the docstring of the function that runs it."""
    name = run.__name__.strip("_")
    example = re.search(rf"tinyblock {name}\b.*", EXAMPLES)
    assert example, name
    parser = commands.add_parser(
        name,
        help=run.__doc__,
        description=run.__doc__,
        epilog=f"example: {example[0]}",
    )
    parser.set_defaults(run=run)
    return parser


def add_copies(parser: OneLineParser) -> None:
    """Add the arguments that select copies in a folder."""
    some = "only these layers (default: all)"
    parser.add_argument("folder", type=_path, metavar="DIR", help="folder of copies")
    parser.add_argument("layers", nargs="*", metavar="LAYER", help=some)


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError(
            "must be a path, got an empty string; for the current folder, give ."
        )
    return Path(text)


# Texts and files


def first_line(label: str) -> str:
    """Return the first line of the header of a copy, without the comment sign."""
    return f"Copied from {label} (license: {LICENSE})"


def has_changes(text: str, base: Original, new: Original) -> bool:
    """Return whether a text already has the changes from `base` to `new`.

    A merge also changes the version in the header. Then the lock is written. If that
    is interrupted, the lock keeps the old base.
    """
    has_markers = f"\n>>>>>>> {new.label}\n" in text
    has_new_header = first_line(new.label) in text
    has_old_header = first_line(base.label) in text
    return has_markers or (has_new_header and not has_old_header)


def relative_imports(name: str, text: str) -> set[str]:
    """Return the files that a file may import; none if the text is no Python.

    A name that is imported from a package need not be a file.
    """
    found = set[str]()
    if not name.endswith(".py"):
        return found
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return found
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            found |= files_of_import(node, PurePosixPath(name))
    return found


def files_of_import(node: ast.ImportFrom, path: PurePosixPath) -> set[str]:
    """Return the files that a relative import in a file may read; none above all copies."""
    # One dot is the folder of the file, two dots are the folder above it.
    folders = path.parents
    if node.level > len(folders):
        return set()
    folder = folders[node.level - 1]
    modules = [alias.name for alias in node.names]
    if node.module:
        modules = [node.module]
    return {(folder / f"{module}.py").as_posix() for module in modules}


def imported_packages(texts: Iterable[str]) -> list[str]:
    """Return the packages to install that files import, in order of appearance."""
    modules = list[str]()
    for text in texts:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                modules += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                modules.append(node.module)
    packages = list[str]()
    for module in modules:
        package = module.partition(".")[0]
        if package not in packages and package not in sys.stdlib_module_names:
            packages.append(package)
    return packages


def layers_first(name: str) -> tuple[bool, str]:
    """Return what files are sorted by: those in folders, such as tests, are last."""
    return "/" in name, name


def without_header(text: str) -> str:
    """Remove the comments at the start of a file, which include its header."""
    return re.sub(r"\A(#.*\n)*", "", text)


def is_copy_by_hand(text: str, original: Original) -> bool:
    """Return whether a text equals the original, whatever its header."""
    return without_header(text) == without_header(original.text)


def decode(content: bytes) -> str:
    """Return the text, with "\\n" for "\\r\\n" if most lines end in that."""
    text = content.decode(errors="surrogateescape")
    return text.replace("\r\n", "\n") if newline_of(content) == "\r\n" else text


def encode(text: str, like: bytes = b"") -> bytes:
    """Return the content of a file, with the line endings of `like`."""
    return text.replace("\n", newline_of(like)).encode(errors="surrogateescape")


def newline_of(content: bytes) -> str:
    return "\r\n" if 2 * content.count(b"\r\n") > content.count(b"\n") else "\n"


def unified_diff(old: str, new: str, old_name: str, new_name: str) -> str:
    """Return the difference of two texts in the format of `git diff`."""
    old_lines = re.findall(r".*\n|.+", old)
    new_lines = re.findall(r".*\n|.+", new)
    lines = list(difflib.unified_diff(old_lines, new_lines, old_name, new_name))
    for number, line in enumerate(lines):
        if not line.endswith("\n"):
            lines[number] = f"{line}\n\\ No newline at end of file\n"
    return "".join(lines)


def merge(
    mine: str, base: str, theirs: str, labels: tuple[str, str, str]
) -> tuple[str, bool]:
    """Merge two texts that come from `base`; return the text and whether it has conflicts."""
    sides = {"mine": mine, "base": base, "theirs": theirs}
    command = ["git", "merge-file", "-p", "--diff3"]
    for label in labels:
        command += ["-L", label]
    with TemporaryDirectory() as folder:
        for name, text in sides.items():
            path = Path(folder, name)
            path.write_bytes(encode(text))
            command.append(str(path))
        try:
            done = subprocess.run(command, capture_output=True, check=False)
        except FileNotFoundError:
            raise CommandError(
                f"{labels[0]} has edits to merge with changes in tinyblock: install git"
            ) from None
    if not 0 <= done.returncode < 128:  # else the number of conflicts
        reason = decode(done.stderr) or f"exit code {done.returncode}"
        raise CommandError(f"git could not merge {labels[0]}: {reason}")
    return decode(done.stdout), done.returncode > 0


def content_of(path: Path) -> bytes | None:
    """Return the content of a file, or None if there is no file."""
    return path.read_bytes() if path.exists() else None


def replace_file(path: Path, content: bytes) -> None:
    """Write a file in one step: other programs see the old content or the new one.

    A process that is killed may leave the temporary file, which the next one replaces.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    temporary.write_bytes(content)
    if path.exists():
        shutil.copymode(path, temporary)  # now, because the mode may be read-only
    os.replace(temporary, path)


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Wait until no other command writes in the folder.

    The system keeps this lock with the process: it ends when the process is killed.
    """
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another tinyblock in {folder}", file=sys.stderr)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
