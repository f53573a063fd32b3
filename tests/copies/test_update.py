"""`tinyblock check`, `diff` and `update`: edits and later changes, side by side and merged."""

import re

import pytest

CONFLICT = "conflict markers: resolve them"
OUTDATED = "outdated: 0.1.0 -> 0.2.0"
CONFLICTING_LINES = b"""\
<<<<<<< yours
# mine
||||||| tinyblock 0.1.0, copied
=======
# new
>>>>>>> tinyblock 0.2.0
"""


def changes(printed):
    """Return the lines of a diff without their context."""
    return re.findall(r"^[-+\\].*", printed, re.MULTILINE)


@pytest.fixture
def merging(project):
    """Copies in all states, and the release 0.2.0.

    attention.py: without edit and change     block.py: with a change alone
    ffn.py: with an edit and a change apart   rmsnorm.py: with an edit alone
    rope.py: with an edit and a change of one line
    transformer.py: missing, and changed      parallelize.py: imported by block.py now
    """
    project.run("add", "transformer")
    project.edit("ffn.py", "import math\n", "import math  # mine\n")
    project.edit("rmsnorm.py", "import math\n", "import math  # mine\n")
    project.append("rope.py", "# mine")
    (project.folder / "transformer.py").unlink()
    project.release(
        "0.2.0",
        block="from .parallelize import parallelize",
        ffn="# new",
        rope="# new",
        transformer="# new",
    )
    return project


def test_check_names_each_state(merging):
    assert merging.rows("check", code=1) == {
        "block.py": OUTDATED,
        "ffn.py": f"edited, {OUTDATED}",
        "rmsnorm.py": "edited",
        "rope.py": f"edited, {OUTDATED}",
        "transformer.py": f"missing, {OUTDATED}",
    }
    assert merging.run("check", code=1).endswith("\n1 of 6 copies are pristine\n")


def test_update_merges_what_git_can_merge_and_marks_the_rest(merging):
    before = merging.contents()
    new = {
        name: merging.written(name)
        for name in ("block.py", "ffn.py", "parallelize.py", "transformer.py")
    }
    rope = merging.written("rope.py")
    assert merging.rows("update", code=1) == {
        "attention.py": "up to date",
        "block.py": "updated",
        "ffn.py": "merged with your edits",
        "parallelize.py": "copied",
        "rmsnorm.py": "edited",
        "rope.py": CONFLICT,
        "transformer.py": "copied",
    }
    bases = {f".tinyblock/{name}.base": text for name, text in new.items()}
    copies = new | {
        "ffn.py": new["ffn.py"].replace(b"import math\n", b"import math  # mine\n"),
        "rope.py": rope.removesuffix(b"# new\n") + CONFLICTING_LINES,
    }
    bases[".tinyblock/rope.py.base"] = rope
    assert merging.contents() == before | copies | bases


def test_a_conflict_is_reported_and_kept_until_no_marker_is_left(merging):
    merging.run("update", code=1)
    lines = CONFLICTING_LINES.decode().splitlines(keepends=True)
    for left in ("<<<<<<< yours\n", "||||||| 0.1\r\n", "=======\n", ">>>>>>>\n"):
        merging.edit("rope.py", "".join(lines), left)
        before = merging.contents()
        for command in ("check", "update", "add"):
            layers = ["rope"] if command != "check" else []
            assert merging.rows(command, *layers, code=1)["rope.py"] == CONFLICT, left
        assert merging.contents() == before, left
        merging.edit("rope.py", left, "".join(lines))
    merging.edit("rope.py", "".join(lines), "# mine and new\n==== \n# <<<<<<< mine\n")
    assert merging.rows("check")["rope.py"] == "edited"
    assert merging.rows("update", "rope") == {"rope.py": "edited"}


def test_a_conflict_is_not_merged_with_a_later_release(merging):
    merging.run("update", code=1)
    before = merging.contents()["rope.py"]
    merging.release("0.3.0", rope="# newer")
    row = f"{CONFLICT}, outdated: 0.2.0 -> 0.3.0"
    assert merging.rows("update", "rope", code=1) == {"rope.py": row}
    assert merging.contents()["rope.py"] == before


def test_after_an_update_the_edits_are_left(merging):
    merging.run("update", code=1)
    merging.edit("rope.py", CONFLICTING_LINES.decode(), "# mine and new\n")
    edited = dict.fromkeys(["ffn.py", "rmsnorm.py", "rope.py"], "edited")
    assert merging.rows("check") == edited
    before = merging.contents()
    assert merging.rows("update").items() >= edited.items()
    assert merging.contents() == before


def test_diff_shows_edits_and_then_later_changes(merging):
    copy = f"{merging.name}/ffn.py"
    mine = [
        "--- tinyblock 0.1.0: ffn.py",
        f"+++ {copy}",
        "-import math",
        "+import math  # mine",
    ]
    upstream = ["--- tinyblock 0.1.0: ffn.py", "+++ tinyblock 0.2.0: ffn.py", "+# new"]
    assert changes(merging.run("diff", "ffn", "--mine")) == mine
    assert changes(merging.run("diff", "ffn", "--upstream")) == upstream
    assert changes(merging.run("diff", "ffn")) == mine + upstream
    assert changes(merging.run("diff", "attention", "transformer", "--mine")) == []
    merging.run("update", code=1)
    updated = ["--- tinyblock 0.2.0: ffn.py", *mine[1:]]
    assert changes(merging.run("diff", "ffn")) == updated


