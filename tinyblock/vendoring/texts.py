"""Texts of copies: their line endings, their differences, and three-way merges by git.

Texts are compared with "\\n" at the end of each line, and written with the line endings that the copy has.
"""

import difflib
import re
import subprocess
import tempfile
from pathlib import Path

from . import CommandError

CONFLICT_MARKS = re.compile(r"^(<{7}|>{7}) ", re.MULTILINE)


def decode(content: bytes) -> str:
    """Return the text, with "\\n" for "\\r\\n" if most lines end in that; no other byte is lost."""
    text = content.decode(errors="surrogateescape")
    return text.replace("\r\n", "\n") if _newline(content) == "\r\n" else text


def encode(text: str, like: bytes = b"") -> bytes:
    """Return the content of a file, with the line endings of `like`."""
    return text.replace("\n", _newline(like)).encode(errors="surrogateescape")


def _newline(content: bytes) -> str:
    return "\r\n" if 2 * content.count(b"\r\n") > content.count(b"\n") else "\n"


def unified_diff(old: str, new: str, old_name: str, new_name: str) -> str:
    """Return the difference of two texts in the format of `git diff`."""
    lines = difflib.unified_diff(re.findall(r".*\n|.+", old), re.findall(r".*\n|.+", new), old_name, new_name)
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def merge(mine: str, base: str, theirs: str, labels: tuple[str, str, str]) -> tuple[str, bool]:
    """Merge two texts that come from `base`; return the text and whether it has conflicts."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["git", "merge-file", "-p", "-L", labels[0], "-L", labels[1], "-L", labels[2]]
        for name, text in {"mine": mine, "base": base, "theirs": theirs}.items():
            command.append(f"{folder}/{name}")
            Path(folder, name).write_bytes(encode(text))
        try:
            done = subprocess.run(command, capture_output=True, check=False)
        except FileNotFoundError:
            raise CommandError(f"{labels[0]} has edits to merge with changes in tinyblock: install git") from None
    if not 0 <= done.returncode < 128:  # a number of conflicts
        raise CommandError(f"git could not merge {labels[0]}: {decode(done.stderr) or f'exit code {done.returncode}'}")
    return decode(done.stdout), done.returncode > 0
