"""The lock file: what it holds, and what it is refused for."""

import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from vendoring.project import FILES, LICENCE, LOCK, release

from tinyblock.vendoring.catalogue import Upstream
from tinyblock.vendoring.lock import Entry, Original, parse_lock, render_lock


def test_lock_is_read_as_it_was_written():
    pristine = 'a = "é"\n\n\tb = 1'  # without a newline at the end
    entries: dict[str, Entry] = {"rope.py": Original.of("rope.py", "1.2.3rc1", pristine)}
    assert parse_lock(render_lock(entries), "lock") == entries


def test_lock_keeps_the_text_of_what_is_merged_and_of_the_rest_the_hash(project):
    project.add("rope", "--with-tests", "--with-typecheck")
    files = json.loads(project.path(LOCK).read_bytes())["files"]
    assert list(files) == sorted({*project.names(), LICENCE})
    assert "\n".join(files["typecheck.py"]["pristine"]) == FILES["typecheck.py"]
    assert {name for name, fields in files.items() if "pristine" in fields} == {"rope.py", "typecheck.py"}
    assert files[LICENCE] == {"version": "0.2.0", "sha256": hashlib.sha256(FILES["LICENSE"].encode()).hexdigest()}


def test_lock_of_block_and_its_siblings_is_small(project):
    project.add("block", upstream=Upstream.installed())
    assert project.path(LOCK).stat().st_size <= 30_000


def _rename(name):
    return lambda lock: lock["files"].update({name: lock["files"].pop("rope.py")})


def _set(key, value):
    return lambda lock: lock["files"]["rope.py"].update({key: value})


# What is done to the lock file, and what the refusal says.
CORRUPTIONS: list[tuple[bytes | Callable[[dict[str, Any]], Any], str]] = [
    (b"", ""),
    (b"{", ""),
    (b"[]", ""),
    (b"\xff\xfe{}", ""),
    (b"[" * 100_000, ""),
    (b'<<<<<<< HEAD\n{"lock_version": 2, "files": {}}\n', ""),
    (lambda lock: lock.pop("lock_version"), ""),
    (lambda lock: lock.pop("files"), ""),
    (lambda lock: lock.update(files=[]), ""),
    (_set("version", None), ""),
    (_set("version", "new"), "is no version"),
    (_set("version", "1" * 5000), "is no version"),
    (_set("version", "1.0\x1b[2J"), "is no version"),
    (_set("sha256", "0" * 64), "does not have its SHA-256"),
    (_set("sha256", "\x1b[2J"), "is no SHA-256"),
    (_set("pristine", None), ""),
    (_set("pristine", ["x = 1", ""]), "does not have its SHA-256"),
    (_set("pristine", ["\ud800"]), ""),
    (lambda lock: lock["files"]["rope.py"].pop("pristine"), ""),
    *(
        (_rename(name), "is not the name of a file in its folder")
        for name in (
            "", "../rope.py", "/etc/rope.py", "..\\rope.py", "C:rope.py", "a/rope.py", "contract/a/rope.py",
            "contract/../rope.py", "contract/", "rope.py\n", "rOPE.py", "__init__.py", "rope.sh",
        )
    ),
]  # fmt: skip


def test_corrupt_lock_is_refused(project):
    project.add("rope")
    pristine = project.path(LOCK).read_bytes()
    for corrupt, expected in CORRUPTIONS:
        if isinstance(corrupt, bytes):
            project.path(LOCK).write_bytes(corrupt)
        else:
            lock = json.loads(pristine)
            corrupt(lock)
            project.path(LOCK).write_text(json.dumps(lock))
        project.assert_refused(rf"tinyblock\.lock is corrupt \(.*{expected}.*: restore it", "check", project.folder)
    for command in project.commands():
        project.assert_refused("restore it from your repository", *command)


@pytest.mark.parametrize("version", [1, 3, 1e999, "2", None, "x" * 100])
def test_lock_of_an_unknown_version_is_refused_with_the_way_out(version, project):
    project.add("rope")
    project.path(LOCK).write_text(json.dumps({"lock_version": version, "files": "of another kind"}))
    for command in project.commands():
        project.assert_refused(
            "has lock version .{1,20}, and this tinyblock knows 2 only: use the tinyblock that", *command
        )


@pytest.mark.parametrize(("taken", "installed"), [("0.10.0", "0.9.0"), ("1.0", "0.9.9"), ("0.9.1", "0.9")])
def test_copies_of_a_newer_tinyblock_are_refused(taken, installed, project):
    newer = release(project.root / "newer", taken)
    older = release(project.root / "older", installed, {"rope.py": "# older\n"})
    project.add("rope", upstream=newer)
    expected = rf"rope\.py is of tinyblock {taken}, newer than the installed {installed}: upgrade"
    for command in project.commands():
        project.assert_refused(expected, *command, upstream=older)
    project.empty()
    project.add("rope", upstream=older)
    assert project.states(newer)["rope.py"] == "outdated"


def test_newer_copy_of_a_file_that_did_not_exist_yet_is_refused(project):
    newer = release(project.root / "newer", "9.0")
    older = release(project.root / "older", "0.1.0", left_out="rope.py")
    project.add("rope", upstream=newer)
    project.assert_refused("newer than the installed", "check", project.folder, upstream=older)
