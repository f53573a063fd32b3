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


def test_a_base_that_is_not_as_written_is_an_error(project):
    path = f"{project.name}/.tinyblock/rope.py.base"
    base = project.base("rope.py")
    text = base.read_bytes()
    project.append("rope.py", "# mine")
    project.release("0.2.0", rope="# new")
    for wrong, error in (
        (b"", f"rope.py in {project.name} must have bases"),
        (text.partition(b'"""')[2], f"{path} must be as tinyblock wrote it"),
        (text + b"<<<<<<< HEAD\n", f"{path} must be as tinyblock wrote it"),
        ("grün".encode("latin-1"), f"{path} must be text in UTF-8"),
    ):
        base.write_bytes(wrong)
        before = project.contents()
        for command in ("check", "update", "diff"):
            assert error in project.run(command, code=2)
        assert project.contents() == before, error


def test_a_copy_that_is_restored_without_its_base_is_an_error_that_names_both(project):
    old = project.contents()["rope.py"]
    project.release("0.2.0", rope="# new")
    project.run("update")
    project.write("rope.py", old)
    printed = project.run("update", code=2)
    assert "rope.py is from tinyblock 0.1.0, but its base is from 0.2.0" in printed
    assert "rope.py.base" in printed


def test_a_renamed_copy_is_updated_if_its_base_is_renamed_too(project):
    (project.folder / "rope.py").rename(project.folder / "rotary.py")
    error = f"{project.name}/rotary.py was copied as rope.py, and must have a base: "
    for command in ("check", "update"):
        repair = f"rename {project.name}/.tinyblock/rope.py.base to"
        assert f"{error}{repair}" in project.run(command, code=2)
    project.base("rope.py").rename(project.base("rotary.py"))
    assert project.rows("check") == {}
    project.release("0.2.0", rope="# new")
    assert project.rows("check", code=1) == {"rotary.py": "outdated: 0.1.0 -> 0.2.0"}
    assert project.rows("update", "rotary") == {"rotary.py": "updated"}
    contents = project.contents()
    assert contents["rotary.py"] == project.written("rope.py")
    assert "rope.py" not in contents


def test_a_renamed_copy_whose_base_is_lost_must_get_its_name_back(project):
    (project.folder / "rope.py").rename(project.folder / "rotary.py")
    project.base("rope.py").unlink()
    assert "must have a base: rename it to rope.py" in project.run("check", code=2)


def test_to_own_a_file_delete_its_base_and_its_first_line(project):
    project.base("rope.py").unlink()
    text = project.contents()["rope.py"].partition(b"\n")[2]
    (project.folder / "rope.py").write_bytes(text)
    project.release("0.2.0", rope="# new", ffn="# new")
    assert project.rows("check", code=1) == {"ffn.py": "outdated: 0.1.0 -> 0.2.0"}
    assert "rope.py" not in project.rows("update")
    assert project.contents()["rope.py"] == text


def test_a_duplicate_of_a_copy_is_the_users_own(project):
    shutil.copy(project.folder / "rope.py", project.folder / "variant.py")
    assert project.rows("check") == {}
    assert "variant.py" not in project.rows("update")


def test_without_bases_an_error_says_how_to_get_them_back(project):
    project.run("add", "rope", "--with-tests")
    project.append("ffn.py", "# mine")
    before = project.contents()
    shutil.rmtree(project.folder / ".tinyblock")
    layers = ("attention", "block", "ffn", "rmsnorm", "rope")
    repair = f"add {' '.join(layers)} --to '{project.name}' --with-tests"
    for command in ("check", "diff", "update"):
        printed = project.run(command, code=2)
        assert f"`tinyblock {repair}` of tinyblock 0.1.0" in printed
    rows = project.rows("add", *layers, "--with-tests")
    assert rows["ffn.py"] == "edited, and has a base again"
    # All is there again, with pages that the other layers did not have.
    assert before.items() <= project.contents().items()
    assert project.rows("check") == {"ffn.py": "edited"}


def test_bases_of_an_older_release_come_from_that_release(project):
    older = project.tinyblock
    shutil.rmtree(project.folder / ".tinyblock")
    project.append("ffn.py", "# mine")
    project.release("0.2.0", ffn="# new")
    before = project.contents()
    assert "run `add` of tinyblock 0.1.0" in project.run("add", "ffn", code=2)
    assert "of tinyblock 0.1.0" in project.run("update", code=2)
    assert project.contents() == before
    newer, project.tinyblock = project.tinyblock, older
    project.run("add", "block", "rope", "ffn")
    project.tinyblock = newer
    # It knows the edit again, which is at the line that has changed.
    assert project.rows("update", code=1)["ffn.py"] == CONFLICT


