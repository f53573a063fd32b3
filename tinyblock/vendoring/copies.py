"""A folder of copies: add layers, show differences, merge later changes in tinyblock, and remove copies.

The folder also holds tinyblock's license and one lock file, with the version and the original text of each copy. These
texts are the bases of three-way merges, so no command uses a network.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from . import CommandError
from .catalogue import LICENSE, NAMES, Original, Upstream
from .files import (
    CONFLICT_MARKS,
    Content,
    decode,
    encode,
    merge,
    read,
    replace_all,
    unified_diff,
)

LOCK = "tinyblock.lock"
UP_TO_DATE = "up to date"
CONFLICT = "conflict markers: resolve them; NAME.orig is the file before"


class Step(NamedTuple):
    """What is done to a file, in words; its new text, or None to delete it; the original that the lock file records."""

    done: str
    text: str | None
    original: Original | None


@dataclass(frozen=True)
class Copy:
    """A file in a folder of copies, the original that it was taken from, and the original in this tinyblock."""

    path: Path
    content: Content
    base: Original
    installed: Original | None

    @property
    def text(self) -> str | None:
        return None if self.content is None else decode(self.content)

    @property
    def state(self) -> str:
        """One of: missing; conflict markers; pristine; edited; outdated; edited, outdated."""
        if self.text is None:
            return "missing"
        if CONFLICT_MARKS.search(self.text):
            return "conflict markers"
        differs = {
            "edited": self.text != self.base.text,
            "outdated": self.upstream_changes() != "",
        }
        return ", ".join(word for word, is_so in differs.items() if is_so) or "pristine"

    def edits(self) -> str:
        """Return the user's edits as a unified diff."""
        return unified_diff(
            self.base.text, self.text or "", self.base.label, self.path.as_posix()
        )

    def upstream_changes(self) -> str:
        """Return the changes in tinyblock since the copy was taken as a unified diff."""
        new = self.installed or self.base
        return unified_diff(
            self._relabel(self.base.text), new.text, self.base.label, new.label
        )

    def update(self) -> Step:
        """Return the step that brings this copy up to date, with the user's edits kept."""
        new = self.installed
        if new is None:
            return Step("no longer in tinyblock, left as it is", self.text, self.base)
        if self.text is None:
            return Step("copied", new.text, new)
        if self.state == "conflict markers":
            return Step(CONFLICT, self.text, self.base)
        if self.state == "outdated":
            return Step("updated", new.text, new)
        if self.state != "edited, outdated":
            return Step(UP_TO_DATE, self.text, self.base)
        labels = (self.path.as_posix(), self.base.label, new.label)
        text, has_conflicts = merge(
            self._relabel(self.text), self._relabel(self.base.text), new.text, labels
        )
        return Step(CONFLICT if has_conflicts else "merged with your edits", text, new)

    def _relabel(self, text: str) -> str:
        """Replace the version in the header by that of this tinyblock, so that it neither differs nor conflicts."""
        return text.replace(self.base.label, (self.installed or self.base).label, 1)


