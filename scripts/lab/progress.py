"""Show how far a program is: a bar of rich on a terminal, and a line every 30 seconds elsewhere."""

import sys
import threading
import time
from typing import Any

from .processes import is_first


class Progress:
    """The progress of the current work, on stderr.

    On a terminal, rich draws a bar, which is removed at the end; without rich, each work gets a line. Where the output
    goes to a file or a pipe, a line every `seconds` says what runs and how long it has been running. Only the first of
    several processes shows anything.
    """

    def __init__(self, seconds: float = 30.0) -> None:
        self.prefix = ""  # such as the point of a sweep
        self._seconds = seconds
        self._what = "starting"
        self._done = 0
        self._steps: int | None = None
        self._started = time.monotonic()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        on_terminal = sys.stderr.isatty()
        self._is_plain = is_first() and on_terminal
        self._is_piped = is_first() and not on_terminal
        self._bar: Any = None
        if self._is_plain:
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
            self._is_plain = False

    def __enter__(self) -> "Progress":
        if self._bar is not None:
            self._bar.start()
        if self._is_piped:
            # A thread, because a compilation may take minutes without a step. It wakes up too seldom to be noticed.
            self._stop.clear()
            self._thread = threading.Thread(
                target=self._print_now_and_then, daemon=True
            )
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None

    def start(self, what: str, steps: int | None = None) -> None:
        """Replace what is shown by `what`; without steps it only shows that something is running."""
        self._what, self._done, self._steps = self.prefix + what, 0, steps
        if self._bar is not None:
            for task in self._bar.task_ids:
                self._bar.remove_task(task)
            self._bar.add_task(self._what, total=steps)
            self._bar.refresh()
        elif self._is_plain:
            self._print_line(self._what)

    def advance(self, what: str | None = None) -> None:
        """Finish one step, and update the description of the work."""
        self._done += 1
        if what is not None:
            self._what = self.prefix + what
        if self._bar is not None:
            task = self._bar.task_ids[-1]
            self._bar.update(task, advance=1, description=self._what)
            self._bar.refresh()

    def print(self, line: str) -> None:
        """Print a line to stdout, above the bar."""
        self.__exit__()
        print(line, flush=True)
        self.__enter__()

    def _print_now_and_then(self) -> None:
        while not self._stop.wait(self._seconds):
            elapsed = f"{time.monotonic() - self._started:.0f} s"
            steps = ""
            if self._steps is not None:
                steps = f", {self._done} of {self._steps}"
            self._print_line(f"{elapsed}: {self._what}{steps}")

    def _print_line(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)
