"""Show how far a program is: rich's progress bar on a terminal, and plain lines elsewhere."""

import sys
import time
from collections.abc import Callable
from typing import Any

from .processes import is_first

SILENCE = 30.0  # seconds, at most, without a terminal


class Progress:
    """The state of the current work, on stderr.

    On a terminal with rich, it is a bar that is removed at the end. On one without rich, it is a line at the start of
    each work. Without a terminal, it is a line at least every 30 s, as long as steps finish.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.prefix = ""  # such as the point of a sweep
        self._clock = clock
        self._last_line = clock()
        self._what = ""
        self._steps: int | None = None
        self._done = 0
        self._on_terminal = sys.stderr.isatty()
        self._bar = _new_bar() if self._on_terminal and is_first() else None

    def __enter__(self) -> "Progress":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def start(self, what: str, steps: int | None = None) -> None:
        """Begin other work; without steps, only its name is shown."""
        self._what = self.prefix + what
        self._steps = steps
        self._done = 0
        if self._bar is not None:
            for task in self._bar.task_ids:
                self._bar.remove_task(task)
            self._bar.add_task(self._what, total=steps)
            self._bar.refresh()
        elif self._on_terminal:
            self._print_line()
        else:
            self._print_line_in_time()

    def advance(self, what: str | None = None) -> None:
        """Finish one step, and replace the name of the work if there is another one."""
        self._done += 1
        if what is not None:
            self._what = self.prefix + what
        if self._bar is not None:
            task = self._bar.task_ids[-1]
            self._bar.update(task, advance=1, description=self._what)
            self._bar.refresh()
        elif not self._on_terminal:
            self._print_line_in_time()

    def print(self, line: str) -> None:
        """Print a line to stdout, above the bar."""
        self.__exit__()
        print(line, flush=True)
        self.__enter__()
        self._last_line = self._clock()

    def _print_line_in_time(self) -> None:
        if self._clock() - self._last_line >= SILENCE:
            self._print_line()

    def _print_line(self) -> None:
        self._last_line = self._clock()
        if not is_first():
            return
        line = self._what
        if self._steps is not None and self._done > 0:
            line += f", {self._done} of {self._steps}"
        print(line, file=sys.stderr, flush=True)


def _new_bar() -> Any:
    """Return rich's progress bar, or None where rich is missing."""
    try:
        import rich.console
        import rich.progress
    except ImportError:
        return None
    # Drawn only between two samples: a thread that draws would take time from what is being measured.
    console = rich.console.Console(stderr=True)
    return rich.progress.Progress(console=console, transient=True, auto_refresh=False)
