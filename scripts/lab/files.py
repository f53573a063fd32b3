"""Write files whole or not at all, and read documents of a schema."""

import errno
import json
import os
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path` that takes its place at the end, unless an exception comes first.

    A symbolic link stays, and the file that it leads to is replaced.
    """
    path = path.resolve()
    temporary = _beside(path)
    try:
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        # If the disk is full, torch and Python name no file.
        error.filename = error.filename or str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    with atomic(path) as temporary:
        temporary.write_text(text)


def write_json(path: Path, document: Any) -> None:
    write_text(path, json.dumps(document, indent=1, allow_nan=False) + "\n")


def read_json(path: Path, schema: str, option: str, writer: str) -> dict[str, Any]:
    """Read the JSON document that an option names; raise a ValueError if it is none, or has another schema.

    `writer` is the command that writes such a document. The message advises it.
    """
    try:
        document = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{option}: cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{option}: {path} is not JSON: {error}") from None
    found = document.get("schema") if isinstance(document, dict) else None
    if found != schema:
        # reprlib cuts what is long or nested deeply.
        shown = reprlib.repr(found).strip("'")
        raise ValueError(
            f'{option}: {path} must have the "schema" {schema}, got {shown}: write it with {writer}'
        )
    return document


def require_writable(path: Path) -> None:
    """Raise the OSError that writing `path` would raise, and leave what is there untouched."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "it is a folder")
    if path.exists() and not path.is_file():
        # A pipe or a device, which a file would replace.
        raise OSError(errno.EINVAL, "it is not a regular file")
    probe = _beside(path.resolve())
    probe.touch()
    probe.unlink()


def _beside(path: Path) -> Path:
    """Return a temporary path of this process beside `path`, with its suffix, from which writers take the format."""
    return path.with_name(f".{os.getpid()}.{path.name}")
