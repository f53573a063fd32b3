"""What the pages on copies show is what the command prints."""

import contextlib
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from forked import verify
from pages import block_with, blocks, require_shown

from tinyblock import copies

ROOT = Path(__file__).parents[2]
VENDORING = ROOT / "docs" / "copy.md"


def apply(patch):
    """Edit a file as a page shows it."""
    path = Path(re.search(r"^\+\+\+ (.*)", patch, re.MULTILINE)[1])
    for hunk in re.split(r"^@@.*\n", patch, flags=re.MULTILINE)[1:]:
        old = re.sub(r"^(\+.*\n|[- ])", "", hunk, flags=re.MULTILINE)
        new = re.sub(r"^(-.*\n|[+ ])", "", hunk, flags=re.MULTILINE)
        text = path.read_text()
        assert old in text, patch
        path.write_text(text.replace(old, new, 1))


def test_the_page_shows_what_is_printed_of_an_edit(tmp_path, capsys):
    """The edit that `diff` prints on the page is made before `diff` runs."""
    subcommands = []
    with contextlib.chdir(tmp_path):
        for block in blocks(VENDORING):
            if "@@" in block:
                apply(block)
            command, _, shown = block.partition("\n")
            if not command.startswith("$ tinyblock") or "my_package" in command:
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
    assert subcommands == ["add", "diff", "verify", "verify"]


@pytest.mark.parametrize("page", ["README.md", "docs/copy.md"])
def test_page_shows_what_add_prints(page, tmp_path):
    """The README's command runs in a clone, the other one in a folder beside it."""
    clone = tmp_path / "tinyblock"
    project = tmp_path / "project"
    shutil.copytree(ROOT / "tinyblock", clone / "tinyblock")
    project.mkdir()
    block = block_with(ROOT / page, "$ python3 ")
    command, _, shown = block.removeprefix("$ python3 ").partition("\n")
    done = subprocess.run(
        [Path(sys.executable).with_name("python3"), *shlex.split(command)],
        cwd=clone if page == "README.md" else project,
        capture_output=True,
        text=True,
        check=True,
    )
    require_shown(shown, done.stdout, command)


def require_printed(project, block):
    """Run each command that a block shows on the project's copies."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, shown = part.partition("\n")
        printed = project.run(shlex.split(command)[1], code=int("outdated" in shown))
        require_shown(shown, printed, command)


def test_the_page_shows_what_check_prints_of_an_edit(project):
    project.append("ffn.py", "# mine")
    require_printed(project, block_with(VENDORING, "4 of 5 copies are unedited"))


def test_the_page_shows_what_check_and_update_print_of_a_release(project):
    project.edit("rope.py", "import math\n", "import math  # mine\n")
    project.release("0.2.0", ffn="# new", rope="# new")
    require_printed(project, block_with(VENDORING, "3 of 5 copies are unedited"))


def test_the_page_shows_a_conflict(project):
    line = "return self.theta ** (-even / self.d_k)"
    project.edit("rope.py", line, f"{line} / 8")
    project.release("0.2.0")
    project.change("rope.py", line, "return torch.pow(self.theta, -even / self.d_k)")
    project.run("update", code=1)
    shown = block_with(VENDORING, "<<<<<<< yours")
    assert shown in (project.folder / "rope.py").read_text()


def test_the_page_shows_that_a_file_of_ones_own_is_kept(empty):
    empty.folder.mkdir(parents=True)
    (empty.folder / "ffn.py").write_text("class SwiGLU: ...")
    assert block_with(VENDORING, "kept, because") in empty.run("add", "block")
