"""Copies of a release, updated to a later one, and the page on editing them."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from tinyblock import copies

FOLDER = Path("läyers of mine")
ROPE = FOLDER / "rope.py"
PAGE = Path(__file__).parents[2] / "docs" / "edit_a_layer.md"
CONFLICT = "<{7} yours\n# mine\n[|]{7} .*\n={7}\n# new\n>{7} tinyblock 0.2.0\n"
MARKED = "conflict markers: resolve them"


class Project:
    """A folder of copies, and a release of tinyblock, in an empty directory."""

    def __init__(self, monkeypatch, capsys):
        self.monkeypatch = monkeypatch
        self.capsys = capsys

    def release(self, version, **lines):
        """Install a release. These lines follow the titles of its files."""
        root = shutil.copytree(copies.ROOT, Path(f"{version}, {len(lines)} lines"))
        self.monkeypatch.setattr(copies, "ROOT", root)
        self.monkeypatch.setattr(copies, "__version__", version)
        for name, line in lines.items():
            edit(root / f"{name}.py", "\n\n", f"\n\n{line}\n")

    def run(self, command, *arguments, code=0):
        """Run a command on the folder, and return what it prints for each file."""
        folder = f"--to={FOLDER}" if command == "add" else str(FOLDER)
        found = copies.main([command, folder, *arguments])
        self.printed = "".join(self.capsys.readouterr())
        assert found == code, self.printed
        return dict(re.findall(r"^(\S+)\.py +(.*)", self.printed, re.M))

    def diff(self, *options):
        """Return the lines that `diff` prints for rope, without their context."""
        self.run("diff", "rope", *options)
        return re.findall(r"^[-+].*", self.printed, re.M)


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.fixture
def project(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    project = Project(monkeypatch, capsys)
    project.release("0.1.0")
    project.run("add", "rope", "block")
    return project


def test_add_copies_layers_with_header_license_and_what_they_import(project):
    text = ROPE.read_text()
    assert text.startswith("# Copied from tinyblock 0.1.0: rope.py\n# Copyright (c)")
    assert text.endswith("# fmt: off\n" + (copies.ROOT / "rope.py").read_text())
    assert (FOLDER / "LICENSE.tinyblock").read_text().startswith("MIT")
    project.run("check")
    assert "5 of 5" in project.printed  # with attention, ffn and rmsnorm


def test_another_file_is_never_replaced(project):
    path = FOLDER / "typecheck.py"
    path.write_text("# mine")
    project.run("add", "ffn", "typecheck", code=2)
    assert str(path) in project.printed
    project.release("0.2.0", ffn="from .typecheck import typecheck")
    assert project.run("update", "ffn") == {"ffn": "updated"}  # mine is imported
    assert path.read_text() == "# mine"
    assert project.run("check", "ffn") == {}
    shutil.copy(copies.ROOT / "typecheck.py", path)  # by hand
    project.run("add", "typecheck")
    assert project.run("check", "typecheck") == {}
    # As if `add` had been interrupted after the copy.
    (FOLDER / ".tinyblock/typecheck.py.base").unlink()
    project.run("add", "typecheck")
    assert project.printed == "typecheck.py  copied\n"


def test_update_merges_edits_with_changes(project):
    edit(ROPE, "import math\n", "import math  # <<<<<<< mine\n")
    edit(FOLDER / "ffn.py", "# Copied from tinyblock 0.1.0: ffn.py\n", "")
    edit(FOLDER / "block.py", "from .rmsnorm", "from .mine")
    (FOLDER / "mine").mkdir()
    new = "from .typecheck import typecheck"
    project.release("0.2.0", rope=new, ffn="# new", block="# new")
    edited = ("block", "ffn", "rope")
    outdated = "edited, outdated: 0.1.0 -> 0.2.0"
    assert project.run("check", code=1) == dict.fromkeys(edited, outdated)
    base = "--- tinyblock 0.1.0: rope.py"
    mine = [
        f"+++ {ROPE}",
        "-import math",
        "+import math  # <<<<<<< mine",
    ]
    upstream = [base, "+++ tinyblock 0.2.0: rope.py", f"+{new}"]
    assert project.diff("--mine") == [base, *mine]
    assert project.diff("--upstream") == upstream
    assert project.diff() == [base, *mine, *upstream]
    done = dict.fromkeys(edited, "merged with your edits") | {
        "attention": "up to date",
        "rmsnorm": "up to date",
        "typecheck": "copied",
    }
    assert project.run("update") == done
    assert project.run("check") == dict.fromkeys(edited, "edited")
    assert project.diff() == ["--- tinyblock 0.2.0: rope.py", *mine]


def test_conflicts_are_marked_once_and_reported_until_they_are_resolved(project):
    edit(ROPE, "\n\n", "\n\n# mine\n")
    project.release("0.2.0", rope="# new")
    assert project.run("add", "rope", code=1) == {"rope": MARKED}
    assert "check no shapes" in project.printed
    text, count = re.subn(CONFLICT, "# mine and new\n", ROPE.read_text())
    assert count == 1, text
    assert project.run("check", code=1) == {"rope": MARKED}
    ROPE.write_text(text)
    assert project.run("check") == {"rope": "edited"}
    ROPE.write_text(">>>>>>> half of it is resolved\n")
    project.release("0.3.0", rope="# newer")
    assert project.run("update", "rope", code=1) == {
        "rope": f"{MARKED}, outdated: 0.2.0 -> 0.3.0"
    }
    assert ROPE.read_text() == ">>>>>>> half of it is resolved\n"
    ROPE.write_text("\0")
    project.run("update", "rope", code=2)
    assert f"git cannot merge {ROPE}" in project.printed
    ROPE.write_bytes(b"\xff")
    project.run("update", code=2)


@pytest.mark.parametrize("written", range(1, 6))
def test_repeated_update_completes_one_that_was_interrupted(written, project):
    edit(ROPE, "import math\n", "import math  # mine\n")
    project.release("0.2.0", rope="# new", block="from .typecheck import typecheck")
    writes = iter(range(written))
    with project.monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", lambda *_, **__: next(writes))  # before each write
        with pytest.raises(StopIteration):
            project.run("update")
    project.run("update")
    assert project.run("check") == {"rope": "edited"}
    text = ROPE.read_text()
    assert (text.count("# mine\n"), text.count("# new\n")) == (1, 1)


def test_copies_that_this_release_cannot_update_are_listed_and_skipped(project):
    project.release("0.10.0", rope="# new")
    assert project.run("update", "rope") == {"rope": "updated"}
    project.release("0.9.0", rope="# old")
    (copies.ROOT / "ffn.py").unlink()
    (FOLDER / "ffn.py").unlink()
    newer = "from the newer tinyblock 0.10.0"
    skipped = {"ffn": "missing, not in tinyblock 0.9.0", "rope": newer}
    for code, *command in ((1, "check"), (0, "update", "ffn", "rope"), (1, "check")):
        assert project.run(*command, code=code) == skipped
    project.run("diff", "ffn", "rope")
    assert project.printed == ""
    assert project.run("check", "rope") == {"rope": newer}
    edit(ROPE, "0.10.0", "0.1.0")  # as if restored without its base
    project.run("check", code=2)
    assert "from tinyblock 0.1.0, but its base is from 0.10.0" in project.printed


def test_a_change_without_a_new_version_and_missing_imports_are_reported(project):
    project.release("0.1.0", rope="# new", rmsnorm="from .typecheck import typecheck")
    for name in ("attention.py", "rmsnorm.py"):
        (FOLDER / name).unlink()
        (FOLDER / f".tinyblock/{name}.base").unlink()
    changed = {"rope": "outdated: tinyblock 0.1.0 has changed since"}
    missing = {"block": "imports missing files: attention.py, rmsnorm.py"}
    assert project.run("check", "block", code=1) == missing
    assert project.run("check", code=1) == changed | missing
    project.run("update")
    assert project.run("check") == {}
    assert (FOLDER / "typecheck.py").exists()  # imported by an import


@pytest.mark.parametrize("name", ["rope", "rope.py", "contract/test_rope.py"])
def test_a_layer_and_its_test_are_named_in_any_way(name, project):
    project.run("add", name, "--with-tests")
    lost = ("contract/test_rope", "rope")
    for path in lost:
        (FOLDER / f"{path}.py").unlink()
    assert project.run("check", name, code=1) == dict.fromkeys(lost, "missing")
    project.run("update", name)
    assert project.run("check") == {}


def test_verify_selects_layers_and_passes_options_to_pytest(capfd):
    options = ["--collect-only", "-k", "float64 and cpu"]
    folder = str(copies.ROOT)
    assert copies.main(["verify", folder, "ffn", "rope.py", *options]) == 0
    collected = re.findall(r"\[(\w+)-(\w+), .*, (\w+)\]$", capfd.readouterr().out, re.M)
    assert set(collected) == {("cpu", "ffn", "float64"), ("cpu", "rope", "float64")}
    assert copies.main(["verify", folder, "rope", "-k", "nowhere"]) == 2


def test_verify_of_a_file_runs_the_tests_beside_it_or_those_of_tinyblock(project):
    project.run("add", "rope", "--with-tests")
    edit(FOLDER / "contract" / "test_rope.py", "def test_freq", "def test_my_freq")
    verify = ["verify", str(ROPE), "--collect-only", "-k"]
    assert copies.main([*verify, "my_freq"]) == 0
    shutil.rmtree(FOLDER / "contract")
    assert copies.main([*verify, "test_freq"]) == 0


def test_list_shows_names_and_titles(capsys):
    assert copies.main(["list"]) == 0
    assert re.findall(r"^(\w+)  +\w", capsys.readouterr().out, re.M) == copies.NAMES


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("check nowhere", "nowhere has no copy of LAYER"),
        (f"check {__file__}", f"must be a folder, got the file {__file__}"),
        ("update nowhere rope.py", "`tinyblock add rope --to nowhere`"),
        ("add x --to y", "'x'"),
        ("diff nowhere --mine --upstream", "--upstream"),
        ("add rope --to /dev/null", "/dev/null"),
        ("verify nowhere", "verify requires pytest"),
    ],
)
def test_errors_are_one_line_and_name_what_was_typed(
    command, named, capsys, monkeypatch
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert copies.main(shlex.split(command)) == 2
    error = capsys.readouterr().err
    assert re.fullmatch(rf"tinyblock: error: .*{named}.*\n", error), error


def apply(patch):
    """Edit a file as a page shows it."""
    path = Path(re.search(r"^\+\+\+ (.*)", patch, re.M)[1])
    for hunk in re.split(r"^@@.*\n", patch, flags=re.M)[1:]:
        old = re.sub(r"^(\+.*\n|[- ])", "", hunk, flags=re.M)
        new = re.sub(r"^(-.*\n|[+ ])", "", hunk, flags=re.M)
        edit(path, old, new)


def test_edit_a_layer_shows_what_is_printed(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    page = PAGE.read_text()
    for block in re.findall(r"^```\w+\n(.*?)^```", page, re.DOTALL | re.M):
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
