"""Copies of the layers in other projects: take them, tell what was edited, and merge what has changed here since.

A folder of copies holds, beside them, LICENSE.tinyblock and one lock file. The lock file names the version that each
copy comes from and keeps its pristine text, the base of every three-way merge, so nothing here needs a network. Texts
are compared with "\\n" at the end of each line, and written with the line ends that the copy has.

Only the standard library is imported, and nothing is written but what a function of this file was asked to write: all
of it or, if anything goes wrong, none.
"""

import ast
import difflib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from .. import __version__
from .staging import Busy, ChangedMeanwhile, Staging

__all__ = ["LAYERS", "Action", "Copies", "Edited", "Entry", "Layer", "Refusal", "State", "Upstream", "merge"]

LAYERS = ("rmsnorm", "ffn", "rope", "attention", "block", "transformer")
TESTS = ("contract", "test_contract")
COMPANIONS = {"attention": ("rope",), "block": ("rope",)}  # what the tests of a layer need that it does not import
TYPECHECK = ("typecheck",)
LICENCE = "LICENSE.tinyblock"
SOURCES = {f"{name}.py": f"{name}.py" for name in LAYERS + TESTS + TYPECHECK} | {LICENCE: "LICENSE"}  # copy: file here
LOCK = "tinyblock.lock"
LOCK_VERSION = 1

_FILE_NAME = re.compile(rf"[a-z][a-z0-9_]*\.py|{re.escape(LICENCE)}")  # so no entry can lead out of its folder
_VERSION = re.compile(r"\d{1,9}(\.\d{1,9}){0,3}[\w.+-]{0,40}", re.ASCII)
_HEADER = re.compile(r"^# Pristine SHA-256: ([0-9a-f]{64})$", re.MULTILINE)
_MARKS = re.compile(
    r"^(<{7} .*/\S+\.\w+|\|{7} tinyblock \d\S*|>{7} tinyblock \d\S*)$", re.MULTILINE
)  # those of `_merge`


class Refusal(Exception):
    """What was asked for cannot be done; the message is one line, and nothing on the disk has changed."""


class State(StrEnum):
    """How a copy stands to the text that it was taken from, and to that of this tinyblock."""

    PRISTINE = "pristine"
    EDITED = "edited"
    OUTDATED = "outdated"
    BOTH = "both"
    MISSING = "missing"
    CONFLICT = "conflict"  # with marks of a merge that are not resolved yet
    MISMATCH = "mismatch"  # its header names another text than the lock file, and not that of this tinyblock either

    @property
    def is_outdated(self) -> bool:
        return self in (State.OUTDATED, State.BOTH)


class Action(StrEnum):
    """What `add` and `update` do to a file."""

    COPIED = "copied"
    ADOPTED = "there already, now in the lock file"
    CURRENT = "up to date"
    KEPT = "kept, with your edits"
    MISSING = "missing, left so"
    GONE = "no longer in tinyblock, left as it is"
    UPDATED = "updated"
    MERGED = "merged with your edits"
    CONFLICT = "CONFLICT"
    UNRESOLVED = "has conflict marks: resolve them"
    MISMATCH = "is of another version than the lock file says: restore one of them"


_UNCLEAR = {State.CONFLICT: Action.UNRESOLVED, State.MISMATCH: Action.MISMATCH}  # so it is left as it is


