"""Copies in the projects of users, with their linters, git, links and edits.

A base, .tinyblock/rope.py.base, has what tinyblock wrote as the copy. The exit code is 1
where a user has work to do, and 2 after an error.
"""

import os
import re
import shutil
import subprocess
import sys

import pytest

CONFLICT = "conflict markers: resolve them"


def ruff(*arguments):
    command = [sys.executable, "-m", "ruff", *arguments, "--isolated", "--no-cache"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_ruff_leaves_copies_and_their_edits_alone(empty):
    """With its own rules, with all of them, and with a usual choice."""
    pytest.importorskip("ruff", reason="requires the extra dev")
    layers = ("block", "parallelize", "rope", "transformer", "typecheck")
    empty.run("add", *layers, "--with-tests")
    empty.edit("rope.py", "import math\n", "import math, os\nx=lambda : 0\n")
    before = empty.contents()
    for rules in ([], ["--select=ALL"], ["--select=PGH,RUF,E,F,N,W"]):
        for command in (
            ["check", *rules],
            ["check", *rules, "--fix", "--unsafe-fixes"],
            ["format", "--line-length=60"],
        ):
            found = ruff(*command, empty.folder)
            assert found.returncode == 0, found.stdout + found.stderr
            assert empty.contents() == before, command


def test_a_base_with_conflict_markers_is_an_error(project):
    with project.base("rope.py").open("ab") as base:
        base.write(b"<<<<<<< HEAD\n")
    before = project.contents()
    for command in ("check", "update", "diff"):
        error = "rope.py.base has conflict markers: take the whole file from"
        assert error in project.run(command, code=2)
    assert project.contents() == before


def test_a_lost_base_is_an_error(project):
    project.append("rope.py", "# mine")
    project.release("0.2.0", rope="# new")
    base = project.base("rope.py")
    for lose in (base.touch, base.unlink):  # empty, and missing
        base.write_bytes(b"")
        lose()
        before = project.contents()
        for command in ("check", "update", "diff"):
            error = f"rope.py was copied as rope.py, and has no base {project.name}/"
            assert error in project.run(command, code=2)
        assert "is not a copy with a base" in project.run("add", "rope", code=2)
        assert project.contents() == before


def test_a_copy_that_is_restored_without_its_base_is_edited(project):
    """docs/copy.md: restore both. `diff` shows what the copy lacks."""
    old = project.contents()["rope.py"]
    project.release("0.2.0", rope="# new")
    project.run("update")
    project.write("rope.py", old)
    assert project.rows("check") == {"rope.py": "edited"}
    assert project.run("diff").endswith("\n-# new\n")


def test_a_renamed_copy_is_updated_if_its_base_is_renamed_too(project):
    (project.folder / "rope.py").rename(project.folder / "rotary.py")
    base = f"{project.name}/.tinyblock/rotary.py.base"
    error = f"{project.name}/rotary.py was copied as rope.py, and has no base {base}: "
    for command in ("check", "update"):
        assert error in project.run(command, code=2)
    project.base("rope.py").rename(project.base("rotary.py"))
    assert project.rows("check") == {}
    project.release("0.2.0", rope="# new")
    outdated = "outdated: tinyblock 0.2.0 has changed it"
    assert project.rows("check", code=1) == {"rotary.py": outdated}
    assert project.rows("update", "rotary") == {"rotary.py": "updated"}
    contents = project.contents()
    assert contents["rotary.py"] == project.written("rope.py")
    assert "rope.py" not in contents


def test_to_own_a_file_delete_its_base_and_its_first_line(project):
    project.base("rope.py").unlink()
    text = project.contents()["rope.py"].partition(b"\n")[2]
    (project.folder / "rope.py").write_bytes(text)
    project.release("0.2.0", rope="# new", ffn="# new")
    assert "rope.py" not in project.rows("check", code=1)
    assert "rope.py" not in project.rows("update")
    assert project.contents()["rope.py"] == text


def test_a_duplicate_of_a_copy_is_the_users_own(project):
    shutil.copy(project.folder / "rope.py", project.folder / "variant.py")
    assert project.rows("check") == {}
    assert "variant.py" not in project.rows("update")


# What block.py may have in place of `from .ffn import SwiGLU`.
IMPORTS_OF_FFN = (
    "from .ffn import (  # here\n    SwiGLU as Gated,\n)",
    "from .ffn import(SwiGLU)",
    "def late():\n    from .ffn import SwiGLU",
)
OTHER_IMPORTS = (
    "from .mine import SwiGLU",
    "from .ffns import SwiGLU",
    "from other.ffn import SwiGLU",
    "from .copies import main",  # of a file that is not copied
    "from . import ffn",  # docs/copy.md says that this form is not seen
)


def without_ffn(project, imports):
    """Let block.py import this, and delete ffn.py with its base."""
    for path in (project.folder / "ffn.py", project.base("ffn.py")):
        path.unlink(missing_ok=True)
    text = project.written("block.py").decode()
    text = text.replace("from .ffn import SwiGLU", imports)
    (project.folder / "block.py").write_text(text)


def test_a_missing_file_that_a_copy_imports_is_copied(project):
    for imports in IMPORTS_OF_FFN:
        without_ffn(project, imports)
        assert project.rows("update")["ffn.py"] == "copied", imports
        assert project.contents()["ffn.py"] == project.written("ffn.py"), imports
    for imports in OTHER_IMPORTS:
        without_ffn(project, imports)
        assert "ffn.py" not in project.rows("update"), imports


def git(folder, *arguments):
    config = ["-c", "user.name=A", "-c", "user.email=a@example.com"]
    command = ["git", *config, *arguments]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)


