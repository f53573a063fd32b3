"""Files that are written whole or not at all, and what is refused before."""

import errno
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PLOTS = (".png", ".svg", ".pdf")


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path` that takes its place at the end, unless an exception comes first.

    Of a symbolic link, the file that it leads to is replaced, and not the link.
    """
    path = path.resolve()
    temporary = _beside(path)
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()


def require_writable(path: Path) -> None:
    """Raise the OSError that writing `path` would raise, and leave what is there untouched."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "it is a folder")
    if path.exists() and not path.is_file():  # a pipe or a device, which a file would take the place of
        raise OSError(errno.EINVAL, "it is no regular file")
    probe = _beside(path.resolve())
    probe.touch()
    probe.unlink()


def require_plottable(path: Path) -> None:
    """Raise a ValueError where matplotlib is missing, or does not draw files of such a name."""
    if path.suffix not in _PLOTS:
        raise ValueError(f"--plot draws {', '.join(_PLOTS)}, got {str(path)!r}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install matplotlib, or leave --plot out")


def _beside(path: Path) -> Path:
    """Return a name of this process's own in the folder of `path`, with its suffix, which some writers go by."""
    return path.with_name(f".{os.getpid()}.{path.name}")
