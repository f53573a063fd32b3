"""What a program shows of its progress when nobody watches a terminal."""

import io
import sys

from lab.progress import Progress


def test_line_appears_at_least_every_30_seconds_without_a_terminal(capsys):
    now = 0.0
    progress = Progress(lambda: now)
    with progress:
        progress.prefix = "2/3 "
        progress.start("timing", 100)
        for _ in range(100):
            now += 1.0
            progress.advance()
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"2/3 timing, {done} of 100" for done in (30, 60, 90)]


def test_printed_line_counts_as_progress(capsys):
    now = 0.0
    progress = Progress(lambda: now)
    progress.start("training", 10)
    now = 29.0
    progress.print("half done")
    now = 58.0
    progress.advance("step 2")
    now = 59.0
    progress.advance("step 3")
    printed = capsys.readouterr()
    assert printed.out == "half done\n"
    assert printed.err == "step 3, 2 of 10\n"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_terminal_without_rich_gets_a_line_for_each_work(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    progress = Progress()
    progress.start("building")
    progress.start("timing", 2)
    progress.advance()
    assert terminal.getvalue() == "building\ntiming\n"
