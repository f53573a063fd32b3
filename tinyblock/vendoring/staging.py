"""Replace several files of a folder together: all of them, or none."""

import os
import shutil
import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from . import Refusal

STAGING = ".tinyblock-staging"


def replace_all(folder: Path, contents: Mapping[Path, bytes], before: Mapping[Path, bytes | None]) -> None:
    """Write files of a folder, if each of `before` is still as it is there, and leave nothing else behind.

    The new files, and those that they replace, lie in a folder inside, which tells another run to keep away. Only a
    process that is killed outright leaves it there.

    Raises:
        Refusal: another run holds the folder, or a file is not as before.
        OSError: a file cannot be written; the others are as they were.
    """
    staging = folder / STAGING
    new = {path: staging / f"{number}.{path.name}.new" for number, path in enumerate(contents)}
    old = {path: new[path].with_suffix(".old") for path in contents}
    with _uninterrupted(), ExitStack() as cleanup:
        for parent in (path.parent for path in contents):
            for missing in reversed([path for path in (parent, *parent.parents) if not path.exists()]):
                missing.mkdir()
                cleanup.callback(_remove_if_empty, missing)
        try:
            staging.mkdir()
        except FileExistsError:
            ways_out = f"if none is, delete {staging} (where NAME.old is a file as it was), and repeat"
            raise Refusal(f"another run is at work there, or was killed: {ways_out}") from None
        cleanup.callback(shutil.rmtree, staging, ignore_errors=True)
        for path, content in contents.items():
            new[path].write_bytes(content)
            if path.exists():
                shutil.copy2(path, old[path])
                shutil.copymode(path, new[path])
        for path, content_before in before.items():
            if (path.read_bytes() if path.is_file() else None) != content_before:
                raise Refusal(f"{path} was changed meanwhile by another program: repeat")
        replaced: list[Path] = []
        try:
            for path in contents:
                os.replace(new[path], path)
                replaced.append(path)
        except BaseException:
            undone = cleanup.pop_all()  # should this fail too, what is staged has no other copy, and stays
            for path in replaced:
                os.replace(old[path], path) if old[path].exists() else path.unlink()
            undone.close()
            raise


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let Ctrl-C and the like pass unheard for the few milliseconds in which half of the files are new."""
    numbers = {signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}  # Windows has no SIGHUP
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
