"""Files that are written whole or not at all, and documents of a schema."""

import pytest
from lab.files import atomic, read_json


def test_atomic_replaces_a_file_at_the_end_and_follows_a_link(tmp_path):
    target, link = tmp_path / "folder" / "out.json", tmp_path / "link.json"
    target.parent.mkdir()
    target.write_text("old")
    link.symlink_to(target)
    with atomic(link) as temporary:
        temporary.write_text("new")
        assert target.read_text() == "old"
        assert temporary.suffix == target.suffix
        written = temporary.stat().st_ino
    assert target.read_text() == "new"
    assert (
        target.stat().st_ino == written
    )  # moved, not copied: no moment with half a file
    assert link.is_symlink()
    assert sorted(tmp_path.rglob("*")) == [target.parent, target, link]


def test_read_json_rejects_other_files(tmp_path):
    path = tmp_path / "old.json"
    with pytest.raises(
        ValueError, match=f"--compare: cannot read {path}: No such file"
    ):
        read_json(path, "a/1", "--compare")
    for text, message in (
        ("{", "is not JSON"),
        ("[]", 'must have the "schema" a/1'),
        ('{"schema": "x"}', "must have"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_json(path, "a/1", "--compare")
