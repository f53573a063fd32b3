"""A command that is stopped anywhere, or finds the disk full, is completed or undone."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

STOPPING = Path(__file__).with_name("stopping.py")
# Of 0.2.0, after the function that the user has edited. A second merge would insert it again.
RELU = '''\
def relu(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return max(x, 0)."""
    return F.relu(x)


'''


def new_copies(project):
    return ["add", "--to", project.name, "rmsnorm", "ffn"]


def edits_and_changes(project):
    """Of copies with an edit, a new import, a conflict, CRLF, no last line end, and a link."""
    project.run("add", "attention", "ffn", "rmsnorm", "rope")
    project.edit("ffn.py", "return F.silu(x)\n", "return F.silu(x)  # mine\n")
    project.edit("rope.py", "import math\n", "import math  # mine\n")
    (project.folder / "rmsnorm.py").unlink()
    text = project.contents()["attention.py"] + b"MINE = 1"
    project.write("attention.py", text.replace(b"\n", b"\r\n"))
    (project.folder / "shared").mkdir()
    (project.folder / "attention.py").rename(project.folder / "shared" / "attention")
    (project.folder / "attention.py").symlink_to("shared/attention")
    return ["update", project.name]


def partial_files(project):
    """Of copies after two stops: one before and one after a copy took its place."""
    project.run("add", "ffn", "rmsnorm")
    base = project.base("ffn.py")
    (project.folder / "ffn.py.partial").write_bytes(b"new")
    base.with_name(f"{base.name}.partial").write_bytes(b"ne")
    base = project.base("rmsnorm.py")
    base.rename(base.with_name(f"{base.name}.partial"))
    return ["update", project.name]


def change(project):
    """What edits_and_changes is updated to."""
    project.change("ffn.py", "def gelu(", f"{RELU}def gelu(")
    imports = "from torch import Tensor, nn\n"
    project.change(
        "ffn.py", imports, f"{imports}from .parallelize import parallelize\n"
    )
    project.change("rope.py", "import math\n", "import math  # new\n")
    project.change("attention.py", "import torch\n", "import torch  # new\n")


@pytest.mark.parametrize("prepare", [new_copies, edits_and_changes, partial_files])
def test_a_stopped_command_is_completed_or_undone(prepare, empty):
    """stopping.py stops it before each change and in each file, or fills the disk there.

    After each stop, it looks at the copies, and goes on with a repetition, edits, or a
    newer release. The folder is then as if the command had not been stopped.
    """
    command = prepare(empty)
    empty.release("0.2.0")
    change(empty)
    release = empty.tinyblock
    empty.release("0.3.0", rmsnorm="# newer")
    change(empty)
    empty.change("ffn.py", "import math\n", "import math  # newer\n")
    # A file that 0.2.0 may just have copied.
    (empty.tinyblock / "parallelize.py").unlink()
    program = [sys.executable, "-BIS", STOPPING, release, empty.tinyblock, empty.name]
    done = subprocess.run(
        [*program, *command],
        cwd=empty.root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    stops, states = map(int, re.findall(r"(\d+) stops, (\d+) states", done.stdout)[0])
    # Copies and bases: each is opened and renamed.
    assert stops > 4 * len(command)
    assert states > 4
