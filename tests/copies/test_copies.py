"""Copies of a release, updated to a later one, and the page on editing them."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from tinyblock import copies

PAGE = Path(__file__).parents[2] / "docs" / "edit_a_layer.md"
CONFLICT = "<{7} yours\n# mine\n[|]{7} .*\n={7}\n# new\n>{7} .*\n"
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
        root = shutil.copytree(copies.ROOT, self.root / f"{version} {len(lines)}")
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

    def remove(self, name):
        """Remove a copy for good."""
        self.path(name).unlink()
        (self.folder / ".tinyblock" / f"{name}.py.base").unlink()

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
    assert "5 of 5" in project.run("check", project.folder)[1]


def test_another_file_is_never_replaced_and_nothing_is_written(project):
    path = project.path("typecheck")
    path.write_text("# mine")
    files = project.files()
    code, error = project.run("add", "ffn", "typecheck", "--to", project.folder)
    assert (code, str(path) in error) == (2, True)
    project.release("0.2.0", ffn="from .typecheck import typecheck")
    assert project.rows("update", "ffn") == (0, {"ffn": "updated"})  # mine is imported
    assert path.read_text() == files[path]
    assert project.rows("check", "ffn") == (0, {})
    shutil.copy(copies.ROOT / path.name, path)  # by hand
    assert project.run("add", "typecheck", "--to", project.folder)[0] == 0
    assert path.read_text().startswith("# Copied from")


def test_update_merges_edits_with_changes(project):
    edit(project.path("rope"), "import math\n", "import math  # mine\n")
    header = project.path("ffn").read_text().partition('"""')[0]
    edit(project.path("ffn"), header, "")
    project.remove("rmsnorm")
    edit(project.path("block"), "from .rmsnorm", "from .mine")
    (project.folder / "mine").mkdir()
    new = "from .typecheck import typecheck"
    project.release("0.2.0", rope=new, ffn="# new", block="# new")
    edited = ("block", "ffn", "rope")
    expected = dict.fromkeys(edited, "edited, outdated: 0.1.0 -> 0.2.0")
    assert project.rows("check") == (1, expected)
    mine = ["-import math", "+import math  # mine"]
    assert project.diff("--mine") == mine
    assert project.diff("--upstream") == [f"+{new}"]
    assert project.diff() == [*mine, f"+{new}"]
    expected = dict.fromkeys(edited, "merged with your edits")
    others = {"attention": "up to date", "typecheck": "copied"}
    assert project.rows("update") == (0, expected | others)
    assert project.rows("check") == (0, dict.fromkeys(edited, "edited"))
    assert project.diff() == mine


def test_update_marks_conflicts_and_restores_missing_copies(project):
    project.path("ffn").unlink()
    assert project.rows("check") == (1, {"ffn": "missing"})
    edit(project.path("rope"), "\n\n", "\n\n# mine\n")
    project.release("0.2.0", rope="# new")
    code, done = project.rows("update")
    assert (code, done["ffn"]) == (1, "copied")
    path = project.path("rope")
    text, count = re.subn(CONFLICT, "# mine and new\n", path.read_text())
    assert count == 1
    assert project.rows("check") == (1, MARKED)
    assert project.rows("update", "rope") == (1, MARKED)
    path.write_text(text)
    assert project.rows("check") == (0, {"rope": "edited"})
    path.write_text("<<<<<<< yours\n")
    project.release("0.3.0", rope="# newer")
    assert project.run("update", project.folder, "rope")[0] == 1
    assert path.read_text() == "<<<<<<< yours\n"


@pytest.mark.parametrize("written", range(1, 6))
def test_repeated_update_completes_one_that_was_interrupted(written, project):
    edit(project.path("rope"), "import math\n", "import math  # mine\n")
    project.release("0.2.0", rope="# new", block="from .typecheck import typecheck")
    writes = iter(range(written))
    with project.monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", lambda *_, **__: next(writes))  # before each write
        with pytest.raises(StopIteration):
            project.run("update", project.folder)
    assert project.run("check", project.folder)[0] == 1
    assert project.run("update", project.folder)[0] == 0
    assert project.rows("check") == (0, {"rope": "edited"})
    text = project.path("rope").read_text()
    assert (text.count("# mine\n"), text.count("# new\n")) == (1, 1)
    assert project.path("typecheck").exists()


