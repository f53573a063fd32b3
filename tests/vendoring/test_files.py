"""No byte is lost when files are read, compared and merged. Several files are replaced together, or none."""

import os

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from vendoring.project import snapshot

from tinyblock.vendoring import CommandError
from tinyblock.vendoring.files import CONFLICT_MARKS, decode, encode, merge, replace_all

LINES = st.lists(st.sampled_from(["a", "b", "c", "", "\tdef f():", "é"]), max_size=8)


@settings(deadline=None, max_examples=15)
@given(base=LINES, mine=LINES, theirs=LINES)
def test_merge_loses_nothing_that_either_side_added(base, mine, theirs):
    assume(mine != theirs)
    mine, theirs = (
        [f"mine {line}" for line in mine],
        [f"theirs {line}" for line in theirs],
    )
    ours, before, other = (
        "".join(f"{line}\n" for line in side) for side in (mine, base, theirs)
    )
    text, has_conflicts = merge(ours, before, other, ("mine", "base", "theirs"))
    lines = text.splitlines()
    assert [line for line in lines if line.startswith("mine ")] == mine
    assert [line for line in lines if line.startswith("theirs ")] == theirs
    has_marks = {
        "<<<<<<< mine" in lines,
        ">>>>>>> theirs" in lines,
        bool(CONFLICT_MARKS.search(text)),
    }
    assert has_marks == {has_conflicts}


@given(st.binary(max_size=20) | st.text("\r\na", max_size=20).map(str.encode))
def test_decode_and_encode_lose_no_byte(content):
    text = decode(content)
    if 2 * content.count(b"\r\n") > content.count(b"\n"):
        assert (
            encode(text, like=content).replace(b"\r\n", b"\n")
            == content.replace(b"\r\n", b"\n")
            == encode(text)
        )
    else:
        assert encode(text, like=content) == content


@pytest.fixture
def changes(tmp_path):
    """Changes of a file to replace, one to create, one to delete and one to create after these."""
    for name in ("replaced", "deleted"):
        (tmp_path / name).write_bytes(b"before")
        (tmp_path / name).chmod(0o640)
    created = dict.fromkeys(("folder/created", "last"), (None, b"after"))
    contents = {
        "replaced": (b"before", b"after"),
        "deleted": (b"before", None),
        **created,
    }
    return {tmp_path / name: change for name, change in contents.items()}


@pytest.mark.parametrize("fails", ["replaced", "created", "last"])
def test_replace_all_puts_everything_back_if_one_change_fails(fails, tmp_path, changes):
    def replace(source, target):
        if target.name == fails:
            raise KeyboardInterrupt
        os.replace(source, target)

    before = snapshot(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        replace_all(tmp_path, changes, replace)
    assert snapshot(tmp_path) == before | {"folder": None}
    assert (tmp_path / "deleted").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("name", ["deleted", "folder/created", "last"])
def test_replace_all_keeps_what_another_program_writes_meanwhile(
    name, tmp_path, changes
):
    def replace(source, target):
        os.replace(source, target)
        if target.name == "replaced":  # the first
            (tmp_path / name).write_bytes(b"of another program")

    before = snapshot(tmp_path)
    with pytest.raises(
        CommandError,
        match=f"{name} was changed by another program meanwhile: run the command again",
    ):
        replace_all(tmp_path, changes, replace)
    assert snapshot(tmp_path) == before | {"folder": None, name: b"of another program"}
