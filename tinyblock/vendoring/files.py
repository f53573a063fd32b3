"""Files of copies: their line endings, their differences, three-way merges by git, and their replacement.

Texts are compared with "\\n" at the end of each line, and written with the line endings that the copy has.
"""

import difflib
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from . import CommandError

Content = bytes | None  # None stands for no file
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
    lines = difflib.unified_diff(
        re.findall(r".*\n|.+", old), re.findall(r".*\n|.+", new), old_name, new_name
    )
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
        for line in lines
    )


def merge(
    mine: str, base: str, theirs: str, labels: tuple[str, str, str]
) -> tuple[str, bool]:
    """Merge two texts that come from `base`; return the text and whether it has conflicts."""
    with TemporaryDirectory() as folder:
        command = [
            "git",
            "merge-file",
            "-p",
            "-L",
            labels[0],
            "-L",
            labels[1],
            "-L",
            labels[2],
        ]
        for name, text in {"mine": mine, "base": base, "theirs": theirs}.items():
            command.append(f"{folder}/{name}")
            Path(folder, name).write_bytes(encode(text))
        try:
            done = subprocess.run(command, capture_output=True, check=False)
        except FileNotFoundError:
            raise CommandError(
                f"{labels[0]} has edits to merge with changes in tinyblock: install git"
            ) from None
    if not 0 <= done.returncode < 128:  # a number of conflicts
        raise CommandError(
            f"git could not merge {labels[0]}: {decode(done.stderr) or f'exit code {done.returncode}'}"
        )
    return decode(done.stdout), done.returncode > 0


def read(path: Path) -> Content:
    return path.read_bytes() if path.exists() else None


def replace_all(
    folder: Path,
    changes: Mapping[Path, tuple[Content, Content]],
    replace: Callable[[Path, Path], object] = os.replace,
) -> None:
    """Change files of a folder from one content to another: all or, if one fails or Ctrl-C interrupts, none.

    New contents are first written to a temporary folder inside, where a full disk does no harm. Then each file is
    renamed, so even a process that is killed leaves no partial file.

    Raises:
        CommandError: a file has changed since it was read.
    """
    for path in changes:
        path.parent.mkdir(parents=True, exist_ok=True)
    with (
        TemporaryDirectory(prefix=".tinyblock-", dir=folder) as staging,
        ExitStack() as undo,
    ):
        staged = {
            path: (Path(staging, f"{n}.old"), Path(staging, f"{n}.new"))
            for n, path in enumerate(changes)
        }
        for path, contents in changes.items():
            for file, content in zip(staged[path], contents, strict=True):
                if content is not None:
                    file.write_bytes(content)
                    if path.exists():
                        shutil.copymode(
                            path, file
                        )  # after it is written: the mode may be read-only
        for path, (old, new) in staged.items():
            if read(path) != changes[path][0]:
                raise CommandError(
                    f"{path} was changed by another program meanwhile: run the command again"
                )
            undo.callback(os.replace, old, path) if old.exists() else undo.callback(
                path.unlink, missing_ok=True
            )
            replace(new, path) if new.exists() else path.unlink()
        undo.pop_all()
