"""`tinyblock update`: edits and later changes, merged."""

from pathlib import Path
from unittest.mock import Mock

import pytest

from tinyblock import copies

MERGED = "merged with your edits"
CONFLICT = "conflict markers: resolve them"
MARKED = """\
<<<<<<< yours
# mine
||||||| tinyblock 0.1.0, copied
=======
# new
>>>>>>> tinyblock 0.2.0
"""


@pytest.fixture
def conflict(project):
    """A copy of rope.py that ends with a conflict."""
    project.append("rope.py", "# mine")
    project.release("0.2.0", rope="# new")
    assert project.run("update", "rope", code=1) == {"rope.py": CONFLICT}
    return project


def test_update_of_new_copies_changes_nothing(project):
    def contents():
        files = filter(Path.is_file, project.folder.rglob("*"))
        return {path: path.read_bytes() for path in files}

    before = contents()
    names = ("attention.py", "block.py", "ffn.py", "rmsnorm.py", "rope.py")
    assert project.run("update") == dict.fromkeys(names, "up to date")
    assert contents() == before


def test_an_unedited_copy_becomes_what_the_new_version_writes(project):
    project.release("0.2.0", rope="# new")
    assert project.run("update", "rope") == {"rope.py": "updated"}
    header = copies.HEADER.format(version="0.2.0", name="rope.py")
    assert project.rope.read_text() == header + (copies.ROOT / "rope.py").read_text()


def test_an_edit_and_a_change_are_merged(project):
    project.edit("rope.py", "import math\n", "import math  # mine\n")
    project.release("0.2.0", rope="# new")
    assert project.run("update", "rope") == {"rope.py": MERGED}
    new = copies.HEADER.format(version="0.2.0", name="rope.py")
    new += (copies.ROOT / "rope.py").read_text()
    assert project.rope.read_text() == new.replace("math\n", "math  # mine\n", 1)
    assert project.base("rope.py").read_text() == new


def test_a_merged_copy_is_edited_and_up_to_date(project):
    project.edit("rope.py", "import math\n", "import math  # mine\n")
    project.release("0.2.0", rope="# new")
    project.run("update")
    assert project.run("check") == {"rope.py": "edited"}
    assert project.run("update")["rope.py"] == "edited"


def test_an_edited_copy_without_a_change_stays_as_it_is(project):
    project.edit("rope.py", "import math\n", "import math  # mine\n")
    before = project.rope.read_text()
    project.release("0.2.0")
    assert project.run("update", "rope") == {"rope.py": "edited"}
    assert project.rope.read_text() == before


@pytest.mark.parametrize("deleted", [[0], [1], [2], [3], [0, 1, 2, 3]], ids=str)
def test_lines_that_are_deleted_from_the_header_stay_deleted(deleted, project):
    lines = project.rope.read_text().splitlines(keepends=True)
    kept = [line for number, line in enumerate(lines) if number not in deleted]
    project.rope.write_text("".join(kept))
    project.release("0.2.0")
    path = copies.ROOT / "rope.py"
    layer = '"""A new title.\n' + path.read_text().partition("\n")[2]
    path.write_text(layer)
    assert project.run("update", "rope") == {"rope.py": MERGED}
    header = "".join(kept[: 4 - len(deleted)]).replace("0.1.0", "0.2.0")
    assert project.rope.read_text() == header + layer


def test_a_line_that_ruff_deleted_from_an_older_header_is_no_conflict(empty):
    with empty.monkeypatch.context() as patch:
        other = copies.HEADER.replace("noqa", "noqa: E501, F722, F821")
        patch.setattr(copies, "HEADER", other)
        empty.run("add", "rope")
    empty.edit("rope.py", "# flake8: noqa: E501, F722, F821\n", "")
    empty.release("0.2.0", rope="# new")
    assert empty.run("update") == {"rope.py": MERGED}
    assert empty.rope.read_text().endswith("# new\n")


