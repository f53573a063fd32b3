"""A command that is stopped anywhere, or finds the disk full, can be repeated."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

STOPPING = Path(__file__).with_name("stopping.py")


def new_copies(project):
    return ["add", "--to", project.name, "ffn"]


def a_copy_by_hand(project):
    project.folder.mkdir(parents=True)
    shutil.copy(project.tinyblock / "ffn.py", project.folder)
    return new_copies(project)


def edits_and_changes(project):
    """rope.py has a conflict, rmsnorm.py is missing, and ffn.py imports a new file."""
    project.run("add", "ffn", "rmsnorm", "rope")
    project.edit("ffn.py", "import math\n", "import math  # mine\n")
    project.append("rope.py", "# mine")
    (project.folder / "rmsnorm.py").unlink()
    project.release("0.2.0", ffn="from .parallelize import parallelize", rope="# new")
    return ["update", project.name]


def edits_and_changes_without_a_new_number(project):
    project.run("add", "ffn")
    project.edit("ffn.py", "import math\n", "import math  # mine\n")
    project.release("0.1.0", ffn="# new")
    return ["update", project.name]


@pytest.mark.parametrize(
    "prepare",
    [
        new_copies,
        a_copy_by_hand,
        edits_and_changes,
        edits_and_changes_without_a_new_number,
    ],
)
def test_a_repeated_command_completes_one_that_was_stopped(prepare, empty):
    """stopping.py stops it before each change and in each file, or fills the disk there.

    It repeats the command each time, and compares the folder with that of a whole run.
    """
    command = prepare(empty)
    program = [sys.executable, "-BIS", STOPPING, empty.tinyblock, empty.name]
    done = subprocess.run(
        [*program, *command],
        cwd=empty.root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    stops, written = map(
        int, re.findall(r"stopped (\d+) times, (\d+) files", done.stdout)[0]
    )
    assert written > 1
    # Among others, before each file is opened, and before it is renamed.
    assert stops > 2 * written