def test_diff_shows_each_line_as_it_is(project):
    path = project.folder / "rope.py"
    last = path.read_text().splitlines()[-1]
    path.write_bytes(
        path.read_bytes().removesuffix(b"\n") + b"\n# a page\fand the next"
    )
    project.edit("ffn.py", "import math\n", "# größer ∞\nimport math\n")
    assert changes(project.run("diff", "rope"))[2:] == [
        "+# a page\fand the next",
        "\\ No newline at end of file",
    ]
    assert last not in changes(project.run("diff", "rope"))


@pytest.mark.parametrize(
    ("older", "newer"),
    [("0.9.0", "0.10.0"), ("0.10.0", "0.10.1"), ("0.9.9", "1.0.0")],
)
def test_a_copy_of_a_newer_release_is_left_alone(older, newer, project):
    project.release(newer, rope="# new")
    project.run("update", "rope")
    before = project.contents()
    project.release(older, rope="# old", ffn="# old")
    row = {"rope.py": f"from the newer tinyblock {newer}"}
    assert project.rows("check", "rope") == row
    assert project.run("diff", "rope") == ""
    assert project.rows("update", "rope") == row
    assert project.contents() == before


def test_a_copy_that_this_release_does_not_have_is_left_alone(project):
    project.release("0.2.0")
    (project.tinyblock / "rope.py").unlink()
    before = project.contents()
    for command in ("check", "update"):
        rows = project.rows(command, "rope")
        assert rows == {"rope.py": "not in tinyblock 0.2.0"}
    assert project.contents() == before


def test_a_release_without_a_new_number_is_a_change(project):
    project.release("0.1.0", rope="# new")
    row = {"rope.py": "outdated: tinyblock 0.1.0 has changed since"}
    assert project.rows("check", code=1) == row
    assert project.rows("update", "rope") == {"rope.py": "updated"}
    assert project.contents()["rope.py"] == project.written("rope.py")


def test_a_new_number_alone_is_no_change(project):
    before = project.contents()
    project.release("0.2.0")
    assert project.rows("check") == {}
    assert set(project.rows("update").values()) == {"up to date"}
    assert project.contents() == before


def test_lines_that_are_deleted_from_the_header_stay_deleted(project):
    """Also beside a change of the line below. Another one is not lost with them."""
    path = project.folder / "rope.py"
    lines = path.read_text().splitlines(keepends=True)
    pasted = "# Copied from tinyblock 0.0.9: other.py\n"
    project.release("0.2.0")
    project.change("rope.py", '"""Rotary', '"""A new title: rotary')
    for deleted in ([0], [1], [2], [3], [4], [0, 1, 2, 3, 4]):
        header = [lines[number] for number in range(5) if number not in deleted]
        project.base("rope.py").write_text("".join(lines))
        path.write_text("".join([*header, *lines[5:], pasted]))
        assert project.rows("update", "rope") == {"rope.py": "merged with your edits"}
        layer = (project.tinyblock / "rope.py").read_text()
        expected = "".join(header).replace("0.1.0", "0.2.0") + layer + pasted
        assert path.read_text() == expected, deleted


def test_an_edited_copy_gets_a_new_header(project):
    project.append("rope.py", "# mine")
    project.release("0.2.0")
    project.change("copies.py", "# fmt: off\n", "# fmt: skip\n")
    project.run("update", "rope")
    written = project.written("rope.py").replace(b"# fmt: off\n", b"# fmt: skip\n")
    assert project.contents()["rope.py"] == written + b"# mine\n"


def test_an_update_keeps_the_line_ends_of_each_file(project):
    """LF, CRLF or both, a missing line end at the end, and a byte order mark."""
    for path in project.folder.rglob("*"):
        if path.is_file() and path.name not in ("attention.py", "rmsnorm.py"):
            path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert project.rows("check") == {}
    project.edit("rope.py", "import math\r\n", "import math  # mine\r\n")
    project.append("block.py", "# mine\r")
    project.edit("rmsnorm.py", "import math\n", "import math\r\nimport os\r\n")
    attention = project.folder / "attention.py"
    attention.write_bytes(b"\xef\xbb\xbf" + attention.read_bytes().removesuffix(b"\n"))
    project.release("0.2.0", rope="# new", ffn="# new", block="# new", rmsnorm="# new")
    project.change("attention.py", '"""Causal', '"""New: causal')
    new = {
        name: project.written(name)
        for name in ("attention.py", "block.py", "ffn.py", "rmsnorm.py", "rope.py")
    }
    project.run("update", code=1)
    conflict = new["block.py"].removesuffix(b"# new\n") + CONFLICTING_LINES
    mixed = new["rmsnorm.py"].replace(b"import math\n", b"import math\r\nimport os\r\n")
    mine = new["rope.py"].replace(b"import math\n", b"import math  # mine\n")
    contents = project.contents()
    for name, expected in {
        "attention.py": b"\xef\xbb\xbf" + new["attention.py"].removesuffix(b"\n"),
        "block.py": conflict.replace(b"\n", b"\r\n"),
        "ffn.py": new["ffn.py"].replace(b"\n", b"\r\n"),
        ".tinyblock/ffn.py.base": new["ffn.py"].replace(b"\n", b"\r\n"),
        "rmsnorm.py": mixed,
        "rope.py": mine.replace(b"\n", b"\r\n"),
    }.items():
        assert contents[name] == expected, name


def test_a_restored_copy_has_the_line_ends_of_its_base(project):
    base = project.base("ffn.py")
    base.write_bytes(base.read_bytes().replace(b"\n", b"\r\n"))
    (project.folder / "ffn.py").unlink()
    project.run("update", "ffn")
    assert project.contents()["ffn.py"] == base.read_bytes()


def test_to_drop_edits_delete_the_copy(project):
    before = project.contents()
    project.append("rope.py", "# mine")
    (project.folder / "rope.py").unlink()
    assert project.rows("update", "rope") == {"rope.py": "copied"}
    assert project.contents() == before


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
