"""The files that a profile writes, and those that could not be written."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Outputs:
    """Where a profile is written; None: not written.

    json: all figures.
    plot: the picture.
    trace: a Chrome trace of one run.
    memory_snapshot: CUDA's allocations during one run.
    errors: by path, why a file could not be written. They are reported at the end, so that no measurement is lost.
    """

    json: Path | None = None
    plot: Path | None = None
    trace: Path | None = None
    memory_snapshot: Path | None = None
    errors: dict[Path, OSError] = field(default_factory=dict)

    @contextmanager
    def writing(self, path: Path) -> Iterator[None]:
        """Keep an OSError instead of raising it, until the same path is written again."""
        self.errors.pop(path, None)
        try:
            yield
        except OSError as error:
            self.errors[path] = error
