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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from . import __version__

__all__ = ["LAYERS", "Action", "Copies", "Edited", "Entry", "Layer", "Refusal", "State", "Upstream", "merge"]

LAYERS = ("rmsnorm", "ffn", "rope", "attention", "block", "transformer")
TESTS = ("contract", "test_contract")
TYPECHECK = ("typecheck",)
LICENCE = "LICENSE.tinyblock"
SOURCES = {f"{name}.py": f"{name}.py" for name in LAYERS + TESTS + TYPECHECK} | {LICENCE: "LICENSE"}  # copy: file here
LOCK = "tinyblock.lock"
LOCK_VERSION = 1

_FILE_NAME = re.compile(rf"[a-z_]\w*\.py|{re.escape(LICENCE)}", re.ASCII)  # so no entry can lead out of its folder
_VERSION = re.compile(r"\d+(\.\d+)*\S*", re.ASCII)
_CONFLICT = re.compile(r"^<{7} .*?^={7}$.*?^>{7} ", re.MULTILINE | re.DOTALL)


class Refusal(Exception):
    """What was asked for cannot be done; the message is one line, and nothing on the disk has changed."""


class State(StrEnum):
    """How a copy stands to the text that it was taken from, and to that of this tinyblock."""

    PRISTINE = "pristine"
    EDITED = "edited"
    OUTDATED = "outdated"
    BOTH = "both"
    MISSING = "missing"
    CONFLICT = "conflict"  # with the marks of a merge that nobody has resolved yet

    @property
    def is_outdated(self) -> bool:
        return self in (State.OUTDATED, State.BOTH)

    @property
    def is_edited(self) -> bool:
        return self in (State.EDITED, State.BOTH, State.CONFLICT)


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
        return cls(files(__package__), __version__)

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
        for path in (self.folder, *self.folder.parents):
            if path.exists():
                if not path.is_dir():
                    raise Refusal(f"{path} is a file, not a folder")
                break
        self.entries = self._read_lock()

    def require_lock(self) -> "Copies":
        """Raise a Refusal unless something was copied here."""
        if not self.folder.is_dir():
            raise Refusal(f"there is no folder {self.folder}")
        if not self._path(LOCK).is_file():
            raise Refusal(f"{self.folder} has no {LOCK}: nothing was copied there with `tinyblock add`")
        return self

    def text(self, name: str) -> str | None:
        """Return the copy as it is now, or None where it is missing."""
        path = self._path(name)
        return _decode(path.read_bytes()) if path.is_file() else None

    def state(self, name: str) -> State:
        entry, mine, new = self.entries[name], self.text(name), self._new(name)
        if mine is None:
            return State.MISSING
        if _CONFLICT.search(mine):
            return State.CONFLICT
        if new is not None and mine == new.text:  # also where an update was cut off before it wrote the lock
            return State.PRISTINE
        is_outdated, is_edited = new is not None and new.pristine != entry.pristine, mine != entry.text
        if is_outdated:
            return State.BOTH if is_edited else State.OUTDATED
        return State.EDITED if is_edited else State.PRISTINE

    def states(self) -> dict[str, State]:
        return {name: self.state(name) for name in self.entries}

    def edits(self, name: str) -> str:
        """Return what was edited in a copy, as a unified diff."""
        entry = self.entries[name]
        return unified_diff(entry.text, self.text(name), f"tinyblock {entry.version}/{name}", self._shown(name))

    def news(self, name: str) -> str:
        """Return what has changed in tinyblock since a copy was taken, as a unified diff."""
        entry, new = self.entries[name], self._new(name)
        if new is None or new.pristine == entry.pristine:
            return ""
        return unified_diff(
            entry.pristine, new.pristine, f"tinyblock {entry.version}/{name}", f"tinyblock {new.version}/{name}"
        )

    def add(self, names: Iterable[str], extras: Iterable[str] = (), dry_run: bool = False) -> dict[str, Action]:
        """Copy layers, and what they import from tinyblock, into the folder; return what was done to each file.

        A sibling that is there with edits is kept. Asked for by name, it is no longer the layer that was asked for.

        Raises:
            Refusal: an unknown layer; a folder inside tinyblock; another file of that name; an older copy.
            Edited: a layer that was asked for is there, with edits.
            OSError: the folder cannot be written to.
        """
        self._require_outside_the_package()
        names = list(names)
        for name in names:
            self.upstream.require_layer(name)
        wanted = [f"{name}.py" for name in [*self.upstream.with_siblings(names), *extras]]
        actions, changed = dict[str, Action](), list[str]()
        for name in [*wanted, LICENCE]:
            actions[name] = self._action_of_add(name)
            if actions[name] is Action.KEPT and name.removesuffix(".py") in names:
                changed.append(name)
        if changed:
            raise Edited("".join(self.edits(name) for name in changed), changed)
        taken = [name for name, action in actions.items() if action in (Action.COPIED, Action.ADOPTED)]
        self._write({name: self._require_new(name) for name in taken}, {}, dry_run)
        return actions

    def update(self, dry_run: bool = False) -> dict[str, Action]:
        """Bring every outdated copy up to this tinyblock, edits kept; return what was done to each file.

        Where both changed the same lines, the copy gets git's conflict marks, and stays beside as NAME.orig.

        Raises:
            Refusal: conflict marks of an earlier update; no git, where a merge needs it; a clash of names.
            OSError: the folder cannot be written to.
        """
        actions, entries, texts = dict[str, Action](), dict[str, Entry](), dict[str, str]()
        for name, state in self.states().items():
            if state is State.CONFLICT:
                raise Refusal(
                    f"{self._shown(name)} still has conflict marks (<<<<<<<): resolve them, then update again"
                )
            new, mine = self._new(name), self.text(name)
            if new is None or mine is None:
                actions[name] = Action.GONE if new is None else Action.MISSING
                continue
            actions[name] = Action.CURRENT
            if state is State.OUTDATED:
                actions[name] = Action.UPDATED
            elif state is State.BOTH:
                texts[name], conflicts = self._merge(name, mine, new)
                actions[name] = Action.CONFLICT if conflicts else Action.MERGED
            if new.pristine != self.entries[name].pristine:
                entries[name] = new
        layers = [name.removesuffix(".py") for name in entries if name.removesuffix(".py") in LAYERS]
        for name in (f"{layer}.py" for layer in self.upstream.with_siblings(layers)):
            if name not in self.entries:  # the new version imports a sibling that the old one did not
                actions[name] = self._action_of_add(name)
                entries[name] = self._require_new(name)
        backups = [name for name, action in actions.items() if action is Action.CONFLICT]
        self._write(entries, texts, dry_run, backups)
        return actions

    def _action_of_add(self, name: str) -> Action:
        text, shown, new = self.text(name), self._shown(name), self._require_new(name)
        if name not in self.entries:
            if text is None and not os.path.lexists(self.folder / name):
                return Action.COPIED
            if text == new.text:  # the lock file was lost, or never written
                return Action.ADOPTED
            raise Refusal(f"{shown} is there already, and no copy that {LOCK} knows: move it, or choose another folder")
        state = self.state(name)
        if state is State.CONFLICT:
            raise Refusal(f"{shown} has conflict marks (<<<<<<<): resolve them first")
        if state.is_outdated:
            version = self.entries[name].version
            raise Refusal(f"{shown} is of an earlier tinyblock ({version}): run `tinyblock update {self.folder}` first")
        return {State.MISSING: Action.COPIED, State.EDITED: Action.KEPT}.get(state, Action.CURRENT)

    def _new(self, name: str) -> Entry | None:
        return self.upstream.entry(name)

    def _require_new(self, name: str) -> Entry:
        if (new := self._new(name)) is None:
            raise Refusal(f"tinyblock {self.upstream.version} has no {name}")
        return new

    def _shown(self, name: str) -> str:
        return (self.folder / name).as_posix()

    def _merge(self, name: str, mine: str, new: Entry) -> tuple[str, bool]:
        old = self.entries[name]
        # With the new header in all three, it conflicts with nothing, wherever the copy has it, and whether or not.
        mine = mine.replace(old.header, new.header, 1) if old.header else mine
        labels = self._shown(name), f"tinyblock {old.version}", f"tinyblock {new.version}"
        return merge(mine, new.header + old.pristine, new.text, labels)

    def _path(self, name: str) -> Path:
        """Return where a file of the folder lies; a symbolic link is followed, but not out of the folder."""
        folder = self.folder.resolve()
        path = (folder / name).resolve()
        if not path.is_relative_to(folder):
            raise Refusal(f"{self._shown(name)} is a symbolic link that leads out of the folder")
        return path

    def _require_outside_the_package(self) -> None:
        for package in (self.upstream.root, Path(__file__).parent):
            if isinstance(package, Path) and self.folder.resolve().is_relative_to(package.resolve()):
                raise Refusal(
                    f"{self.folder} lies inside the tinyblock package itself: choose a folder of your project"
                )

    def _read_lock(self) -> dict[str, Entry]:
        path, shown = self._path(LOCK), self._shown(LOCK)
        if not path.exists():
            return {}
        try:
            lock = json.loads(path.read_bytes())
            version = int(lock["lock_version"])
            if version > LOCK_VERSION:
                raise Refusal(f"{shown} is from a newer tinyblock (lock version {version}): upgrade tinyblock")
            entries = {}
            for name, fields in lock["files"].items():
                if not _FILE_NAME.fullmatch(name):
                    raise Refusal(f"{shown} is corrupt: {name!r} is not the name of a file in its folder")
                entry = Entry(name, fields["source"], fields["version"], "\n".join(fields["pristine"]))
                if entry.sha256 != fields["sha256"]:
                    raise Refusal(f"{shown} is corrupt: the pristine text of {name} does not have its SHA-256")
                if not _VERSION.fullmatch(entry.version) or not isinstance(entry.source, str):
                    raise Refusal(f"{shown} is corrupt: {name} has no version or no source")
                entries[name] = entry
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            what = " ".join(str(error).split())
            raise Refusal(
                f"{shown} is corrupt ({type(error).__name__}: {what}): restore it from your repository"
            ) from None
        for entry in entries.values():
            new = self._new(entry.name)
            if new is not None and new.pristine != entry.pristine and _numbers(entry.version) > _numbers(new.version):
                versions = f"tinyblock {entry.version}, newer than the installed {new.version}"
                raise Refusal(f"{self._shown(entry.name)} is of {versions}: upgrade tinyblock")
        return entries

    def _write(
        self, entries: Mapping[str, Entry], texts: Mapping[str, str], dry_run: bool, backups: Iterable[str] = ()
    ) -> None:
        """Write the copies of `entries`, with the text of `texts` where it has one, and the lock file."""
        if not entries:
            return
        existing = next(path for path in (self.folder, *self.folder.absolute().parents) if path.exists())
        if not os.access(existing, os.W_OK):
            raise Refusal(f"{existing} is not writable")
        if dry_run:
            return
        contents = {}
        for name in backups:
            contents[self._free_name(f"{name}.orig")] = self._path(name).read_bytes()
        for name, entry in entries.items():
            path = self._path(name)
            newline = _newline(path.read_bytes()) if path.is_file() else b"\n"
            contents[name] = _encode(texts.get(name, entry.text)).replace(b"\n", newline)
        ordered = dict(sorted({**self.entries, **entries}.items()))
        files = {
            name: {
                "source": entry.source,
                "version": entry.version,
                "sha256": entry.sha256,
                "pristine": entry.pristine.split("\n"),
            }
            for name, entry in ordered.items()
        }
        lock = json.dumps({"lock_version": LOCK_VERSION, "files": files}, indent=1, ensure_ascii=False)
        contents[LOCK] = lock.encode() + b"\n"
        write_all(self.folder, {self._path(name): content for name, content in contents.items()})
        self.entries = ordered

    def _free_name(self, name: str) -> str:
        candidates = (name, *(f"{name}{number}" for number in range(2, 1000)))
        return next(candidate for candidate in candidates if not os.path.lexists(self.folder / candidate))


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
        done = subprocess.run([git, "merge-file", "-p", *named, *map(str, paths)], capture_output=True, check=False)
    if not 0 <= done.returncode < 128:
        raise Refusal(f"git could not merge {labels[0]}: {' '.join(_decode(done.stderr).split())}")
    return _decode(done.stdout), done.returncode > 0


