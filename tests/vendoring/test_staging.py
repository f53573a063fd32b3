"""Several files are replaced, or none."""

import os
import signal
from pathlib import Path

import pytest
from vendoring.project import LAST, LOCK, edit, snapshot

from tinyblock.vendoring import staging

FILES_OF_BLOCK = 16  # copies of block with its tests, the licence, the lock file
ADD = ("add", "block", "--with-tests", "--to")


def fail_at(monkeypatch, failing, error):
    """Let these calls of os.replace raise; return what is replaced, in a list that grows."""
    replaced, real = list[Path](), os.replace

    def replace(source, target):
        replaced.append(target)
        if len(replaced) - 1 in failing:
            raise error
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    return replaced


def test_add_that_cannot_be_finished_leaves_nothing(project):
    for at in range(FILES_OF_BLOCK):
        with pytest.MonkeyPatch.context() as monkeypatch:
            replaced = fail_at(monkeypatch, {at}, OSError(28, "No space left on device", "new", None, "rope.py"))
            project.assert_refused(r"rope\.py: No space left on device", *ADD, project.folder / "new")
            assert len(replaced) == at + 1
    assert snapshot(project.root) == {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        replaced = fail_at(monkeypatch, set(), OSError())
        project.add("block", "--with-tests")
    assert len(replaced) == FILES_OF_BLOCK
    assert replaced[-1].name == LOCK  # what is not in it yet is found to be new


def test_update_that_cannot_be_finished_puts_everything_back(project, old):
    project.add("attention", "rope", upstream=old)
    before = snapshot(project.root)
    for at in range(3):
        with pytest.MonkeyPatch.context() as monkeypatch:
            fail_at(monkeypatch, {at}, MemoryError())
            with pytest.raises(MemoryError):
                project.run("update", project.folder)
        assert snapshot(project.root) == before
    assert project.run("update", project.folder).code == 0


def test_files_that_cannot_be_put_back_are_kept(project, old):
    project.add("attention", "rope", upstream=old)
    before = project.path("attention.py").read_bytes()
    with pytest.MonkeyPatch.context() as monkeypatch:
        fail_at(monkeypatch, {1, 2}, OSError(5, "Input/output error", "old", None, "attention.py"))
        assert project.run("update", project.folder).err == "tinyblock: error: attention.py: Input/output error\n"
    folder = project.folder / staging.STAGING
    assert [path.read_bytes() for path in folder.glob("*.attention.py.old")] == [before]
    project.assert_refused(r"was killed: if none is, delete .*staging \(where NAME\.old", "update", project.folder)


def test_two_runs_at_once_are_kept_apart(project, old):
    project.add("attention", upstream=old)
    folder = project.folder / staging.STAGING
    folder.mkdir()
    (folder / "0.attention.py.new").touch()
    for command in (("add", "ffn", "--to"), ("update",)):
        project.assert_refused("another run is at work there.*delete .*staging", *command, project.folder)
    assert project.run("update", project.folder, "--dry-run").code == 0


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_while_files_are_replaced_is_not_heard(number, project, monkeypatch):
    real = os.replace

    def replace(source, target):
        assert source.parent.name == staging.STAGING
        real(source, target)
        os.kill(os.getpid(), number)

    def heard(*_):
        raise AssertionError("it was heard")

    monkeypatch.setattr(os, "replace", replace)
    handler = signal.signal(number, heard)
    try:
        project.add("block", "--with-tests")
        assert signal.getsignal(number) is heard
    finally:
        signal.signal(number, handler)
    assert set(project.states().values()) == {"pristine"}
    assert not (project.folder / staging.STAGING).exists()


def test_process_that_is_killed_leaves_what_was_there(project, old, monkeypatch):
    """Look at the folder at the moment before each file is replaced: what the file was is there a second time."""
    project.add("attention", "rope", upstream=old)
    edit(project.path("rope.py"), LAST, "last = 'ours'")
    contents = {path: path.read_bytes() for path in project.folder.iterdir()}
    real, seen = os.replace, list[str]()

    def replace(source, target):
        assert source.with_suffix(".old").read_bytes() == contents[target]
        seen.append(target.name)
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    assert project.run("update", project.folder).code == 0
    assert seen == ["attention.py", "rope.py", LOCK]
