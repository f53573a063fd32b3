"""Texts of copies: their line ends, their differences, and the merge of two that come from one.

Texts are compared with "\\n" at the end of each line, and written with the line ends that the copy has.
"""

import difflib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from . import Refusal

# Those of `merge`, and no others: a docstring may well show git's.
CONFLICT_MARKS = re.compile(r"^(<{7} .*/\S+\.\w+|>{7} tinyblock \d\S*)$", re.MULTILINE)


def decode(content: bytes) -> str:
    """Return a text as it is compared: lines end in "\\n" where most of them ended in "\\r\\n"; no byte is lost."""
    text = content.decode(errors="surrogateescape")
    return text.replace("\r\n", "\n") if newline_of(content) == "\r\n" else text


def encode(text: str) -> bytes:
    return text.encode(errors="surrogateescape")


def newline_of(content: bytes) -> str:
    """Return what ends most lines."""
    return "\r\n" if 2 * content.count(b"\r\n") > content.count(b"\n") else "\n"


def unified_diff(old: str, new: str, old_name: str, new_name: str) -> str:
    """Return the difference of two texts as `git diff` shows it."""
    lines = difflib.unified_diff(re.findall(r".*\n|.+", old), re.findall(r".*\n|.+", new), old_name, new_name)
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


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
            path.write_bytes(encode(text))
        named = [argument for label in labels for argument in ("-L", label)]
        # Neither the repository around nor a hook's variables are to change the outcome.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        command = [git, "merge-file", "-p", *named, *map(str, paths)]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False)
    text, has_conflicts = decode(done.stdout), done.returncode > 0
    # What calls itself git may be something else, such as a stub that asks to be installed.
    added = {line for side in (mine, theirs) for line in side.splitlines()} - set(base.splitlines())
    marks = {f"<<<<<<< {labels[0]}", f">>>>>>> {labels[2]}"} if has_conflicts else set()
    if not 0 <= done.returncode < 128 or not added | marks <= set(text.splitlines()):
        answer = decode(done.stderr) or f"exit code {done.returncode}, {len(text)} characters"
        raise Refusal(f"git could not merge {labels[0]}: {answer}")
    return text, has_conflicts