def unified_diff(old: str, new: str | None, old_name: str, new_name: str) -> str:
    """Return the difference of two texts as `git diff` shows it; None is a text that is not there."""
    if new is None:
        new, new_name = "", os.devnull

    def with_last_newline(lines: Iterator[str]) -> Iterator[str]:
        for line in lines:
            yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"

    lines = difflib.unified_diff(re.findall(r".*\n|.+", old), re.findall(r".*\n|.+", new), old_name, new_name)
    return "".join(with_last_newline(lines))


def write_all(folder: Path, contents: Mapping[Path, bytes]) -> None:
    """Write every file, or none: on an error or an interrupt, all is put back as it was, and the folder too."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    staging: Path | None = None
    replaced = dict[Path, Path | None]()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=".tinyblock-", dir=folder))
        for number, (path, content) in enumerate(contents.items()):
            new, old = staging / f"{number}.new", staging / f"{number}.old"
            new.write_bytes(content)
            if path.exists():
                shutil.copy2(path, old)
                shutil.copymode(path, new)
        for number, path in enumerate(contents):
            old = staging / f"{number}.old"
            replaced[path] = old if old.exists() else None
            os.replace(staging / f"{number}.new", path)
    except BaseException:
        for path, before in replaced.items():
            if before is None:
                path.unlink(missing_ok=True)
            else:
                os.replace(before, path)
        if staging is not None:
            shutil.rmtree(staging)
        for path in missing:
            if path.exists():
                path.rmdir()
        raise
    shutil.rmtree(staging)


def _decode(content: bytes) -> str:
    """Return a text as it is compared: with "\\n" at the end of each line, and bytes that are not UTF-8 kept."""
    return content.decode(errors="surrogateescape").replace("\r\n", "\n")


def _encode(text: str) -> bytes:
    return text.encode(errors="surrogateescape")


def _newline(content: bytes) -> bytes:
    """Return what ends most lines."""
    return b"\r\n" if 2 * content.count(b"\r\n") > content.count(b"\n") else b"\n"


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, 0.10.1 after 0.9; what follows them does not count."""
    return tuple(map(int, version_match[0].split("."))) if (version_match := re.match(r"\d+(\.\d+)*", version)) else ()