def test_copies_of_a_newer_tinyblock_are_listed_and_skipped(project):
    old = project.path("rope").read_text()
    project.release("0.10.0", rope="# new")
    assert project.rows("update", "rope") == (0, {"rope": "updated"})
    files = project.files()
    project.release("0.9.0", rope="# old")
    newer = {"rope": "from the newer tinyblock 0.10.0"}
    assert project.rows("check", "rope") == (0, newer)
    assert project.rows("update", "rope") == (0, newer)
    assert project.files() == files
    project.path("rope").write_text(old)  # without its base
    assert project.run("check", project.folder)[0] == 2


def test_check_reports_an_import_that_is_missing_and_update_restores_it(project):
    project.release("0.2.0", rmsnorm="from .typecheck import typecheck")
    for name in ("attention", "rmsnorm"):
        project.remove(name)
    missing = {"block": "imports missing files: attention.py, rmsnorm.py"}
    assert project.rows("check", "block") == (1, missing)
    assert project.rows("update", "block")[0] == 0
    assert project.path("typecheck").exists()  # imported by an import


def test_a_change_without_a_new_version_is_reported_and_merged(project):
    project.release("0.1.0", rope="# new")
    expected = {"rope": "outdated: tinyblock 0.1.0 has changed since"}
    assert project.rows("check") == (1, expected)
    assert project.rows("update", "rope") == (0, {"rope": "updated"})
    assert project.rows("check") == (0, {})


@pytest.mark.parametrize("name", ["rope", "rope.py", "contract/test_rope.py"])
def test_a_copy_is_named_in_any_way(name, project):
    project.path("rope").unlink()
    assert project.rows("check", name) == (1, {"rope": "missing"})
    assert project.rows("update", name) == (0, {"rope": "copied"})
    assert project.run("diff", project.folder, name) == (0, "")
    assert project.run("add", name, "--to", project.root / "new")[0] == 0
    assert [path.name for path in (project.root / "new").glob("*.py")] == ["rope.py"]


def test_add_merges_and_reports_a_conflict(project):
    edit(project.path("attention"), "\n\n", "\n\n# mine\n")
    project.release("0.2.0", attention="# new")
    code, printed = project.run("add", "block", "--to", project.folder)
    assert (code, "conflict markers" in printed) == (1, True)
    assert "check no shapes" in printed
    printed = project.run("add", "typecheck", "--to", project.folder)[1]
    assert "check no shapes" not in printed


def test_verify_selects_layers_and_passes_options_to_pytest(capfd):
    options = ["--collect-only", "-k", "float64 and cpu"]
    folder = str(copies.ROOT)
    assert copies.main(["verify", folder, "ffn", "rope.py", *options]) == 0
    collected = capfd.readouterr().out
    for name in ("ffn, SwiGLU, float64]", "rope, function, float64]"):
        assert name in collected
    for name in ("attention", "float32", "cuda"):
        assert name not in collected
    assert copies.main(["verify", folder, "rope", "-k", "nowhere"]) == 2


def test_list_shows_names_and_titles(capsys):
    assert copies.main(["list"]) == 0
    shown = capsys.readouterr().out
    assert re.findall(r"^(\w+)  +\w", shown, re.MULTILINE) == copies.NAMES


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["check", "nowhere"], "nowhere"),
        (["add", "x", "--to", "y"], "'x'"),
        (["check", "{folder}", "typecheck.py"], "add typecheck --to"),
    ],
)
def test_errors_are_one_line_and_name_what_was_typed(arguments, named, project):
    arguments = [text.format(folder=project.folder) for text in arguments]
    code, error = project.run(*arguments)
    assert code == 2
    assert re.fullmatch(rf"tinyblock: error: .*{named}.*\n", error)


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
