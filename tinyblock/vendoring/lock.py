"""The lock file of a folder of copies: which version each was taken from, and the text that it had there.

The text is the base of every three-way merge. Of tests and the licence, which nobody merges, the SHA-256 is enough.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from . import Refusal
from .merging import encode

LOCK = "tinyblock.lock"
LOCK_VERSION = 2
LICENCE = "LICENSE.tinyblock"

# No name leads out of the folder, and no two names are one file where letters have no case.
_NAME = re.compile(rf"[a-z][a-z0-9_]*\.py|contract/[a-z_][a-z0-9_]*\.py|{re.escape(LICENCE)}")
_VERSION = re.compile(r"\d{1,9}(\.\d{1,9}){0,3}[\w.+-]{0,40}", re.ASCII)
HASH_LINE = re.compile(r"^# Pristine SHA-256: ([0-9a-f]{64})$", re.MULTILINE)


@dataclass(frozen=True)
class Entry:
    """What the lock file knows of every copy: its name, the version that it was taken from, and the text's SHA-256."""

    name: str
    version: str
    sha256: str

    @property
    def header(self) -> str:
        """The comment that leads a copy; the SHA-256 is that of the text after it. The licence itself has none."""
        if self.name == LICENCE:
            return ""
        return (
            f"# Copied from tinyblock {self.version}: tinyblock/{self.name} (licence: {LICENCE})\n"
            f"# Pristine SHA-256: {self.sha256}\n"
            "# SPDX-License-Identifier: MIT\n"
        )

    def is_text_of(self, copy: str) -> bool:
        """Tell whether a copy is as it was taken, header included."""
        return copy.startswith(self.header) and sha256(copy.removeprefix(self.header)) == self.sha256


@dataclass(frozen=True)
class Original(Entry):
    """An entry with the text of the file, without the header that a copy gets."""

    pristine: str

    @classmethod
    def of(cls, name: str, version: str, pristine: str) -> "Original":
        return cls(name, version, sha256(pristine), pristine)

    @property
    def text(self) -> str:
        """The whole copy, as `add` writes it."""
        return self.header + self.pristine


def sha256(text: str) -> str:
    return hashlib.sha256(encode(text)).hexdigest()


def version_numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, 0.10.1 after 0.9; what follows them does not count."""
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def parse_lock(content: bytes, shown: str) -> dict[str, Entry]:
    """Return the entries of a lock file, by name.

    Raises:
        Refusal: it is not to be trusted, or of a lock version that this tinyblock does not know.
    """
    try:
        lock = json.loads(content)
        version = lock["lock_version"]
        if version == LOCK_VERSION:
            return {name: _parse_entry(name, fields) for name, fields in lock["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refusal(
            f"{shown} is corrupt ({type(error).__name__}: {error}): restore it from your repository"
        ) from None
    raise Refusal(
        f"{shown} has lock version {version!r:.20}, and this tinyblock knows {LOCK_VERSION} only: "
        "use the tinyblock that wrote it, or move the folder away and add the layers again"
    )


def _parse_entry(name: str, fields: Mapping[str, Any]) -> Entry:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a file in its folder")
    version, digest = fields["version"], fields["sha256"]
    if not _VERSION.fullmatch(version):
        raise ValueError(f"{version!r:.80} is no version")
    if not _keeps_text(name):
        return Entry(name, version, digest)
    original = Original.of(name, version, "\n".join(fields["pristine"]))
    if original.sha256 != digest:
        raise ValueError(f"the pristine text of {name} does not have its SHA-256")
    return original


def _keeps_text(name: str) -> bool:
    return name != LICENCE and not name.startswith("contract/")


def render_lock(entries: Mapping[str, Entry]) -> bytes:
    """Return the lock file of these entries; a text is a list of lines, for the sake of the file's diffs."""
    files = dict[str, dict[str, Any]]()
    for name, entry in sorted(entries.items()):
        files[name] = {"version": entry.version, "sha256": entry.sha256}
        if isinstance(entry, Original) and _keeps_text(name):
            files[name]["pristine"] = entry.pristine.split("\n")
    return json.dumps({"lock_version": LOCK_VERSION, "files": files}, indent=1, ensure_ascii=False).encode() + b"\n"
