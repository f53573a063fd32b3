"""Change several files of a folder together: all of them, or none, also where the run is interrupted."""

import os
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

__all__ = ["SIGNALS", "Busy", "ChangedMeanwhile", "Staging"]

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


class Staging:
    """Hold a folder for one run, in a `with` statement; on the way out nothing is left but what `replace_all` wrote.

    The new files, and those that they replace, lie in a folder inside, which tells another run to keep away. Only a
    process that is killed outright leaves it behind.

    Raises:
        Busy: another run holds the folder, or was killed there.
        OSError: the folder cannot be made or written to.
    """

    NAME = ".tinyblock-staging"

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / self.NAME
        self._made: list[Path] = []

    def __enter__(self) -> "Staging":
        missing = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
        try:
            with _uninterrupted():
                for path in reversed(missing):
                    path.mkdir()
                    self._made.insert(0, path)
                try:
                    self.path.mkdir()
                except FileExistsError:
                    raise Busy(self.path) from None
        except BaseException:
            self._remove_folders()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _uninterrupted():
            if not isinstance(error, _Stuck):
                shutil.rmtree(self.path, ignore_errors=True)
            self._remove_folders()

    def replace_all(self, contents: Mapping[Path, bytes], before: Mapping[Path, bytes | None]) -> None:
        """Write every file, if each is still as it was `before`, or none.

        Raises:
            ChangedMeanwhile: one is not.
            OSError: one cannot be written; the others are as they were.
        """
        for number, (path, content) in enumerate(contents.items()):
            new = self._staged(number, path, "new")
            with new.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            if path.exists():
                shutil.copy2(path, self._staged(number, path, "old"))
                shutil.copymode(path, new)
        with _uninterrupted():
            for path, content_before in before.items():
                if (path.read_bytes() if path.is_file() else None) != content_before:
                    raise ChangedMeanwhile(path)
            replaced: list[tuple[Path, Path]] = []
            try:
                for number, path in enumerate(contents):
                    os.replace(self._staged(number, path, "new"), path)
                    replaced.append((path, self._staged(number, path, "old")))
            except BaseException as error:
                stuck = [path for path, old in replaced if not _put_back(path, old)]
                if stuck:
                    raise _Stuck(f"{', '.join(map(str, stuck))} could not be put back: see {self.path}") from error
                raise

    def _staged(self, number: int, path: Path, which: str) -> Path:
        return self.path / f"{number}.{path.name}.{which}"

    def _remove_folders(self) -> None:
        for path in self._made:  # the innermost first; one that holds a copy now stays
            with suppress(OSError):
                path.rmdir()


class Busy(Exception):
    """The folder is held by another run; the argument is the staging folder."""


class ChangedMeanwhile(Exception):
    """Somebody else wrote to a file while the run decided what to make of it; the argument is its path."""


class _Stuck(OSError):
    """The files that were replaced could not be put back; they are still in the staging folder."""


def _put_back(path: Path, old: Path) -> bool:
    try:
        if old.exists():
            os.replace(old, path)
        else:
            path.unlink(missing_ok=True)
    except OSError:
        return False
    return True


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let Ctrl-C and the like pass unheard for the few milliseconds in which half of the files are new."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None is one that was not set from Python, and cannot be
                signal.signal(number, handler)
