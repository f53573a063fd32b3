"""What the pages on copies show is what the command prints."""

import re
import shlex
from pathlib import Path

import pytest
from forked import verify
from pages import block_with, blocks, require_shown

from tinyblock import copies

DOCS = Path(__file__).parents[2] / "docs"


def apply(patch):
    """Edit a file as a page shows it."""
    path = Path(re.search(r"^\+\+\+ (.*)", patch, re.MULTILINE)[1])
    for hunk in re.split(r"^@@.*\n", patch, flags=re.MULTILINE)[1:]:
        old = re.sub(r"^(\+.*\n|[- ])", "", hunk, flags=re.MULTILINE)
        new = re.sub(r"^(-.*\n|[+ ])", "", hunk, flags=re.MULTILINE)
        text = path.read_text()
        assert old in text, patch
        path.write_text(text.replace(old, new, 1))


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


@pytest.mark.parametrize("page", ["README.md", "docs/vendoring.md"])
def test_page_shows_what_add_prints(page, tmp_path, monkeypatch, capsys):
    root = DOCS.parent
    monkeypatch.chdir(tmp_path)
    command, _, shown = block_with(root / page, "tinyblock add").partition("\n")
    _, python, shown_program, *arguments = shlex.split(command)
    monkeypatch.setattr(copies, "started_as", lambda: f"{python} {shown_program}")
    copies.main(arguments)
    require_shown(shown, capsys.readouterr().out, command)


def commands_of(block):
    """Return the subcommands that a block shows, and what it shows below each.

    The fixture `project` runs them in a folder of its own.
    """
    found = []
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, shown = part.partition("\n")
        found.append((shlex.split(command)[1], shown))
    return found


def test_vendoring_shows_what_check_prints_of_an_edit(project):
    block = block_with(DOCS / "vendoring.md", "4 of 5 copies are pristine")
    project.append("ffn.py", "# mine")
    for command, shown in commands_of(block):
        project.run(command)
        require_shown(shown, project.printed, command)


def test_vendoring_shows_what_check_and_update_print_of_a_release(project):
    block = block_with(DOCS / "vendoring.md", "3 of 5 copies are pristine")
    project.edit("rope.py", "import math\n", "import math  # mine\n")
    project.release("0.2.0", ffn="# new", rope="# new")
    for command, shown in commands_of(block):
        project.run(command, code=int("outdated" in shown))
        require_shown(shown, project.printed, command)


def test_vendoring_shows_the_header():
    header = copies.HEADER.format(version=copies.VERSION, name="block.py")
    assert header in blocks(DOCS / "vendoring.md")
