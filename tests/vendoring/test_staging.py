"""Several files are replaced, or none."""

import os
import signal

import pytest
from vendoring.project import LAST, LOCK, edit, snapshot

from tinyblock.vendoring import staging

FILES_OF_BLOCK = 16  # copies of block with its tests, the licence, the lock file


def fail_at(monkeypatch, failing, error):
    """Let these calls of os.replace raise; return what is replaced, in a list that grows."""
    replaced, real = [], os.replace

    def replace(source, target):
        replaced.append(target)
        if len(replaced) - 1 in failing:
            raise error
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    return replaced


def test_add_that_cannot_be_finished_leaves_nothing(project):
    add = ("add", "block", "--with-tests", "--to", project.folder / "new")
    for at in range(FILES_OF_BLOCK):
        with pytest.MonkeyPatch.context() as monkeypatch:
            replaced = fail_at(monkeypatch, {at}, OSError(28, "No space left on device", "new", None, "rope.py"))
            project.assert_refused(r"rope\.py: No space left on device", *add)
            assert len(replaced) == at + 1
    assert snapshot(project.root) == {}
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


def test_files_that_cannot_be_put_back_are_kept_and_other_runs_kept_away(project, old):
    project.add("attention", "rope", upstream=old)
    before = project.path("attention.py").read_bytes()
    with pytest.MonkeyPatch.context() as monkeypatch:
        fail_at(monkeypatch, {1, 2}, OSError(5, "Input/output error", "old", None, "attention.py"))
        assert project.run("update", project.folder).err == "tinyblock: error: attention.py: Input/output error\n"
    [backup] = (project.folder / staging.STAGING).glob("*.attention.py.old")
    assert backup.read_bytes() == before
    for command in (("add", "ffn", "--to"), ("update",)):
        expected = r"another run is at work there, or was killed: if none is, delete .*staging \(where NAME\.old"
        project.assert_refused(expected, *command, project.folder)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_while_files_are_replaced_is_not_heard(number, project, monkeypatch):
    real, heard = os.replace, []

    def replace(source, target):
        real(source, target)
        os.kill(os.getpid(), number)

    monkeypatch.setattr(os, "replace", replace)
    handler = signal.signal(number, lambda *_: heard.append(number))
    try:
        project.add("block", "--with-tests")
        assert not heard
        os.kill(os.getpid(), number)
        assert heard  # again
    finally:
        signal.signal(number, handler)
    assert set(project.states().values()) == {"pristine"}
    assert not (project.folder / staging.STAGING).exists()


def test_process_that_is_killed_leaves_what_was_there(project, old, monkeypatch):
    """Look at the folder at the moment before each file is replaced: what the file was is there a second time."""
    project.add("attention", "rope", upstream=old)
    edit(project.path("rope.py"), LAST, "last = 'ours'")
    contents = {path: path.read_bytes() for path in project.folder.iterdir()}
    real, seen = os.replace, []

    def replace(source, target):
        assert source.with_suffix(".old").read_bytes() == contents[target]
        seen.append(target.name)
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    assert project.run("update", project.folder).code == 0
    assert seen == ["attention.py", "rope.py", LOCK]
