"""Files that are written whole or not at all."""

import os
from pathlib import Path

import pytest
from lab.files import atomic, require_writable


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
    assert target.stat().st_ino == written  # moved, not copied: no moment with half a file
    assert link.is_symlink()
    assert sorted(tmp_path.rglob("*")) == [target.parent, target, link]


def test_atomic_leaves_the_old_file_when_writing_fails(tmp_path):
    path = tmp_path / "out.json"
    path.write_text("old")

    def fail():
        with atomic(path) as temporary, open("/dev/full", "w") as full:
            temporary.write_text("half")
            full.write("more than fits")

    with pytest.raises(OSError, match=r"No space left on device: .*out\.json"):  # Python names no file here
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_require_writable_raises_what_writing_would_and_changes_nothing(tmp_path):
    path, link = tmp_path / "out.json", tmp_path / "link"
    link.symlink_to(os.devnull)
    for device in (link, Path(os.devnull)):
        with pytest.raises(OSError, match="not a regular file"):
            require_writable(device)
    with pytest.raises(IsADirectoryError):
        require_writable(tmp_path)
    require_writable(path)
    assert list(tmp_path.iterdir()) == [link]
    path.write_text("old")
    require_writable(path)
    assert path.read_text() == "old"
