"""A command that is stopped anywhere, and then repeated, does what it would have done."""

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
    assert written > 1
    assert stops > 2 * written  # it opens and renames each of them


@pytest.fixture
def small_disk(empty):
    """Mount a file system on the folder in which commands run, and return its `resize`."""

    def mount(options):
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", empty.root]
        return subprocess.run(command, check=False, capture_output=True).returncode

    if not shutil.which("mount") or mount("size=16k"):
        pytest.skip("requires the right to mount a file system")
    yield lambda size: mount(f"remount,size={size}")
    subprocess.run(["umount", empty.root], check=True)


def test_a_full_disk_damages_nothing(empty, small_disk):
    """Neither where the disk is full of new copies, nor where it is full of longer ones."""
    names = ("ffn.py", "rmsnorm.py")
    for command, size in (("add", "256k"), ("update", "1m")):
        before = empty.contents()
        new = {name: empty.written(name) for name in names}
        new |= {f".tinyblock/{name}.base": text for name, text in new.items()}
        layers = ["ffn", "rmsnorm"] if command == "add" else []
        printed = empty.run(command, *layers, code=2)
        assert "cannot be written: No space left on device" in printed
        for name, text in empty.contents().items():
            is_whole = text in (before.get(name), new.get(name))
            assert is_whole or name == "LICENSE.tinyblock", name
        small_disk(size)
        empty.run(command, *layers)
        assert empty.contents().items() >= new.items()
        empty.release("0.2.0", ffn="# new\n" * 10_000, rmsnorm="# new\n" * 20_000)