def test_a_clone_has_all_that_commands_need(project):
    git(project.root, "init")
    git(project.root, "add", "--all")
    git(project.root, "commit", "-m", "copies")
    before = project.contents()
    git(project.root, "clone", ".", "../clone")
    project.root = project.root.parent / "clone"
    assert project.contents() == before
    assert project.rows("check") == {}


def test_the_edits_of_two_branches_survive_their_updates_to_different_releases(project):
    """Git merges the copies. Bases are taken whole from the branch with the newer release."""
    git(project.root, "init", "--initial-branch=one")
    git(project.root, "add", "--all")
    git(project.root, "commit", "-m", "copies")
    git(project.root, "branch", "two")
    project.edit("rope.py", "import math\n", "import math  # of one\n")
    project.release("0.2.0", rope="# new")
    project.run("update")
    git(project.root, "commit", "-am", "one")
    git(project.root, "checkout", "two")
    project.edit("rope.py", "from torch", "import os  # of two\nfrom torch")
    project.release("0.3.0", rope="# new\n# newer")
    project.run("update")
    git(project.root, "commit", "-am", "two")
    with pytest.raises(subprocess.CalledProcessError):
        git(project.root, "merge", "one")
    for command in ("check", "update"):
        error = "take the whole file from the branch with the newer tinyblock"
        assert error in project.run(command, code=2)
    # "Ours" is the branch `two`, with release 0.3.0.
    git(project.root, "checkout", "--ours", f"{project.name}/.tinyblock")
    assert project.rows("check", code=1) == {"rope.py": CONFLICT}
    text = project.contents()["rope.py"].decode()
    ours = re.sub("<{7}.*\\n(?s:(.*?))={7}\\n(?s:.*?)>{7}.*\\n", r"\1", text)
    (project.folder / "rope.py").write_text(ours)
    assert project.rows("check") == {"rope.py": "edited"}
    rope = project.written("rope.py").decode()
    rope = rope.replace("import math\n", "import math  # of one\n")
    rope = rope.replace("from torch", "import os  # of two\nfrom torch", 1)
    assert project.contents()["rope.py"] == rope.encode()


def programs(folder, git=None):
    """Return an environment in which `git` is this script, or missing."""
    folder.mkdir()
    if git is not None:
        (folder / "git").write_text(f"#!/bin/sh\n{git}\n")
        (folder / "git").chmod(0o755)
    return os.environ | {"PATH": str(folder)}


@pytest.mark.parametrize(
    ("git", "error"),
    [
        (None, "git must be on PATH to merge my_package/cöpies/rope.py"),
        (
            "echo no tools >&2; exit 1",
            "git cannot merge my_package/cöpies/rope.py: no tools",
        ),
        ("exit 0", "git cannot merge my_package/cöpies/rope.py"),
        ("echo half; kill -9 $$", "git cannot merge my_package/cöpies/rope.py"),
        ("echo half; exit 255", "git cannot merge my_package/cöpies/rope.py"),
    ],
    ids=["no git", "a stub, as on a new Mac", "no output", "killed", "an error of git"],
)
def test_a_merge_without_a_working_git_changes_nothing(git, error, project, tmp_path):
    project.append("rope.py", "# mine")
    project.release("0.2.0", rope="# new", ffn="# new")
    before = project.contents()
    environment = programs(tmp_path / "programs", git)
    done = project.start("update", project.name, env=environment)
    assert done.returncode == 2
    assert f"tinyblock: error: {error}" in done.stderr
    assert project.contents() == before


def test_a_link_stays_a_link_and_a_file_keeps_its_mode(project):
    shared = project.root / "shared.py"
    (project.folder / "rope.py").rename(shared)
    (project.folder / "rope.py").symlink_to("../../shared.py")
    shared.chmod(0o640)
    (project.folder / "ffn.py").chmod(0o755)
    (project.folder / "block.py").unlink()
    (project.folder / "block.py").symlink_to("../../block.py")  # of a missing file
    project.release("0.2.0", rope="# new", ffn="# new")
    project.run("update")
    assert os.readlink(project.folder / "rope.py") == "../../shared.py"
    assert shared.read_bytes() == project.written("rope.py")
    assert shared.stat().st_mode & 0o777 == 0o640
    assert (project.root / "block.py").read_bytes() == project.written("block.py")
    assert os.readlink(project.folder / "block.py") == "../../block.py"
    assert (project.folder / "ffn.py").stat().st_mode & 0o777 == 0o755


def test_an_older_tinyblock_reads_the_newest_version_of_two_branches(project):
    """Git writes both where branches were updated to different releases."""
    version = project.folder / ".tinyblock" / "version"
    version.write_text("<<<<<<< one\n0.1.0\n=======\n0.3.0\n>>>>>>> two\n")
    project.release("0.2.0")
    assert "a newer tinyblock than this one, 0.2.0" in project.run("check", code=2)
    project.release("0.3.0")
    assert project.rows("check") == {}


def test_a_command_waits_until_another_one_on_the_folder_ends(project):
    fcntl = pytest.importorskip("fcntl", reason="requires locks of folders")
    lock = os.open(project.folder, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    command = [sys.executable, "-I", "-S", project.tinyblock, "check", project.name]
    with subprocess.Popen(command, cwd=project.root, stdout=subprocess.PIPE) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=1)
        os.close(lock)
        printed, _ = process.communicate()
    assert (process.returncode, printed[:6]) == (0, b"5 of 5")
