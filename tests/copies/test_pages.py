"""What the pages on copies show is what the command prints."""

import re
import shlex
from pathlib import Path

import pytest
from forked import verify

from tinyblock import copies

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page):
    return re.findall(r"^```\w+\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def apply(patch):
    """Edit a file as a page shows it."""
    path = Path(re.search(r"^\+\+\+ (.*)", patch, re.MULTILINE)[1])
    for hunk in re.split(r"^@@.*\n", patch, flags=re.MULTILINE)[1:]:
        old = re.sub(r"^(\+.*\n|[- ])", "", hunk, flags=re.MULTILINE)
        new = re.sub(r"^(-.*\n|[+ ])", "", hunk, flags=re.MULTILINE)
        text = path.read_text()
        assert old in text, patch
        path.write_text(text.replace(old, new, 1))


def require_shown(shown, printed, command):
    """Require each printed line to be shown; a line `...` stands for some that are not."""
    patterns = {"...": r"(?:.*\n)*?"}
    # On CI or a wide terminal, pytest adds the reason to a line.
    lines = [
        patterns.get(line, re.escape(line) + r".*\n") for line in shown.splitlines()
    ]
    if not re.fullmatch("".join(lines), printed):
        pytest.fail(f"{command} prints:\n{printed}\nThe page shows:\n{shown}")


def test_edit_a_layer_shows_what_is_printed(tmp_path, monkeypatch, capsys):
    """The edit that `diff` prints on the page is made before `diff` runs."""
    monkeypatch.chdir(tmp_path)
    subcommands = []
    for block in blocks(DOCS / "edit_a_layer.md"):
        if "@@" in block:
            apply(block)
        command, _, shown = block.partition("\n")
        if not command.startswith("$ tinyblock"):
            continue
        _, _, subcommand, *arguments = shlex.split(command)
        if subcommand == "verify":
            code, printed = verify(*arguments)
        else:
            code = copies.main([subcommand, *arguments])
            printed = capsys.readouterr().out
        assert code == int("FAILED" in shown), f"{command}: {printed}"
        require_shown(shown, printed, command)
        subcommands.append(subcommand)
    assert set(subcommands) == {"add", "check", "diff", "verify"}


def test_vendoring_shows_what_add_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    [shown] = [block for block in blocks(DOCS / "vendoring.md") if "add block" in block]
    command, _, rows = shown.partition("\n")
    assert (
        command
        == "$ python3 ../tinyblock/tinyblock add block rope --to my_package/layers"
    )
    monkeypatch.setattr(copies, "started_as", lambda: "python3 ../tinyblock/tinyblock")
    copies.main(shlex.split(command)[3:])
    assert capsys.readouterr().out == rows


def test_vendoring_shows_the_header():
    header = copies.HEADER.format(version=copies.VERSION, name="block.py")
    assert header in blocks(DOCS / "vendoring.md")
