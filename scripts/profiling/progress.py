"""How far the measuring is, on a terminal with rich; elsewhere silence."""

import sys
from typing import Any

from .processes import is_first


class TerminalProgress:
    """One bar on stderr for what goes on now, gone at the end."""

    def __init__(self) -> None:
        self._progress: Any = None
        self._task: Any = None
        self.prefix = ""  # the point of a sweep
        if not (sys.stderr.isatty() and is_first()):
            return
        try:
            from rich.console import Console
            from rich.progress import Progress
        except ImportError:
            return
        # Redrawn between two samples only: a thread that draws would take time from what is being measured.
        self._progress = Progress(console=Console(stderr=True), transient=True, auto_refresh=False)

    def __enter__(self) -> "TerminalProgress":
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def start(self, what: str, steps: int | None = None) -> None:
        """Replace the bar by one for `what`; without steps it only shows that something goes on."""
        if self._progress is not None:
            if self._task is not None:
                self._progress.remove_task(self._task)
            self._task = self._progress.add_task(self.prefix + what, total=steps)
            self._progress.refresh()

    def advance(self) -> None:
        """Finish one step."""
        if self._progress is not None:
            self._progress.advance(self._task)
            self._progress.refresh()
