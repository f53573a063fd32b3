"""Copies of a release, updated to a later one, and the page on editing them."""

import os
import re
import shlex
import shutil
from pathlib import Path

import pytest

from tinyblock import copies

PAGE = Path(__file__).parents[2] / "docs" / "edit_a_layer.md"
MARKED = {"rope": "conflict markers: resolve them"}


class Project:
    """A folder of copies, whose path has a space and an umlaut, and two releases."""

    def __init__(self, root, monkeypatch, capsys):
        self.root = root
        self.folder = root / "läyers of mine"
        self.monkeypatch = monkeypatch
        self.capsys = capsys
        self.release("0.1.0")

    def release(self, version, **lines):
        """Install a release. These lines follow the titles of its files."""
        root = shutil.copytree(copies.ROOT, self.root / version)
        self.monkeypatch.setattr(copies, "ROOT", root)
        self.monkeypatch.setattr(copies, "__version__", version)
        for name, line in lines.items():
            edit(root / f"{name}.py", "\n\n", f"\n\n{line}\n")

    def run(self, command, *arguments):
        """Return the exit code and what was printed."""
        code = copies.main([command, *map(str, arguments)])
        return code, "".join(self.capsys.readouterr())

    def rows(self, command, *arguments):
        """Return the exit code, and what was printed for each file."""
        code, text = self.run(command, self.folder, *arguments)
        return code, dict(re.findall(r"^(\S+)\.py +(.*)", text, re.MULTILINE))

    def diff(self, *arguments):
        """Return what `diff` prints for rope, without its context."""
        text = self.run("diff", self.folder, "rope", *arguments)[1]
        return re.findall(r"^[-+][^-+].*", text, re.MULTILINE)

    def path(self, name):
        return self.folder / f"{name}.py"

    def files(self):
        paths = self.folder.rglob("*.*")
        return {path: path.read_text() for path in paths if path.is_file()}


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.fixture
def project(tmp_path, monkeypatch, capsys):
    project = Project(tmp_path, monkeypatch, capsys)
    assert project.run("add", "rope", "block", "--to", project.folder)[0] == 0
    return project


def test_add_copies_layers_with_header_license_and_what_they_import(project):
    names = {path.stem for path in project.folder.glob("*.py")}
    assert names == {"attention", "block", "ffn", "rmsnorm", "rope"}
    text = project.path("rope").read_text()
    assert text.startswith("# Copied from tinyblock 0.1.0: rope.py\n# Copyright (c)")
    assert text.endswith((copies.ROOT / "rope.py").read_text())
    assert (project.folder / "LICENSE.tinyblock").read_text().startswith("MIT")
    assert project.rows("check") == (0, {})


def test_another_file_is_never_replaced_and_nothing_is_written(project):
    project.release("0.2.0", ffn="from .typecheck import typecheck", rope="# new")
    path = project.path("typecheck")
    path.write_text("# mine")
    files = project.files()
    assert project.run("update", project.folder)[0] == 2
    assert project.files() == files
    shutil.copy(copies.ROOT / path.name, path)  # by hand
    assert project.run("update", project.folder)[0] == 0
    assert path.read_text().startswith("# Copied from")


def test_nothing_is_written_if_a_file_cannot_be(project):
    (project.folder / "contract").touch()  # so there can be no such folder
    project.path("ffn").unlink()
    files = project.files()
    assert project.run("add", "ffn", "--with-tests", "--to", project.folder)[0] == 2
    assert project.files() == files


def test_update_merges_edits_with_changes(project):
    edit(project.path("rope"), "import math\n", "import math  # mine\n")
    header = project.path("ffn").read_text().partition('"""')[0]
    edit(project.path("ffn"), header, "")
    project.path("rmsnorm").unlink()  # for good
    (project.folder / ".tinyblock" / "rmsnorm.py.base").unlink()
    new = "from .typecheck import typecheck"
    project.release("0.2.0", rope=new, ffn="# new", block="# new")
    expected = {
        "block": "outdated: 0.1.0 -> 0.2.0",
        "ffn": "edited, outdated: 0.1.0 -> 0.2.0",
        "rope": "edited, outdated: 0.1.0 -> 0.2.0",
    }
    assert project.rows("check") == (1, expected)
    mine = ["-import math", "+import math  # mine"]
    assert project.diff("--mine") == mine
    assert project.diff("--upstream") == [f"+{new}"]
    assert project.diff() == [*mine, f"+{new}"]
    expected = {
        "attention": "up to date",
        "block": "updated",
        "ffn": "merged with your edits",
        "rope": "merged with your edits",
        "typecheck": "copied",
    }
    assert project.rows("update") == (0, expected)
    assert project.rows("check") == (0, {"ffn": "edited", "rope": "edited"})
    assert project.diff() == mine


