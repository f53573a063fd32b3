"""`tinyblock check`: the states of copies."""

import pytest

from tinyblock import copies

CONFLICT = "conflict markers: resolve them"
each_pair_of_versions = pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("0.9.0", "0.10.0"),
        ("0.10.0", "0.10.1"),
        ("0.10.1", "0.11.0"),
        ("0.9.9", "1.0.0"),
    ],
)


def test_new_copies_are_pristine(project):
    assert project.run("check") == {}
    assert project.printed == "5 of 5 copies are pristine\n"


def test_an_edit_is_no_error(project):
    project.edit("rope.py", "import math", "import math  # mine")
    assert project.run("check") == {"rope.py": "edited"}
    assert "4 of 5 copies are pristine" in project.printed


def test_a_missing_copy_is_reported(project):
    project.rope.unlink()
    assert project.run("check", code=1) == {"rope.py": "missing"}


def test_a_missing_copy_is_not_reported_again_by_what_imports_it(project):
    (project.folder / "ffn.py").unlink()
    assert project.run("check", code=1) == {"ffn.py": "missing"}


def test_a_change_in_a_later_version_makes_a_copy_outdated(project):
    project.release("0.2.0", rope="# new")
    assert project.run("check", code=1) == {"rope.py": "outdated: 0.1.0 -> 0.2.0"}


def test_a_change_without_a_new_version_makes_a_copy_outdated(project):
    project.release("0.1.0", rope="# new")
    rows = project.run("check", code=1)
    assert rows == {"rope.py": "outdated: tinyblock 0.1.0 has changed since"}


def test_a_new_version_of_an_equal_file_is_no_change(project):
    project.release("0.2.0")
    assert project.run("check") == {}


def test_an_edited_copy_may_be_outdated_too(project):
    project.edit("rope.py", "import math", "import math  # mine")
    project.release("0.2.0", rope="# new")
    rows = project.run("check", code=1)
    assert rows == {"rope.py": "edited, outdated: 0.1.0 -> 0.2.0"}


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize(
    "marker", ["<<<<<<< yours", "||||||| 0.1.0", "=======", ">>>>>>> 0.2"]
)
def test_each_marker_alone_is_a_conflict(marker, end, project):
    text = project.rope.read_text().replace("import math\n", f"import math\n{marker}\n")
    project.rope.write_bytes(text.replace("\n", end).encode())
    assert project.run("check", code=1) == {"rope.py": CONFLICT}


@pytest.mark.parametrize("line", ["# <<<<<<< mine", "====", "=" * 79, "x |||||||"])
def test_a_line_that_is_no_marker_is_no_conflict(line, project):
    project.edit("rope.py", "import math\n", f"import math\n{line}\n")
    assert project.run("check") == {"rope.py": "edited"}


def test_an_import_of_a_file_that_is_missing_with_its_base_is_reported(project):
    for name in ("attention.py", "rmsnorm.py"):
        (project.folder / name).unlink()
        project.base(name).unlink()
    rows = project.run("check", code=1)
    assert rows == {"block.py": "imports missing files: attention.py, rmsnorm.py"}


@pytest.mark.parametrize("mine", ["mine.py", "mine/__init__.py"])
def test_an_import_of_the_users_own_file_or_folder_is_not_missing(mine, project):
    project.edit("block.py", "from .rmsnorm", "from .mine")
    assert project.run("check", code=1)["block.py"].endswith("missing files: mine.py")
    path = project.folder / mine
    path.parent.mkdir(exist_ok=True)
    path.touch()
    assert project.run("check") == {"block.py": "edited"}


def test_a_name_from_the_package_is_no_missing_file(project):
    project.edit("block.py", "from .ffn", "from . import DTYPE\nfrom .ffn")
    assert project.run("check") == {"block.py": "edited"}


@each_pair_of_versions
def test_a_copy_from_a_newer_version_is_left_alone(older, newer, project):
    project.release(newer, rope="# new")
    project.run("update", "rope")
    project.release(older, rope="# old")
    newer_than_this = {"rope.py": f"from the newer tinyblock {newer}"}
    assert project.run("check", "rope") == newer_than_this
    project.run("diff", "rope")
    assert project.printed == ""
    assert project.run("update", "rope") == newer_than_this
    assert "# new\n" in project.rope.read_text()


@each_pair_of_versions
def test_a_copy_from_an_older_version_is_outdated(older, newer, project):
    project.release(older, rope="# old")
    project.run("update", "rope")
    project.release(newer, rope="# new")
    rows = project.run("check", "rope", code=1)
    assert rows == {"rope.py": f"outdated: {older} -> {newer}"}


def test_a_copy_that_this_release_no_longer_has_is_left_alone(project):
    project.release("0.2.0")
    (copies.ROOT / "rope.py").unlink()
    before = project.rope.read_text()
    skipped = {"rope.py": "not in tinyblock 0.2.0"}
    assert project.run("check") == skipped
    assert project.run("update", "rope") == skipped
    assert project.rope.read_text() == before


def test_a_copy_restored_without_its_base_is_an_error_that_names_both(project):
    project.release("0.2.0", rope="# new")
    project.run("update")
    project.release("0.3.0", rope="# newer")
    project.edit("rope.py", "tinyblock 0.2.0", "tinyblock 0.1.0")
    project.run("check", code=2)
    assert f"{project.rope} is from tinyblock 0.1.0, but" in project.printed
    assert (
        f"from 0.2.0: restore it together with {project.base('rope.py')}"
        in project.printed
    )


@pytest.mark.parametrize("command", ["check", "update"])
def test_an_empty_base_is_an_error_and_the_copy_stays(command, project):
    project.edit("rope.py", "import math", "import math  # mine")
    project.base("rope.py").write_text("")
    project.run(command, code=2)
    assert f"restore {project.base('rope.py')}" in project.printed
    assert "# mine" in project.rope.read_text()


def test_a_name_selects_a_layer_and_its_test(project):
    project.run("add", "rope", "--with-tests")
    for name in ("rope.py", "contract/test_rope.py", "ffn.py"):
        (project.folder / name).unlink()
    rows = project.run("check", "rope", code=1)
    assert rows == dict.fromkeys(["contract/test_rope.py", "rope.py"], "missing")
