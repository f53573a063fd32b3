"""`tinyblock check`, `diff` and `update`: edits and later changes, side by side and merged."""

import subprocess
from typing import NamedTuple

import pytest

CONFLICT = "conflict markers: resolve them"
MERGED = "merged with your edits"
OUTDATED = "outdated: tinyblock 0.2.0 has changed it"
MARKED = b"""\
<<<<<<< yours
# mine
||||||| as it was copied
=======
# new
>>>>>>> tinyblock 0.2.0
"""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def edited(text):
    return text.replace(b"import math\n", b"import math  # mine\n")


def with_crlf(text):
    return text.replace(b"\n", b"\r\n")


def without_line(number, text):
    lines = text.splitlines(keepends=True)
    return b"".join([*lines[:number], *lines[number + 1 :]])


class State(NamedTuple):
    """What a user has of rope.py, and what an update to a release with a change does."""

    copy: bytes | None
    differs: str  # from its base, in the words of `check`
    row: str
    updated: bytes
    base: bytes | None = None  # None: as copied


def states(old, new):
    """Return all states, for what the two releases write as rope.py."""
    conflict = new.removesuffix(b"# new\n") + MARKED
    mixed = (b"import math\n", b"import math\r\nimport os\r\n")
    heading = (b"import math\n", b'"""A heading\n=======\n"""\nimport math\n')
    latin = (b"import math\n", b"import math  # gr\xfcn\n")
    found = {
        "as copied": State(old, "", "updated", new),
        "edited elsewhere": State(edited(old), "edited", MERGED, edited(new)),
        "edited at the same line": State(
            old + b"# mine\n", "edited", CONFLICT, conflict
        ),
        "changed as in this release": State(new, "edited", "updated", new),
        "deleted": State(None, "missing", "copied", new),
        "CRLF": State(with_crlf(old), "", "updated", with_crlf(new)),
        "CRLF, edited": State(
            with_crlf(edited(old)),
            "edited",
            MERGED,
            with_crlf(edited(new)),
            with_crlf(old),
        ),
        "CRLF, edited at the same line": State(
            with_crlf(old + b"# mine\n"), "edited", CONFLICT, with_crlf(conflict)
        ),
        "deleted beside a base with CRLF": State(
            None, "missing", "copied", with_crlf(new), with_crlf(old)
        ),
        "a base with CRLF": State(
            edited(old), "edited", MERGED, edited(new), with_crlf(old)
        ),
        "two kinds of line ends": State(
            old.replace(*mixed), "edited", MERGED, new.replace(*mixed)
        ),
        "a byte order mark": State(
            BYTE_ORDER_MARK + old, "edited", MERGED, BYTE_ORDER_MARK + new
        ),
        "a heading underlined by seven signs": State(
            old.replace(*heading), "edited", MERGED, new.replace(*heading)
        ),
        "another encoding": State(
            old.replace(*latin), "edited", MERGED, new.replace(*latin)
        ),
    }
    for number in range(5):
        found[f"without line {number} of the head"] = State(
            without_line(number, old), "edited", MERGED, without_line(number, new)
        )
    for marker in (b"<<<<<<< yours\n", b">>>>>>>\n"):
        left = old + marker
        found[f"{marker!r} is left"] = State(left, CONFLICT, CONFLICT, left)
    return found


def test_an_update_merges_each_state_of_a_copy_with_a_change(project):
    old = project.written("rope.py")
    project.release("0.2.0", rope="# new")
    new = project.written("rope.py")
    for title, state in states(old, new).items():
        project.base("rope.py").write_bytes(state.base or old)
        project.write("rope.py", state.copy)
        words = ", ".join(filter(None, [state.differs, OUTDATED]))
        assert project.rows("check", code=1) == {"rope.py": words}, title
        code = int(state.row == CONFLICT)
        assert project.rows("update", "rope", code=code)["rope.py"] == state.row, title
        after = project.contents()
        assert after["rope.py"] == state.updated, title
        project.run("update", "rope", code=code)  # has nothing left to do
        assert project.contents() == after, title


def test_a_new_number_alone_changes_no_copy(project):
    old = project.written("rope.py")
    project.release("0.2.0")
    for title, state in states(old, new=b"").items():  # there is no new text
        if state.copy in (None, b""):
            continue
        project.base("rope.py").write_bytes(state.base or old)
        project.write("rope.py", state.copy)
        before = project.contents()
        code = int(state.differs == CONFLICT)
        words = {"rope.py": state.differs} if state.differs else {}
        assert project.rows("check", code=code) == words, title
        row = project.rows("update", "rope", code=code)["rope.py"]
        assert row == (state.differs or "up to date"), title
        assert project.contents() == before, title


def test_update_also_copies_what_a_release_imports_anew(project):
    """Even by a file that gets conflict markers, which Python cannot read."""
    project.append("block.py", "# mine")
    project.release("0.2.0", block="from .parallelize import parallelize")
    rows = project.rows("update", code=1)
    assert rows == {
        "attention.py": "up to date",
        "block.py": CONFLICT,
        "ffn.py": "up to date",
        "parallelize.py": "copied",
        "rmsnorm.py": "up to date",
        "rope.py": "up to date",
    }
    contents = project.contents()
    assert contents["parallelize.py"] == project.written("parallelize.py")
    assert project.run("check", code=1).endswith(
        "\n5 of 6 copies are unedited and up to date\n"
    )


