"""Copies of the layers in other projects: take them, tell what was edited, and merge what has changed here since.

A folder of copies holds, beside them, the licence and one lock file, so nothing here needs a network. Nothing is
written but what a function of this file was asked to write: all of it or, if anything goes wrong, none.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from . import Refusal
from .catalogue import Upstream
from .lock import HASH_LINE, LICENCE, LOCK, Entry, Original, parse_lock, render_lock, version_numbers
from .merging import CONFLICT_MARKS, decode, encode, merge, newline_of, unified_diff
from .staging import replace_all


class State(StrEnum):
    """How a copy stands to the text that it was taken from, and to that of this tinyblock."""

    PRISTINE = "pristine"
    EDITED = "edited"
    OUTDATED = "outdated"
    EDITED_AND_OUTDATED = "edited, outdated"
    MISSING = "missing"
    CONFLICT = "conflict"  # with marks of a merge that are not resolved yet
    LOCK_MISMATCH = "lock mismatch"  # its header names another text than the lock file and this tinyblock

    @property
    def is_outdated(self) -> bool:
        return self in (State.OUTDATED, State.EDITED_AND_OUTDATED)


class Action(StrEnum):
    """What `add` and `update` do to a file."""

    COPIED = "copied"
    ADOPTED = "there already, now in the lock file"
    UP_TO_DATE = "up to date"
    EDITS_KEPT = "kept, with your edits"
    MISSING = "missing, left so"
    GONE_UPSTREAM = "no longer in tinyblock, left as it is"
    UPDATED = "updated"
    MERGED = "merged with your edits"
    CONFLICT = "CONFLICT"
    REPLACED = "REPLACED, your edits are in NAME.orig"
    UNRESOLVED = "has conflict marks: resolve them"
    LOCK_MISMATCH = "is of another version than the lock file says: restore one of them"

    @property
    def needs_a_person(self) -> bool:
        return self in (Action.CONFLICT, Action.REPLACED, Action.UNRESOLVED, Action.LOCK_MISMATCH)


_UNCLEAR = {State.CONFLICT: Action.UNRESOLVED, State.LOCK_MISMATCH: Action.LOCK_MISMATCH}  # such a copy is left alone


@dataclass
class Copies:
    """A folder of copies, and the tinyblock that is installed.

    Raises:
        Refusal: the lock file is not to be trusted.
        OSError: something cannot be read.
    """

    folder: Path
    upstream: Upstream

    def __post_init__(self) -> None:
        self.root = Path(os.path.realpath(self.folder))
        self._contents = dict[Path, bytes | None]()  # as they were read: what every decision rests on
        self.entries = self._read_lock()

    def require_lock(self) -> "Copies":
        """Raise a Refusal unless something was copied here."""
        if self._content(LOCK) is None:
            raise Refusal(f"there is no {self._shown(LOCK)}: nothing was copied there with `tinyblock add`")
        return self

    def state(self, name: str) -> State:
        copy, installed = self._text(name), self.upstream.original(name)
        if copy is None:
            return State.MISSING
        if CONFLICT_MARKS.search(copy):
            return State.CONFLICT
        base = self._base(name, copy)
        if base is None:
            return State.LOCK_MISMATCH
        is_edited = not base.is_text_of(copy)
        if installed is not None and installed.sha256 != base.sha256:
            return State.EDITED_AND_OUTDATED if is_edited else State.OUTDATED
        return State.EDITED if is_edited else State.PRISTINE

    def states(self) -> dict[str, State]:
        return {name: self.state(name) for name in self.entries}

    def edits(self, name: str) -> str:
        """Return what was edited in a copy, as a unified diff, or in words where the lock file has no text."""
        copy = self._text(name)
        if copy is None:
            return f"{self._shown(name)} is missing\n"
        base = self._base_or_entry(name, copy)
        if base.is_text_of(copy):
            return ""
        if not isinstance(base, Original):
            return f"{self._shown(name)} is edited; {LOCK} has no text of tinyblock {base.version} to show how\n"
        return unified_diff(base.text, copy, f"tinyblock {base.version}/{name}", self._shown(name))

    def upstream_changes(self, name: str) -> str:
        """Return what has changed in tinyblock since a copy was taken, likewise."""
        base, installed = self._base_or_entry(name, self._text(name)), self.upstream.original(name)
        if installed is None or installed.sha256 == base.sha256:
            return ""
        if not isinstance(base, Original):
            return f"{name} has changed between tinyblock {base.version} and {installed.version}\n"
        labels = (f"tinyblock {version}/{name}" for version in (base.version, installed.version))
        return unified_diff(base.pristine, installed.pristine, *labels)

    def add(
        self, layers: Sequence[str], *, with_tests: bool = False, with_typecheck: bool = False, dry_run: bool = False
    ) -> dict[str, Action]:
        """Copy layers, and what they need from tinyblock, into the folder; return what was done to each file.

        What comes along and is there with edits is kept. Asked for by name, it is no longer the layer asked for.

        Raises:
            Refusal: an unknown layer; another file of that name; an older copy, or one that was asked for and is
                edited; another run.
            OSError: the folder cannot be written to.
        """
        for layer in layers:
            self.upstream.require_layer(layer)
        asked = [f"{layer}.py" for layer in layers]
        needed = self.upstream.with_needs([*asked, *(["typecheck.py"] if with_typecheck else [])], with_tests)
        steps = {name: self._step_of_add(name) for name in (*needed, LICENCE)}
        for name in asked:
            if steps[name].action is Action.EDITS_KEPT:
                raise Refusal(f"{self._shown(name)} is there already, edited: see `tinyblock diff {self.folder}`")
        return self._write(steps, dry_run)

    def update(self, dry_run: bool = False) -> dict[str, Action]:
        """Bring every outdated copy up to this tinyblock, edits kept; return what was done to each file.

        Where both changed the same lines, the copy gets git's conflict marks. Tests and the licence are replaced. In
        both cases the edited file stays beside, as NAME.orig.

        Raises:
            Refusal: no git, where a merge needs it; a clash of names; another run.
            OSError: the folder cannot be written to.
        """
        steps = {name: self._step_of_update(name) for name in self.entries}
        # The new version may import a sibling that the old one did not.
        changed = [name for name, step in steps.items() if step.text is not None and name != LICENCE]
        added = [name for name in self.upstream.with_needs(changed) if name not in self.entries]
        return self._write(steps | {name: self._step_of_add(name) for name in added}, dry_run)

    def _step_of_add(self, name: str) -> "_Step":
        copy, shown, installed = self._text(name), self._shown(name), self.upstream.require(name)
        if name not in self.entries:
            if copy is None:
                return _Step(Action.COPIED, installed, installed.text)
            if copy == installed.text:
                return _Step(Action.ADOPTED, installed)
            raise Refusal(f"{shown} is there already, and not in {LOCK}: move it away, or restore that lock file")
        state = self.state(name)
        if state is State.MISSING:
            return _Step(Action.COPIED, installed, installed.text)
        if state in _UNCLEAR:
            raise Refusal(f"{shown} {_UNCLEAR[state]}")
        if state.is_outdated:
            version = self.entries[name].version
            raise Refusal(f"{shown} is of an earlier tinyblock ({version}): run `tinyblock update {self.folder}` first")
        return _Step(Action.EDITS_KEPT if state is State.EDITED else Action.UP_TO_DATE)

    def _step_of_update(self, name: str) -> "_Step":
        state, copy, installed = self.state(name), self._text(name), self.upstream.original(name)
        if state in _UNCLEAR:
            return _Step(_UNCLEAR[state])
        if installed is None or copy is None:
            return _Step(Action.GONE_UPSTREAM if installed is None else Action.MISSING)
        if state is State.OUTDATED:
            return _Step(Action.UPDATED, installed, installed.text)
        if state is State.EDITED_AND_OUTDATED:
            base = self._base_or_entry(name, copy)
            if not isinstance(base, Original):
                return _Step(Action.REPLACED, installed, installed.text)
            text, has_conflicts = self._merge(copy, base, installed)
            return _Step(Action.CONFLICT if has_conflicts else Action.MERGED, installed, text)
        is_in_lock = self.entries[name].sha256 == installed.sha256
        return _Step(Action.UP_TO_DATE, None if is_in_lock else installed)

    def _write(self, steps: Mapping[str, "_Step"], dry_run: bool) -> dict[str, Action]:
        """Write the texts, and the lock file with the new entries."""
        contents = dict[Path, bytes]()
        for name, step in steps.items():
            before = self._content(name) or b""
            if step.action in (Action.CONFLICT, Action.REPLACED):
                contents[self._free_path(f"{name}.orig")] = before
            if step.text is not None:
                contents[self._path(name)] = encode(step.text.replace("\n", newline_of(before)))
        entries = self.entries | {name: step.entry for name, step in steps.items() if step.entry is not None}
        if (contents or entries != self.entries) and not dry_run:
            contents[self._path(LOCK)] = render_lock(entries)  # last of all
            replace_all(self.root, contents, before=self._contents)
            self.entries = entries
            self._contents.clear()
        return {name: step.action for name, step in steps.items()}

    def _base(self, name: str, copy: str) -> Entry | None:
        """Return what a copy was taken from or last merged with: what its header names, as long as it has one."""
        named = HASH_LINE.findall(copy)
        known = (self.entries[name], self.upstream.original(name))
        return next((base for base in known if base is not None and base.sha256 in named), None if named else known[0])

    def _base_or_entry(self, name: str, copy: str | None) -> Entry:
        """Return the base of a copy, or what the lock file has where the copy is missing or at odds with that."""
        return (None if copy is None else self._base(name, copy)) or self.entries[name]

    def _merge(self, copy: str, base: Original, installed: Original) -> tuple[str, bool]:
        header = ""
        for old_line, new_line in zip(base.header.splitlines(True), installed.header.splitlines(True), strict=True):
            if old_line in copy:  # the same in all three texts, wherever the copy has it, so it conflicts with nothing
                copy, header = copy.replace(old_line, new_line, 1), header + new_line
        labels = self._shown(base.name), f"tinyblock {base.version}", f"tinyblock {installed.version}"
        return merge(copy, header + base.pristine, header + installed.pristine, labels)

    def _shown(self, name: str) -> str:
        return (self.folder / name).as_posix()

    def _path(self, name: str) -> Path:
        """Return where a file lies; the folder itself may be reached by symbolic links, and nothing inside of it."""
        path = self.root / name
        if path.is_symlink() or path.parent.is_symlink():
            raise Refusal(f"{self._shown(name)} is reached by a symbolic link: put a file there")
        return path

    def _content(self, name: str) -> bytes | None:
        path = self._path(name)
        if path not in self._contents:
            self._contents[path] = path.read_bytes() if path.exists() else None
        return self._contents[path]

    def _text(self, name: str) -> str | None:
        content = self._content(name)
        return None if content is None else decode(content)

    def _read_lock(self) -> dict[str, Entry]:
        content = self._content(LOCK)
        entries = {} if content is None else parse_lock(content, self._shown(LOCK))
        for name, entry in entries.items():
            installed = self.upstream.original(name)
            if installed is not None and installed.sha256 == entry.sha256:
                entries[name] = Original.of(name, entry.version, installed.pristine)  # the text that the lock may lack
            elif version_numbers(entry.version) > version_numbers(self.upstream.version):
                versions = f"tinyblock {entry.version}, newer than the installed {self.upstream.version}"
                raise Refusal(f"{self._shown(name)} is of {versions}: upgrade tinyblock")
        return entries

    def _free_path(self, name: str) -> Path:
        candidates = (self.root / f"{name}{number}" for number in ("", *range(2, 1000)))
        return next(path for path in candidates if not os.path.lexists(path))


class _Step(NamedTuple):
    """What is done to one file, and the new entry and text that it gets, if any."""

    action: Action
    entry: Entry | None = None
    text: str | None = None