class Copies:
    """The copies in a folder. Raises a CommandError if there are none, unless the folder is `new`."""

    def __init__(self, folder: Path, upstream: Upstream, *, new: bool = False) -> None:
        self.folder, self.upstream = folder, upstream
        if folder.is_file():
            raise CommandError(f"{folder} is a file: give the folder of the copies")
        self._lock = lock = read(self._path(LOCK))
        if lock is None and not new:
            near = [
                path.parent
                for depth in ("*", "*/*")
                for path in folder.glob(f"{depth}/{LOCK}")
            ]
            fix = (
                f"did you mean {near[0]}?"
                if near
                else "`tinyblock add LAYER --to DIR` writes one"
            )
            raise CommandError(f"there is no {LOCK} in {folder}: {fix}")
        self.originals = {} if lock is None else self._parse(lock)

    def select(self, layers: Sequence[str] = ()) -> list[Copy]:
        """Return the copies of these layers and of their contracts; without layers, all copies."""
        stems = {name: PurePosixPath(name).stem for name in self.originals}
        for layer in layers:
            if layer not in stems.values():
                known = ", ".join(name for name in NAMES if name in stems.values())
                raise CommandError(
                    f"there is no copy of {layer!r} in {self.folder}; it has {known}"
                )
        return [
            self._copy(name)
            for name, stem in stems.items()
            if not layers or stem in layers
        ]

    def add(self, layers: Sequence[str], with_tests: bool = False) -> dict[Copy, Step]:
        """Return the steps that copy layers and what they import, and update those that exist."""
        names = [self.upstream.layer(layer).name for layer in layers]
        wanted = [*self.upstream.with_imports(names, with_tests), LICENSE]
        return {copy: copy.update() for copy in map(self._copy, wanted)}

    def update(self, layers: Sequence[str] = ()) -> dict[Copy, Step]:
        """Return the steps that bring copies, and what they now import, up to date."""
        wanted = self.upstream.with_imports(
            copy.base.name for copy in self.select(layers)
        )
        return {copy: copy.update() for copy in map(self._copy, wanted)}

    def remove(self, layers: Sequence[str]) -> dict[Copy, Step]:
        """Return the steps that delete copies without edits and, with the last layer, all other files."""
        gone = {copy.base.name: copy for copy in self.select(layers)}
        if not any(
            name.removesuffix(".py") in NAMES for name in self.originals.keys() - gone
        ):
            gone = {copy.base.name: copy for copy in self.select()}
        for name, copy in gone.items():
            if copy.state not in ("pristine", "outdated", "missing"):
                raise CommandError(
                    f"{copy.path} has edits: delete the file yourself, then repeat the command"
                )
            users = [
                user
                for user in self.originals
                if user not in gone and name in self.originals[user].imports()
            ]
            if users:
                raise CommandError(
                    f"{copy.path} is imported by {', '.join(users)}: remove both, or keep both"
                )
        return {copy: Step("removed", None, None) for copy in gone.values()}

    def carry_out(self, steps: Mapping[Copy, Step]) -> None:
        """Write all files and the lock file, or none."""
        changes = dict[Path, tuple[Content, Content]]()
        for copy, step in steps.items():
            if step.text != copy.text:
                if step.done == CONFLICT:
                    candidates = (
                        Path(f"{copy.path}.orig{number}")
                        for number in ("", *range(2, 1000))
                    )
                    changes[next(path for path in candidates if not path.exists())] = (
                        None,
                        copy.content,
                    )
                after = (
                    None
                    if step.text is None
                    else encode(step.text, copy.content or b"")
                )
                changes[copy.path] = copy.content, after
        recorded = self.originals | {
            copy.base.name: step.original for copy, step in steps.items()
        }
        originals = {
            name: original
            for name, original in sorted(recorded.items())
            if original is not None
        }
        if originals != self.originals:
            entries = {
                name: {"version": it.version, "text": it.text}
                for name, it in originals.items()
            }
            lock = json.dumps(entries, indent=1).encode() + b"\n" if entries else None
            changes[self._path(LOCK)] = self._lock, lock  # the last one to be written
        if changes:
            replace_all(self.folder, changes)

    def _copy(self, name: str) -> Copy:
        path, installed = self._path(name), self.upstream.find(name)
        base = self.originals.get(name) or installed
        assert base is not None, f"tinyblock {self.upstream.version} has no {name}"
        copy = Copy(path, read(path), base, installed)
        if name not in self.originals and copy.state not in ("missing", "pristine"):
            raise CommandError(
                f"{path} exists, but is not in {LOCK}: move it to another folder"
            )
        return copy

    def _path(self, name: str) -> Path:
        """Return the path of a file in the folder. The folder may be a symbolic link; no path leads out of it."""
        root, path = self.folder.resolve(), self.folder / name
        if path.resolve() != root / name or root not in (root / name).parents:
            raise CommandError(
                f"{path} must be a file in {self.folder}, got a symbolic link or a path out of it"
            )
        return path

    def _parse(self, lock: bytes) -> dict[str, Original]:
        try:
            return {
                name: Original(name, **entry)
                for name, entry in json.loads(lock).items()
            }
        except (ValueError, TypeError, AttributeError):
            what = (
                "has conflict markers"
                if CONFLICT_MARKS.search(decode(lock))
                else "is damaged"
            )
            raise CommandError(
                f"{self.folder / LOCK} {what}: restore it from your repository"
            ) from None