def test_a_resolved_conflict_is_an_edit_that_needs_no_second_update(project):
    project.append("rope.py", "# mine")
    project.release("0.2.0", rope="# new")
    project.run("update", code=1)
    # No markers: four signs, and seven in a comment.
    mine = "# mine and new\n==== \n# <<<<<<< mine\n"
    project.edit("rope.py", MARKED.decode(), mine)
    assert project.rows("check") == {"rope.py": "edited"}
    assert project.rows("update", "rope") == {"rope.py": "edited"}
    expected = project.written("rope.py").replace(b"# new\n", mine.encode())
    assert project.contents()["rope.py"] == expected


def patched(text, diff, folder):
    """Return what git makes of a text and a diff."""
    (folder / "file").write_bytes(text)
    hunks = "".join(diff.splitlines(keepends=True)[2:])
    command = ["git", "apply", "--whitespace=nowarn", "-"]
    patch = f"--- a/file\n+++ b/file\n{hunks}"
    subprocess.run(command, cwd=folder, input=patch.encode(), check=True)
    return (folder / "file").read_bytes()


def test_diff_shows_edits_and_then_later_changes(project, tmp_path):
    copied = project.written("rope.py")
    # With a form feed in a line, and without a line end at the end.
    project.edit("rope.py", "import math\n", "# größer, a page\fand the next\n")
    project.append("rope.py", "# mine")
    mine = project.contents()["rope.py"].removesuffix(b"\n")
    project.write("rope.py", mine)
    project.release("0.2.0", rope="# new")
    shown = project.run("diff", "rope", "--mine")
    base = f"--- {project.name}/.tinyblock/rope.py.base\n"
    assert shown.startswith(f"{base}+++ {project.name}/rope.py\n")
    assert patched(copied, shown, tmp_path) == mine
    later = project.run("diff", "rope", "--upstream")
    assert later.startswith(f"{base}+++ tinyblock 0.2.0: rope.py\n")
    assert patched(copied, later, tmp_path) == project.written("rope.py")
    assert project.run("diff") == shown + later


@pytest.mark.parametrize(
    ("older", "newer"),
    [("0.9.0", "0.10.0"), ("0.10.0", "0.10.1"), ("0.9.9", "1.0.0")],
)
def test_an_older_tinyblock_is_an_error(older, newer, project):
    project.release(newer, rope="# new")
    project.run("update", "rope")
    before = project.contents()
    project.release(older, rope="# old")
    error = f"has copies from a newer tinyblock than this one, {older}"
    for command in ("check", "diff", "update", "add"):
        assert error in project.run(command, "rope", code=2)
    assert project.contents() == before


def test_a_copy_that_this_release_does_not_have_is_left_alone(project):
    project.release("0.2.0")
    (project.tinyblock / "rope.py").unlink()
    before = project.contents()
    for command in ("check", "update"):
        rows = project.rows(command, "rope")
        assert rows == {"rope.py": "not in tinyblock 0.2.0"}
    assert project.contents() == before
    project.append("rope.py", "<<<<<<< yours")
    assert project.rows("update", "rope", code=1) == {"rope.py": CONFLICT}


def test_a_release_without_a_new_number_is_a_change(project):
    project.release("0.1.0", rope="# new")
    row = {"rope.py": "outdated: tinyblock 0.1.0 has changed it"}
    assert project.rows("check", code=1) == row
    assert project.rows("update", "rope") == {"rope.py": "updated"}
    assert project.contents()["rope.py"] == project.written("rope.py")


def test_an_edited_copy_gets_a_new_head(project):
    project.append("rope.py", "# mine")
    project.release("0.2.0")
    # A line of the head that this release writes.
    project.change("copies.py", "\n# fmt: off\n", "\n# fmt: skip\n")
    project.run("update", "rope")
    written = project.written("rope.py").replace(b"# fmt: off\n", b"# fmt: skip\n")
    assert project.contents()["rope.py"] == written + b"# mine\n"


def test_copies_with_a_version_in_their_heads_are_updated(project):
    """As an unreleased tinyblock wrote them, without .tinyblock/version."""
    for path in (project.folder / "rope.py", project.base("rope.py")):
        text = path.read_bytes()
        path.write_bytes(text.replace(b"tinyblock: ", b"tinyblock 0.1.0: ", 1))
    (project.folder / ".tinyblock" / "version").unlink()
    project.edit("rope.py", "import math\n", "import math  # mine\n")
    assert project.rows("update", "rope") == {"rope.py": MERGED}
    assert project.contents()["rope.py"] == edited(project.written("rope.py"))


def test_to_remove_a_copy_delete_it_and_its_base(project):
    for path in (project.folder / "rope.py", project.base("rope.py")):
        path.unlink()
    before = project.contents()
    assert project.rows("check") == {}
    project.run("update")
    assert project.contents() == before


def test_a_layer_selects_its_copy_and_its_test(project):
    project.run("add", "rope", "--with-tests")
    names = ["contract/test_rope.py", "ffn.py", "rope.py"]
    for name in names:
        (project.folder / name).unlink()
    rows = project.rows("check", "my_package/cöpies/rope.py", code=1)
    assert rows == dict.fromkeys(["contract/test_rope.py", "rope.py"], "missing")
