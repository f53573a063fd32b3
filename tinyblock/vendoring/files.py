"""Read files, and replace several of them together: all or, if anything fails, none."""

import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from . import CommandError

Content = bytes | None  # None stands for no file
Changes = Mapping[Path, tuple[Content, Content]]  # the content of each file before and after


def read(path: Path) -> Content:
    return path.read_bytes() if path.exists() else None


def replace_all(folder: Path, changes: Changes, replace: Callable[[Path, Path], object] = os.replace) -> None:
    """Make all changes to files of a folder or, if one fails or Ctrl-C interrupts, none.

    New contents are first written to a temporary folder inside, where a full disk does no harm. Then each file is
    renamed, so even a process that is killed leaves no partial file.
    """
    for path in changes:
        path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".tinyblock-", dir=folder) as staging, ExitStack() as undo:
        staged = {path: (Path(staging, f"{n}.old"), Path(staging, f"{n}.new")) for n, path in enumerate(changes)}
        for path, contents in changes.items():
            if read(path) != contents[0]:
                raise CommandError(f"{path} was changed by another program meanwhile: repeat the command")
            for file, content in zip(staged[path], contents, strict=True):
                if content is not None:
                    file.write_bytes(content)
                    if path.exists():
                        shutil.copymode(path, file)
        for path, (old, new) in staged.items():
            undo.callback(os.replace, old, path) if old.exists() else undo.callback(path.unlink, missing_ok=True)
            replace(new, path) if new.exists() else path.unlink()
        undo.pop_all()