def test_update_marks_conflicts_and_restores_missing_copies(project):
    project.path("ffn").unlink()
    assert project.rows("check") == (1, {"ffn": "missing"})
    edit(project.path("rope"), "\n\n", "\n\n# mine\n")
    project.release("0.2.0", rope="# new")
    code, done = project.rows("update")
    assert (code, done["ffn"]) == (1, "copied")
    conflict = "<{7} yours\n# mine\n[|]{7} .*\n={7}\n# new\n>{7} .*\n"
    path = project.path("rope")
    text, count = re.subn(conflict, "# mine and new\n", path.read_text())
    assert count == 1
    assert project.rows("check") == (1, MARKED)
    assert project.rows("update", "rope") == (1, MARKED)
    path.write_text(text)
    assert project.rows("check") == (0, {"rope": "edited"})


@pytest.mark.parametrize("stopped", ["rope.py", "rope.py.base"])
def test_repeated_update_completes_one_that_was_interrupted(
    stopped, project, monkeypatch
):
    edit(project.path("rope"), "\n\n", "\n\n# mine\n")
    project.release("0.2.0", rope="# new", block="# new", rmsnorm="# new")
    replace = os.replace

    def stop(source, target):
        if target.name == stopped:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        project.run("update", project.folder)
    monkeypatch.setattr(os, "replace", replace)
    assert project.run("update", project.folder)[0] == 1
    assert project.rows("check") == (1, MARKED)
    assert project.path("rope").read_text().count("# new\n") == 1


def test_a_copy_restored_without_its_base_is_an_error(project):
    old = project.path("rope").read_text()
    project.release("0.2.0", rope="# new")
    assert project.run("update", project.folder)[0] == 0
    project.path("rope").write_text(old)
    assert project.run("check", project.folder)[0] == 2


def test_copies_of_a_newer_tinyblock_are_listed_and_skipped(project):
    files = project.files()
    project.release("0.0.9", rope="# old")
    code, found = project.rows("check")
    assert (code, found["rope"]) == (0, "from the newer tinyblock 0.1.0")
    assert project.rows("update") == (0, found)
    assert project.files() == files


@pytest.mark.parametrize("arguments", [["check", "nowhere"], ["add", "x", "--to", "y"]])
def test_errors_are_one_line(arguments, project):
    code, error = project.run(*arguments)
    assert code == 2
    assert re.fullmatch(r"tinyblock: error: .*\n", error)


def apply(patch):
    """Edit a file as a page shows it."""
    path = Path(re.search(r"^\+\+\+ (.*)", patch, re.MULTILINE)[1])
    for hunk in re.split(r"^@@.*\n", patch, flags=re.MULTILINE)[1:]:
        old = re.sub(r"^(\+.*\n|[- ])", "", hunk, flags=re.MULTILINE)
        new = re.sub(r"^(-.*\n|[+ ])", "", hunk, flags=re.MULTILINE)
        edit(path, old, new)


def test_edit_a_layer_shows_what_is_printed(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    page = PAGE.read_text()
    for block in re.findall(r"^```\w+\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        if "@@" in block:
            apply(block)
        command, _, shown = block.partition("\n")
        if command.startswith("$ tinyblock"):
            code = copies.main(shlex.split(command)[2:])
            assert code == int("FAILED" in shown)
            printed = iter(capfd.readouterr().out.splitlines())
            for line in shown.replace("...\n", "").splitlines():
                # On CI or a wide terminal, pytest adds the reason to a line.
                assert any(text.startswith(line) for text in printed), command
