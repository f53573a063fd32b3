"""A command that is stopped anywhere, and then repeated, does what it would have done."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

STOPPING = Path(__file__).with_name("stopping.py")


def new_copies(project):
    return ["add", "--to", project.name, "ffn", "rmsnorm"]


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
    project.run("add", "ffn", "rmsnorm")
    project.edit("ffn.py", "import math\n", "import math  # mine\n")
    project.release("0.1.0", ffn="# new", rmsnorm="# new")
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
    command = prepare(empty)
    done = subprocess.run(
        [
            sys.executable,
            "-BIS",
            STOPPING,
            empty.tinyblock,
            empty.name,
            *command,
        ],
        cwd=empty.root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    stops, written = map(
        int, re.findall(r"stopped (\d+) times, (\d+) files", done.stdout)[0]
    )
    assert written > 3
    assert stops > 2 * written  # it opens and renames each of them


@pytest.fixture
def small_disk(empty):
    """Mount a file system of 32 kilobytes on the folder in which commands run."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", empty.root]
    if not shutil.which("mount") or subprocess.run(mount, check=False).returncode:
        pytest.skip("requires the right to mount a file system")
    yield empty
    subprocess.run(["umount", empty.root], check=True)


def test_a_full_disk_damages_nothing(small_disk):
    command = ["add", "--to", small_disk.name, "block"]
    done = small_disk.start(*command)
    assert done.returncode == 2
    assert "cannot be written: No space left on device" in done.stderr
    names = ("attention.py", "block.py", "ffn.py", "rmsnorm.py")
    written = {name: small_disk.written(name) for name in names}
    contents = small_disk.contents()
    assert 0 < len(contents) < 9
    assert all(contents.get(name, text) == text for name, text in written.items())
    resize = ["mount", "-o", "remount,size=256k", small_disk.root]
    subprocess.run(resize, check=True)
    assert small_disk.start(*command).returncode == 0
    assert small_disk.contents().items() >= written.items()
    assert small_disk.rows("check") == {}

    small_disk.append("ffn.py", "# mine")
    small_disk.release("0.2.0", ffn="# new\n" * 3000, rmsnorm="# new\n" * 30000)
    before = small_disk.contents()
    update = ["update", small_disk.name, "rmsnorm"]
    assert small_disk.start(*update).returncode == 2
    assert small_disk.contents() == before