# What block.py may have in place of `from .ffn import SwiGLU`, in a plain folder.
IMPORTS_OF_FFN = (
    "from . import rmsnorm, ffn as feed_forward",
    "from my_package.cöpies.ffn import (  # here\n    SwiGLU as Gated,\n)",
    "import my_package.cöpies.ffn as ffn",
    "from ..cöpies.ffn import SwiGLU",
    "from ffn import SwiGLU",
    "def late():\n    from .ffn import SwiGLU",
)
OTHER_IMPORTS = (
    "from .mine import SwiGLU",
    "from . import DTYPE",
    "from other.ffn import SwiGLU",
    "from . import copies, __main__",  # modules of tinyblock that are not copied
    "from ... import ffn",  # from two folders above
)


def without_ffn(project, imports):
    """Let block.py import this, and delete ffn.py with its base."""
    for path in (project.folder / "ffn.py", project.base("ffn.py")):
        path.unlink(missing_ok=True)
    text = project.written("block.py").decode()
    text = text.replace("from .ffn import SwiGLU", imports)
    (project.folder / "block.py").write_text(text)


def test_a_missing_file_is_reported_and_restored_however_it_is_imported(project):
    for imports in IMPORTS_OF_FFN:
        without_ffn(project, imports)
        row = project.rows("check", code=1)["block.py"]
        assert row.endswith("imports missing files: ffn.py"), imports
        assert project.rows("update")["ffn.py"] == "copied", imports
        assert project.contents()["ffn.py"] == project.written("ffn.py"), imports


def test_another_import_misses_no_file(project):
    for imports in OTHER_IMPORTS:
        without_ffn(project, imports)
        assert project.rows("check") == {"block.py": "edited"}, imports
        assert "ffn.py" not in project.rows("update"), imports
    # In a package, this ffn is not the one in the folder.
    (project.folder / "__init__.py").touch()
    without_ffn(project, "from ffn import SwiGLU")
    assert project.rows("check") == {"block.py": "edited"}


def test_a_missing_copy_with_a_base_is_reported_once(project):
    (project.folder / "ffn.py").unlink()
    assert project.rows("check", code=1) == {"ffn.py": "missing"}


def git(folder, *arguments):
    config = ["-c", "user.name=A", "-c", "user.email=a@example.com"]
    command = ["git", *config, *arguments]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)


def test_add_warns_where_git_ignores_a_base(empty):
    """Without the warning, a fresh clone would lack the bases."""
    git(empty.root, "init")
    gitignore = empty.root / ".gitignore"
    gitignore.write_text(".*\n")
    warning = f"git ignores {empty.name}/.tinyblock/rope.py.base"
    for command in ("add", "update"):
        assert warning in empty.run(command, "rope")
    gitignore.write_text("*.base\n.*\n!.tinyblock/\n!*.base\n")  # as it says
    assert "git ignores" not in empty.run("add", "rope")
    git(empty.root, "add", "--all")
    git(empty.root, "commit", "-m", "copies")
    before = empty.contents()
    git(empty.root, "clone", ".", "../clone")
    empty.root = empty.root.parent / "clone"
    assert empty.contents() == before
    assert empty.rows("check") == {}


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
        error = "take the whole file from the branch with the newer version"
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
        (None, "git must be on PATH to merge your edits of my_package/cöpies/rope.py"),
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


def test_without_git_an_unedited_copy_is_updated(project, tmp_path):
    environment = programs(tmp_path / "programs")
    project.release("0.2.0", rope="# new")
    done = project.start("update", project.name, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert project.rows("check") == {}


def test_a_link_stays_a_link_and_a_file_keeps_its_mode(project):
    shared = project.root / "shared.py"
    (project.folder / "rope.py").rename(shared)
    (project.folder / "rope.py").symlink_to("../../shared.py")
    shared.chmod(0o640)
    (project.folder / "ffn.py").chmod(0o755)
    project.release("0.2.0", rope="# new", ffn="# new")
    project.run("update")
    assert os.readlink(project.folder / "rope.py") == "../../shared.py"
    assert shared.read_bytes() == project.written("rope.py")
    assert shared.stat().st_mode & 0o777 == 0o640
    assert (project.folder / "ffn.py").stat().st_mode & 0o777 == 0o755


def test_a_dangling_link_is_an_error_that_names_it(project):
    for path in (project.folder / "rope.py", project.base("rope.py")):
        path.rename(path.with_suffix(".moved"))
        path.symlink_to("nowhere")
        for command in ("check", "update", "add"):
            printed = project.run(command, "rope", code=2)
            assert f"{path.name} is a link to nowhere" in printed
        path.unlink()
        path.with_suffix(".moved").rename(path)
    project.folder.rename(project.root / "moved")
    project.folder.symlink_to("nowhere")
    for command in ("check", "update", "add"):
        printed = project.run(command, "rope", code=2)
        assert f"DIR must be a folder, got a link to nothing, {project.name}" in printed