@dataclass(frozen=True)
class Layer:
    """What a layer file says of itself; read from its text, which is not run."""

    name: str
    summary: str
    convention: str
    siblings: tuple[str, ...]
    packages: tuple[str, ...]
    exports: tuple[str, ...]

    @classmethod
    def read(cls, name: str, text: str) -> "Layer":
        tree = ast.parse(text)
        docstring = ast.get_docstring(tree) or ""
        convention = re.search(r"^Convention: (.*?)(?=^[A-Z]\w+: |\Z)", docstring, re.MULTILINE | re.DOTALL)
        siblings, packages, exports = set(), set(), list[str]()
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and node.level:
                siblings |= {node.module} if node.module else {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                packages.add(str(node.module).partition(".")[0])
            elif isinstance(node, ast.Import):
                packages |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                exports = ast.literal_eval(node.value)
        return cls(
            name,
            summary=docstring.partition("\n")[0],
            convention=" ".join(convention[1].split()) if convention else "",
            siblings=tuple(sorted(siblings)),
            packages=tuple(sorted(packages - sys.stdlib_module_names)),
            exports=tuple(exports),
        )


@dataclass(frozen=True)
class Upstream:
    """The tinyblock that copies are taken from: a folder of layer files, which may lie in a zip archive."""

    root: Traversable
    version: str

    @classmethod
    def installed(cls) -> "Upstream":
        return cls(files("tinyblock"), __version__)

    def entry(self, name: str) -> "Entry | None":
        """Return what a copy of that name would be taken from, or None where this tinyblock has nothing of the kind."""
        source = self.root.joinpath(SOURCES[name]) if name in SOURCES else None
        if source is None or not source.is_file():
            return None
        return Entry(name, f"tinyblock/{source.name}", self.version, _decode(source.read_bytes()))

    def layer(self, name: str) -> Layer:
        entry = self.entry(f"{name}.py")
        if entry is None:
            raise Refusal(f"tinyblock {self.version} has no {name}.py")
        return Layer.read(name, entry.pristine)

    def require_layer(self, name: str) -> None:
        """Raise a Refusal, with the nearest name, unless `name` is a layer."""
        if name in LAYERS:
            return
        bare = name.replace("\\", "/").rpartition("/")[2].removesuffix(".py").casefold()
        homes = {export.casefold(): layer.name for layer in self.layers() for export in layer.exports}
        near = difflib.get_close_matches(bare, [*LAYERS, *homes], n=1)
        way_out = f"did you mean {homes.get(near[0], near[0])}?" if near else f"there are {', '.join(LAYERS)}"
        raise Refusal(f"there is no layer {name!r}: {way_out}")

    def layers(self) -> list[Layer]:
        return [self.layer(name) for name in LAYERS]

    def with_siblings(self, names: Iterable[str]) -> list[str]:
        """Return `names` and all that they import from tinyblock, each once, what is imported first."""
        found: list[str] = []

        def visit(name: str) -> None:
            if name not in found:
                for sibling in self.layer(name).siblings:
                    visit(sibling)
                found.append(name)

        for name in names:
            visit(name)
        return found


@dataclass(frozen=True)
class Entry:
    """A file that was taken: the name of the copy, where it comes from, and the text that it had there."""

    name: str
    source: str
    version: str
    pristine: str
    before: "Entry | None" = None  # what it was before a merge with conflicts, until they are resolved

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(_encode(self.pristine)).hexdigest()

    @property
    def header(self) -> str:
        """The comment that leads a copy; the SHA-256 is that of the text below it. The licence itself has none."""
        if self.name == LICENCE:
            return ""
        return (
            f"# Copied from tinyblock {self.version}: {self.source} (licence: {LICENCE})\n"
            f"# Pristine SHA-256: {self.sha256}\n"
            "# SPDX-License-Identifier: MIT\n"
        )

    @property
    def text(self) -> str:
        """The whole copy, as `add` writes it."""
        return self.header + self.pristine


@dataclass
class Copies:
    """A folder of copies, and the tinyblock that is installed.

    Raises:
        Refusal: the path is a file, or the lock file is not to be trusted.
        OSError: something cannot be read.
    """

    folder: Path
    upstream: Upstream

    def __post_init__(self) -> None:
        self.root = self._resolved(self.folder)
        existing = next(path for path in (self.root, *self.root.parents) if path.exists())
        if not existing.is_dir():
            raise Refusal(f"{existing} is a file, not a folder")
        self._read = dict[Path, bytes | None]()  # what every decision rests on
        self.entries = self._read_lock()

    def require_lock(self) -> "Copies":
        """Raise a Refusal unless something was copied here."""
        if not self.root.is_dir():
            raise Refusal(f"there is no folder {self.folder}")
        if not self._path(LOCK).is_file():
            raise Refusal(f"{self.folder} has no {LOCK}: nothing was copied there with `tinyblock add`")
        return self

    def text(self, name: str) -> str | None:
        """Return the copy as it is now, or None where it is missing."""
        content = self._content(name)
        return None if content is None else _decode(content)

    def state(self, name: str) -> State:
        mine, new = self.text(name), self._new(name)
        if mine is None:
            return State.MISSING
        if _MARKS.search(mine):
            return State.CONFLICT
        if new is not None and mine == new.text:
            return State.PRISTINE
        base = self._base(name, mine)
        if base is None:
            return State.MISMATCH
        if new is not None and new.pristine != base.pristine:
            return State.OUTDATED if mine == base.text else State.BOTH
        return State.PRISTINE if mine == base.text else State.EDITED

    def states(self) -> dict[str, State]:
        return {name: self.state(name) for name in self.entries}

    def is_gone(self, name: str) -> bool:
        """Tell whether this tinyblock no longer has the file."""
        return self._new(name) is None

    def edits(self, name: str) -> str:
        """Return what was edited in a copy, as a unified diff that has the line ends of the copy."""
        base, mine, newline = self._base_or_entry(name), self.text(name), _newline(self._content(name) or b"")
        mine = None if mine is None else _with_newline(mine, newline)
        labels = f"tinyblock {base.version}/{name}", self._shown(name)
        return unified_diff(_with_newline(base.text, newline), mine, *labels)

    def news(self, name: str) -> str:
        """Return what has changed in tinyblock since a copy was taken, as a unified diff."""
        base, new = self._base_or_entry(name), self._new(name)
        if new is None or new.pristine == base.pristine:
            return ""
        labels = (f"tinyblock {version}/{name}" for version in (base.version, new.version))
        return unified_diff(base.pristine, new.pristine, *labels)

    def add(
        self, names: Sequence[str], *, with_tests: bool = False, with_typecheck: bool = False, dry_run: bool = False
    ) -> dict[str, Action]:
        """Copy layers, and what they import from tinyblock, into the folder; return what was done to each file.

        With their tests come the layers that these need besides. A sibling that is there with edits is kept. Asked for
        by name, it is no longer the layer that was asked for.

        Raises:
            Refusal: an unknown layer; a folder inside tinyblock; another file of that name; an older copy; another run.
            Edited: a layer that was asked for is there, with edits.
            OSError: the folder cannot be written to.
        """
        self._require_outside_the_package()
        for name in names:
            self.upstream.require_layer(name)
        layers = self.upstream.with_siblings(names)
        tests = [*TESTS, *(companion for layer in layers for companion in COMPANIONS.get(layer, ()))]
        modules = [*layers, *(tests if with_tests else ()), *(TYPECHECK if with_typecheck else ())]
        wanted = [*(f"{name}.py" for name in modules), LICENCE]
        with self._held(dry_run) as staging:
            actions = {name: self._action_of_add(name) for name in wanted}
            edited = [f"{name}.py" for name in names if actions[f"{name}.py"] is Action.KEPT]
            if edited:
                raise Edited("".join(map(self.edits, edited)), edited)
            taken = [name for name, action in actions.items() if action in (Action.COPIED, Action.ADOPTED)]
            entries = {name: self._require_new(name) for name in taken}
            copied = {name: entry.text for name, entry in entries.items() if actions[name] is Action.COPIED}
            self._write(staging, entries, copied)
        return actions

    def update(self, dry_run: bool = False) -> dict[str, Action]:
        """Bring every outdated copy up to this tinyblock, edits kept; return what was done to each file.

        Where both changed the same lines, the copy gets git's conflict marks, and stays beside as NAME.orig.

        Raises:
            Refusal: no git, where a merge needs it; a clash of names; another run.
            OSError: the folder cannot be written to.
        """
        with self._held(dry_run) as staging:
            actions, entries, texts = dict[str, Action](), dict[str, Entry](), dict[str, str]()
            for name, entry in self.entries.items():
                actions[name], changed, text = self._action_of_update(name, entry)
                if changed is not None:
                    entries[name] = changed
                if text is not None:
                    texts[name] = text
            layers = [name.removesuffix(".py") for name in texts if name.removesuffix(".py") in LAYERS]
            for name in (f"{layer}.py" for layer in self.upstream.with_siblings(layers)):
                if name not in self.entries:  # the new version imports a sibling that the old one did not
                    actions[name] = self._action_of_add(name)
                    entries[name] = self._require_new(name)
                    texts |= {name: entries[name].text} if actions[name] is Action.COPIED else {}
            self._write(staging, entries, texts, [name for name, done in actions.items() if done is Action.CONFLICT])
        return actions

    def _action_of_add(self, name: str) -> Action:
        text, shown, new = self.text(name), self._shown(name), self._require_new(name)
        if name not in self.entries:
            if text is None and not os.path.lexists(self.root / name):
                return Action.COPIED
            if text == new.text:  # the lock file was lost
                return Action.ADOPTED
            if text is not None and _HEADER.search(text):
                raise Refusal(
                    f"{shown} is a copy, with edits, that {LOCK} does not know: restore that from your repository"
                )
            raise Refusal(f"{shown} is there already, and no copy of tinyblock's: move it, or choose another folder")
        state = self.state(name)
        if state in _UNCLEAR:
            raise Refusal(f"{shown} {_UNCLEAR[state]}")
        if state.is_outdated:
            version = self.entries[name].version
            raise Refusal(f"{shown} is of an earlier tinyblock ({version}): run `tinyblock update {self.folder}` first")
        return {State.MISSING: Action.COPIED, State.EDITED: Action.KEPT}.get(state, Action.CURRENT)

    def _action_of_update(self, name: str, entry: Entry) -> tuple[Action, Entry | None, str | None]:
        """Return what an update does to a copy, and the new entry and text that it gets, if any."""
        state, mine, new = self.state(name), self.text(name), self._new(name)
        if state in _UNCLEAR:
            return _UNCLEAR[state], None, None
        if new is None or mine is None:
            return Action.GONE if new is None else Action.MISSING, None, None
        base = self._base_or_entry(name)
        if state is State.OUTDATED:
            return Action.UPDATED, new, new.text
        if state is State.BOTH:
            text, has_conflicts = self._merge(mine, base, new)
            # Who restores the file before has the old text again: it is kept until the conflicts are resolved.
            kept = replace(new, before=replace(base, before=None))
            return (Action.CONFLICT, kept, text) if has_conflicts else (Action.MERGED, new, text)
        is_settled = entry.before is None and entry.pristine == new.pristine
        return Action.CURRENT, None if is_settled else new, None

    def _base(self, name: str, mine: str) -> Entry | None:
        """Return what a copy was taken from or last merged with: what its header names, as long as it has one."""
        entry = self.entries[name]
        named = _HEADER.findall(mine)
        known = (entry, self._new(name), entry.before)
        return next((base for base in known if base is not None and base.sha256 in named), None if named else entry)

    def _base_or_entry(self, name: str) -> Entry:
        """Return the base of a copy, or what the lock file has where the copy is missing or at odds with that."""
        mine = self.text(name)
        return (None if mine is None else self._base(name, mine)) or self.entries[name]

    def _new(self, name: str) -> Entry | None:
        return self.upstream.entry(name)

    def _require_new(self, name: str) -> Entry:
        if (new := self._new(name)) is None:
            raise Refusal(f"tinyblock {self.upstream.version} has no {name}")
        return new

    def _shown(self, name: str) -> str:
        return (self.folder / name).as_posix()

    def _merge(self, mine: str, base: Entry, new: Entry) -> tuple[str, bool]:
        header = ""
        for old_line, new_line in zip(base.header.splitlines(True), new.header.splitlines(True), strict=True):
            if old_line in mine:  # the same in all three texts, wherever the copy has it, so it conflicts with nothing
                mine, header = mine.replace(old_line, new_line, 1), header + new_line
        labels = self._shown(new.name), f"tinyblock {base.version}", f"tinyblock {new.version}"
        return merge(mine, header + base.pristine, header + new.pristine, labels)

    def _resolved(self, path: Path) -> Path:
        try:
            return path.resolve()
        except RuntimeError:  # what Python before 3.13 makes of a loop
            raise Refusal(f"{path} is a symbolic link that leads back to itself") from None

    def _path(self, name: str) -> Path:
        """Return where a file of the folder lies; a symbolic link is followed, but not out of the folder."""
        path = self._resolved(self.root / name)
        if not path.is_relative_to(self.root):
            raise Refusal(f"{self._shown(name)} is a symbolic link that leads out of the folder")
        return path

    def _content(self, name: str) -> bytes | None:
        path = self._path(name)
        if path not in self._read:
            if path.exists() and not path.is_file():
                raise Refusal(f"{self._shown(name)} is there already, and is no file: move it")
            self._read[path] = path.read_bytes() if path.exists() else None
        return self._read[path]

    def _require_outside_the_package(self) -> None:
        for package in (self.upstream.root, Path(__file__).parents[1]):
            if isinstance(package, Path) and self.root.is_relative_to(package.resolve()):
                raise Refusal(
                    f"{self.folder} lies inside the tinyblock package itself: choose a folder of your project"
                )

    def _read_lock(self) -> dict[str, Entry]:
        content, shown = self._content(LOCK), self._shown(LOCK)
        if content is None:
            return {}
        try:
            lock = json.loads(content, object_pairs_hook=_without_duplicates)
            version = lock["lock_version"]
            if type(version) is not int or version < 1:
                raise ValueError("lock_version is no number from 1 on")
            if version > LOCK_VERSION:
                raise Refusal(f"{shown} is from a newer tinyblock (lock version {version}): upgrade tinyblock")
            entries = {name: _entry(name, fields) for name, fields in lock["files"].items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            what = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise Refusal(f"{shown} is corrupt ({what}): restore it from your repository") from None
        for entry in entries.values():
            new = self._new(entry.name)
            differs = new is None or new.pristine != entry.pristine
            if differs and _numbers(entry.version) > _numbers(self.upstream.version):
                versions = f"tinyblock {entry.version}, newer than the installed {self.upstream.version}"
                raise Refusal(f"{self._shown(entry.name)} is of {versions}: upgrade tinyblock")
        return entries

    @contextmanager
    def _held(self, dry_run: bool) -> Iterator[Staging | None]:
        """Keep other runs away from the folder, and read it anew; a dry run neither needs that nor writes."""
        self._require_writable(self.root)
        if dry_run:
            yield None
            return
        try:
            with Staging(self.root) as staging:
                self._read.clear()
                self.entries = self._read_lock()
                yield staging
        except Busy as error:
            ways_out = f"if none is, delete {error} (where NAME.old is a file as it was), and repeat"
            raise Refusal(f"another run is at work there, or was killed: {ways_out}") from None
        except ChangedMeanwhile as error:
            raise Refusal(f"{error} was changed meanwhile by another program: repeat") from None

    def _require_writable(self, path: Path) -> None:
        existing = next(parent for parent in (path, *path.parents) if parent.exists())
        if not os.access(existing, os.W_OK | os.X_OK if existing.is_dir() else os.W_OK):
            raise Refusal(f"{existing} is not writable")

    def _write(
        self,
        staging: Staging | None,
        entries: Mapping[str, Entry],
        texts: Mapping[str, str],
        backups: Sequence[str] = (),
    ) -> None:
        """Write texts of copies, and the lock file with new entries; in a dry run, without `staging`, only check."""
        if not entries:
            return
        contents = dict[Path, bytes]()
        for name in backups:
            contents[self.root / self._free_name(f"{name}.orig")] = self._content(name) or b""
        for name, text in texts.items():
            content = self._content(name)
            contents[self._path(name)] = _encode(_with_newline(text, _newline(content or b"")))
        ordered = dict(sorted({**self.entries, **entries}.items()))
        lock = {"lock_version": LOCK_VERSION, "files": {name: _fields(entry) for name, entry in ordered.items()}}
        contents[self._path(LOCK)] = json.dumps(lock, indent=1, ensure_ascii=False).encode() + b"\n"  # last of all
        if len(contents) != len(backups) + len(texts) + 1:
            raise Refusal(f"two of {', '.join(texts)} are the same file, by a symbolic link")
        for path in contents:
            self._require_writable(path)
        if staging is not None:
            staging.replace_all(contents, self._read)
            self._read.clear()
            self.entries = ordered

    def _free_name(self, name: str) -> str:
        candidates = (name, *(f"{name}{number}" for number in range(2, 1000)))
        return next(candidate for candidate in candidates if not os.path.lexists(self.root / candidate))


class Edited(Exception):
    """A layer that was to be copied is there already and was edited; nothing on the disk has changed."""

    def __init__(self, diff: str, names: list[str]) -> None:
        super().__init__(diff)
        self.diff, self.names = diff, names


def merge(mine: str, base: str, theirs: str, labels: tuple[str, str, str]) -> tuple[str, bool]:
    """Merge two texts that come from `base`, with `git merge-file`; return the text and whether it has conflicts.

    Raises:
        Refusal: git is not there, or does not merge such a text.
    """
    git = shutil.which("git")
    if git is None:
        raise Refusal(f"{labels[0]} was edited and has changed in tinyblock too: to merge the two, install git")
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, name) for name in ("mine", "base", "theirs")]
        for path, text in zip(paths, (mine, base, theirs), strict=True):
            path.write_bytes(_encode(text))
        named = [argument for label in labels for argument in ("-L", label)]
        # Neither the repository around nor a hook's variables are to change the outcome.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        command = [git, "merge-file", "-p", *named, *map(str, paths)]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False)
    text, has_conflicts = _decode(done.stdout), done.returncode > 0
    # What calls itself git may be something else, such as a stub that asks to be installed.
    added = {line for side in (mine, theirs) for line in side.splitlines()} - set(base.splitlines())
    marks = {f"<<<<<<< {labels[0]}", f">>>>>>> {labels[2]}"} if has_conflicts else set()
    if not 0 <= done.returncode < 128 or not added | marks <= set(text.splitlines()):
        answer = " ".join(_decode(done.stderr).split()) or f"exit code {done.returncode}, {len(text)} characters"
        raise Refusal(f"git could not merge {labels[0]}: {answer}")
    return text, has_conflicts


