"""Several files are replaced together, or none."""

import os

import pytest
from vendoring.project import snapshot

from tinyblock.vendoring import CommandError
from tinyblock.vendoring.files import replace_all


@pytest.fixture
def changes(tmp_path):
    """One file of each kind: replaced, created in a new folder, deleted."""
    for name in ("replaced", "deleted"):
        (tmp_path / name).write_bytes(b"before")
        (tmp_path / name).chmod(0o640)
    return {
        tmp_path / "replaced": (b"before", b"after"),
        tmp_path / "folder" / "created": (None, b"after"),
        tmp_path / "deleted": (b"before", None),
    }


@pytest.mark.parametrize("fails", ["replaced", "created", "last"])
def test_replace_all_puts_everything_back_if_one_change_fails(fails, tmp_path, changes):
    changes[tmp_path / "last"] = (None, b"after")

    def replace(source, target):
        if target.name == fails:
            raise KeyboardInterrupt
        os.replace(source, target)

    before = snapshot(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        replace_all(tmp_path, changes, replace)
    assert snapshot(tmp_path) == before | {"folder": None}
    assert (tmp_path / "deleted").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("name", ["replaced", "folder/created", "deleted"])
def test_replace_all_rejects_files_that_another_program_changed(name, tmp_path, changes):
    (tmp_path / "folder").mkdir()
    (tmp_path / name).write_bytes(b"of another program")
    before = snapshot(tmp_path)
    with pytest.raises(CommandError, match=f"{name} was changed by another program"):
        replace_all(tmp_path, changes)
    assert snapshot(tmp_path) == before
