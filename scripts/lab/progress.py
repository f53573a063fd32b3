"""How far a program is: rich's progress bar on a terminal, or a plain line where rich is missing."""

import sys
from typing import Any

from .processes import is_first


class Progress:
    """One bar on a terminal (stderr) for the current work, removed at the end; without a terminal nothing is shown."""

    def __init__(self) -> None:
        self.prefix = ""  # such as the point of a sweep
        self._shown = sys.stderr.isatty() and is_first()
        self._bar: Any = None
        if self._shown:
            try:
                import rich.console
                import rich.progress
            except ImportError:
                return
            # Drawn between two samples only: a thread that draws would take time from what is being measured.
            console = rich.console.Console(stderr=True)
            self._bar = rich.progress.Progress(
                console=console, transient=True, auto_refresh=False
            )

    def __enter__(self) -> "Progress":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def start(self, what: str, steps: int | None = None) -> None:
        """Replace the bar by one for `what`; without steps it only shows that something is running."""
        if self._bar is not None:
            for task in self._bar.task_ids:
                self._bar.remove_task(task)
            self._bar.add_task(self.prefix + what, total=steps)
            self._bar.refresh()
        elif self._shown:
            print(self.prefix + what, file=sys.stderr, flush=True)

    def advance(self, what: str | None = None) -> None:
        """Finish one step, and update the description of the work."""
        if self._bar is not None:
            self._bar.update(
                self._bar.task_ids[-1],
                advance=1,
                description=what and self.prefix + what,
            )
            self._bar.refresh()

    def print(self, line: str) -> None:
        """Print a line to stdout, above the bar."""
        self.__exit__()
        print(line, flush=True)
        self.__enter__()
