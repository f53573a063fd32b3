"""What is shown of the progress where the output goes to a file or a pipe."""

import sys
import time

import pytest
from lab.progress import Progress


def lines_until(capsys, text):
    """Return what was printed to stderr up to the first line with this text, which appears within some seconds."""
    found = ""
    for _ in range(1000):
        found += capsys.readouterr().err
        if text in found:
            return found
        time.sleep(0.01)
    pytest.fail(f"{text!r} never appeared in {found!r}")


def test_progress_in_a_pipe_is_a_line_now_and_then(capsys):
    with Progress(seconds=0.02) as progress:
        progress.prefix = "1/2 "
        progress.start("compiling")
        assert "0 s: 1/2 compiling\n" in lines_until(capsys, "compiling")
        progress.start("timing", 9)
        progress.advance()
        progress.advance()
        lines_until(capsys, "1/2 timing, 2 of 9\n")
        progress.advance("timing the last part")
        lines_until(capsys, "1/2 timing the last part, 3 of 9\n")
        progress.print("a line")
        lines_until(capsys, "3 of 9\n")
    capsys.readouterr()
    time.sleep(0.1)
    assert capsys.readouterr().err == ""


def test_progress_of_a_short_program_in_a_pipe_is_silent(capsys):
    with Progress() as progress:
        progress.start("timing", 2)
        progress.advance()
    assert capsys.readouterr() == ("", "")


def test_progress_on_a_terminal_without_rich_has_a_line_for_each_work(
    capsys, monkeypatch
):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with Progress(seconds=0.01) as progress:
        progress.start("building")
        progress.start("timing", 2)
        progress.advance()
        time.sleep(0.05)
    assert capsys.readouterr().err == "building\ntiming\n"