def unified_diff(old: str, new: str | None, old_name: str, new_name: str) -> str:
    """Return the difference of two texts as `git diff` shows it; None is a text that is not there."""
    if new is None:
        new, new_name = "", os.devnull

    def with_last_newline(lines: Iterator[str]) -> Iterator[str]:
        for line in lines:
            yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"

    lines = difflib.unified_diff(re.findall(r".*\n|.+", old), re.findall(r".*\n|.+", new), old_name, new_name)
    return "".join(with_last_newline(lines))


def _entry(name: str, fields: Mapping[str, Any]) -> Entry:
    """Return an entry as the lock file has it.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: it is not to be trusted.
    """
    if not _FILE_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a file in its folder")
    before = _entry(name, fields["before"]) if "before" in fields else None
    entry = Entry(name, fields["source"], fields["version"], "\n".join(fields["pristine"]), before)
    if not _VERSION.fullmatch(entry.version):
        raise ValueError(f"{entry.version!r} is no version")
    if not re.fullmatch(r"tinyblock/[\w.]+", entry.source, re.ASCII):
        raise ValueError(f"{entry.source!r} is no file of tinyblock")
    if entry.sha256 != fields["sha256"]:
        raise ValueError(f"the pristine text of {name} does not have its SHA-256")
    return entry


def _fields(entry: Entry) -> dict[str, Any]:
    """Return what the lock file holds of an entry; the text is a list of lines, for the sake of its diffs."""
    before = {} if entry.before is None else {"before": _fields(entry.before)}
    pristine = entry.pristine.split("\n")
    return {"source": entry.source, "version": entry.version, "sha256": entry.sha256, "pristine": pristine, **before}


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key is there twice")
    return dict(pairs)


def _newline(content: bytes) -> str:
    """Return what ends most lines."""
    return "\r\n" if 2 * content.count(b"\r\n") > content.count(b"\n") else "\n"


def _with_newline(text: str, newline: str) -> str:
    return text.replace("\n", newline)


def _decode(content: bytes) -> str:
    """Return a text as it is compared: lines end in "\\n" where most of them ended in "\\r\\n"; no byte is lost."""
    text = content.decode(errors="surrogateescape")
    return text.replace("\r\n", "\n") if _newline(content) == "\r\n" else text


def _encode(text: str) -> bytes:
    return text.encode(errors="surrogateescape")


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, 0.10.1 after 0.9; what follows them does not count."""
    return tuple(map(int, re.findall(r"\d+", version)[:3]))
