"""Files that are written whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["atomic", "require_writable"]


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path` that takes its place at the end, unless an exception comes first."""
    temporary = path.with_name(f".{os.getpid()}.{path.name}")  # keeps the suffix, which some writers go by
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()


def require_writable(path: Path) -> None:
    """Raise the OSError that writing `path` would raise, and leave what is there untouched."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder")
    probe = path.with_name(f".{os.getpid()}.{path.name}")
    probe.touch()
    probe.unlink()
