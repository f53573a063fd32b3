"""Files that are written whole or not at all."""

import os
from pathlib import Path

import pytest
from lab.files import atomic, require_writable


def test_atomic_replaces_a_file_at_the_end(tmp_path):
    path = tmp_path / "out.json"
    path.write_text("old")
    require_writable(path)
    assert path.read_text() == "old"
    with atomic(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
        assert temporary.suffix == path.suffix
        written = temporary.stat().st_ino
    assert path.stat().st_ino == written  # moved, not copied: no moment with half a file
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_atomic_leaves_the_old_file_when_writing_fails(tmp_path):
    path = tmp_path / "out.json"
    path.write_text("old")

    def fail():
        with atomic(path) as temporary:
            temporary.write_text("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_atomic_follows_a_link(tmp_path):
    target, link = tmp_path / "folder" / "out.json", tmp_path / "link.json"
    target.parent.mkdir()
    target.write_text("old")
    link.symlink_to(target)
    require_writable(link)
    with atomic(link) as temporary:
        temporary.write_text("new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert sorted(tmp_path.rglob("*")) == [target.parent, target, link]


def test_require_writable_refuses_what_is_no_regular_file(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(os.devnull)
    for path in (link, Path(os.devnull)):
        with pytest.raises(OSError, match="not a regular file"):
            require_writable(path)


def test_require_writable_raises_what_writing_would_and_leaves_nothing(tmp_path):
    with pytest.raises(IsADirectoryError):
        require_writable(tmp_path)
    require_writable(tmp_path / "out.json")
    assert list(tmp_path.iterdir()) == []


def test_atomic_names_the_file_where_an_error_does_not(tmp_path):
    def fail():
        with atomic(tmp_path / "out.json"), open("/dev/full", "w") as full:
            full.write("more than fits")

    with pytest.raises(OSError, match=r"No space left on device: .*out\.json"):
        fail()
