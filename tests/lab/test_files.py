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
    # Moved, not copied: at no moment is half a file there.
    assert target.stat().st_ino == written
    assert link.is_symlink()
    assert sorted(tmp_path.rglob("*")) == [target.parent, target, link]


def test_read_json_rejects_a_missing_file(tmp_path):
    path = tmp_path / "old.json"
    message = f"OLD.json: cannot read {path}: No such file"
    with pytest.raises(ValueError, match=message):
        read_json(path, "a/1", "OLD.json", "program.py --json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("{", "is not JSON", id="damaged"),
        pytest.param("[" * 100_000, "is not JSON", id="nested deeply"),
        pytest.param("[]", 'must have the "schema" a/1, got None', id="a list"),
        pytest.param(
            '{"schema": "\\u001b[31m"}', r"got \\x1b\[31m: ", id="a control character"
        ),
        pytest.param(
            '{"schema": "b/1"}',
            'must have the "schema" a/1, got b/1: write it with program.py --json$',
            id="another",
        ),
    ],
)
def test_read_json_rejects_other_documents(text, message, tmp_path):
    path = tmp_path / "old.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_json(path, "a/1", "OLD.json", "program.py --json")
