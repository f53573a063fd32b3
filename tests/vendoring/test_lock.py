"""The lock file: what it holds, and what it is refused for."""

import hashlib
import json
import shutil

import pytest
from vendoring.project import FILES, LICENCE, LOCK, release

from tinyblock.vendoring.catalogue import Upstream


def test_lock_keeps_the_text_of_what_is_merged_and_of_the_rest_the_hash(project):
    project.add("rope", "--with-tests", "--with-typecheck")
    files = json.loads(project.path(LOCK).read_bytes())["files"]
    assert list(files) == sorted({*project.names(), LICENCE})
    assert "\n".join(files["typecheck.py"]["pristine"]) == FILES["typecheck.py"]
    assert {name for name, fields in files.items() if "pristine" in fields} == {"rope.py", "typecheck.py"}
    assert set(project.states().values()) == {"pristine"}
    assert files[LICENCE] == {"version": "0.2.0", "sha256": hashlib.sha256(FILES["LICENSE"].encode()).hexdigest()}


def test_lock_of_block_and_its_siblings_is_small(project):
    project.add("block", upstream=Upstream.installed())
    assert project.path(LOCK).stat().st_size <= 30_000


def test_corrupt_lock_is_refused(project):
    project.add("rope")
    lock = json.loads(project.path(LOCK).read_bytes())
    entry = lock["files"]["rope.py"]
    names = [
        "", "../rope.py", "/etc/rope.py", "..\\rope.py", "C:rope.py", "a/rope.py", "contract/a/rope.py",
        "contract/../rope.py", "contract/", "rope.py\n", "rOPE.py", "__init__.py", "rope.sh",
    ]  # fmt: skip
    for changed, expected in [
        ({"version": None}, ""),
        ({"version": "new"}, "is no version"),
        ({"version": "1" * 5000}, "is no version"),
        ({"version": "1.0\x1b[2J"}, "is no version"),
        ({"sha256": "0" * 64}, "does not have its SHA-256"),
        ({"pristine": None}, ""),
        ({"pristine": ["x = 1", ""]}, "does not have its SHA-256"),
        ({"pristine": ["\ud800"]}, ""),
        *(({"name": name}, "is not the name of a file in its folder") for name in names),
    ]:
        fields = entry | changed
        project.path(LOCK).write_text(json.dumps(lock | {"files": {fields.pop("name", "rope.py"): fields}}))
        project.assert_refused(rf"tinyblock\.lock is corrupt \(.*{expected}.*: restore it", "check", project.folder)
    for content in ("", "{", "[]", '{"lock_version": 2}', '{"lock_version": 2, "files": []}', "<<<<<<< HEAD\n{}\n"):
        project.path(LOCK).write_text(content)
        for command in project.commands():
            project.assert_refused(r"tinyblock\.lock is corrupt .*: restore it from your repository", *command)


@pytest.mark.parametrize("version", [1, 3, "2", None, "x" * 100])
def test_lock_of_an_unknown_version_is_refused_with_the_way_out(version, project):
    project.add("rope")
    project.path(LOCK).write_text(json.dumps({"lock_version": version, "files": "of another kind"}))
    expected = "has lock version .{1,20}, and this tinyblock knows 2 only: use the tinyblock that"
    for command in project.commands():
        project.assert_refused(expected, *command)


@pytest.mark.parametrize(("taken", "installed"), [("0.10.0", "0.9.0"), ("1.0", "0.9.9"), ("0.9.1", "0.9")])
def test_copies_of_a_newer_tinyblock_are_refused(taken, installed, project):
    newer = release(project.root / "newer", taken)
    older = release(project.root / "older", installed, {"rope.py": "# older\n"})
    project.add("rope", upstream=newer)
    expected = rf"rope\.py is of tinyblock {taken}, newer than the installed {installed}: upgrade"
    for command in project.commands():
        project.assert_refused(expected, *command, upstream=older)
    without = release(project.root / "without", installed, left_out="rope.py")
    project.assert_refused(expected, "check", project.folder, upstream=without)
    shutil.rmtree(project.folder)
    project.add("rope", upstream=older)
    assert project.states(newer)["rope.py"] == "outdated"