def test_an_edited_copy_gets_the_new_header_if_its_header_is_not_edited(project):
    project.append("rope.py", "# mine")
    other = copies.HEADER.replace("# fmt: off", "# fmt: skip")
    project.monkeypatch.setattr(copies, "HEADER", other)
    assert project.run("update", "rope") == {"rope.py": MERGED}
    header = other.format(version="0.1.0", name="rope.py")
    assert project.rope.read_text().startswith(header)


def test_only_the_first_header_gets_the_new_version(project):
    """As in a copy into which the user pasted another one."""
    pasted = "# Copied from tinyblock 0.0.9: other.py"
    project.edit("rope.py", "import math\n", f"import math\n{pasted}\n")
    project.release("0.2.0", rope="# new")
    assert project.run("update", "rope") == {"rope.py": MERGED}
    lines = project.exactly("rope.py").splitlines()
    headers = [line for line in lines if "Copied from" in line]
    assert headers == ["# Copied from tinyblock 0.2.0: rope.py", pasted]


def test_a_missing_copy_is_restored(project):
    before = project.rope.read_text()
    project.rope.unlink()
    assert project.run("update", "rope") == {"rope.py": "copied"}
    assert project.rope.read_text() == before


def test_what_a_new_version_imports_is_copied_with_its_own_imports(project):
    project.release(
        "0.2.0",
        rope="from .typecheck import typecheck",
        typecheck="from .parallelize import parallelize",
    )
    assert project.run("update", "rope") == {
        "rope.py": "updated",
        "typecheck.py": "copied",
        "parallelize.py": "copied",
    }


def test_what_an_edit_no_longer_imports_is_not_copied(project):
    project.edit("block.py", "from .ffn", "from .mine")
    for path in (project.folder / "ffn.py", project.base("ffn.py")):
        path.unlink()
    project.release("0.2.0", block="# new")
    assert "ffn.py" not in project.run("update")


def test_a_conflict_shows_mine_the_copied_and_the_new_lines(conflict):
    assert conflict.rope.read_text().endswith(MARKED)


def test_a_conflict_is_reported_until_it_is_resolved(conflict):
    assert conflict.run("check", code=1) == {"rope.py": CONFLICT}
    assert conflict.run("update", "rope", code=1) == {"rope.py": CONFLICT}
    assert conflict.run("add", "rope", code=1) == {"rope.py": CONFLICT}
    assert conflict.rope.read_text().count(MARKED) == 1


def test_a_resolved_conflict_needs_no_second_update(conflict):
    conflict.edit("rope.py", MARKED, "# mine and new\n")
    assert conflict.run("check") == {"rope.py": "edited"}
    assert conflict.run("update", "rope") == {"rope.py": "edited"}


def test_a_half_resolved_conflict_is_not_merged_again(conflict):
    half = "# mine\n||||||| tinyblock 0.1.0, copied\n# new\n"
    conflict.edit("rope.py", MARKED, half)
    conflict.release("0.3.0", rope="# newer")
    rows = conflict.run("update", "rope", code=1)
    assert rows == {"rope.py": f"{CONFLICT}, outdated: 0.2.0 -> 0.3.0"}
    assert conflict.rope.read_text().endswith(half)


@pytest.mark.parametrize("written", range(1, 7))  # of 7 files
def test_repeated_update_completes_one_that_was_interrupted(written, project):
    project.edit("rope.py", "import math\n", "import math  # mine\n")
    project.release("0.2.0", rope="# new", block="from .typecheck import typecheck")
    before_each_write = Mock(side_effect=[None] * written + [KeyboardInterrupt])
    with project.monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", before_each_write)
        with pytest.raises(KeyboardInterrupt):
            project.run("update")
    project.run("update")
    assert project.run("check") == {"rope.py": "edited"}
    assert project.base("typecheck.py").exists()
    text = project.rope.read_text()
    assert (text.count("# mine\n"), text.count("# new\n")) == (1, 1)


def test_git_names_a_file_that_it_cannot_merge(project):
    project.write("rope.py", "\0")
    project.release("0.2.0", rope="# new")
    project.run("update", code=2)
    assert f"git cannot merge {project.rope}: " in project.printed
