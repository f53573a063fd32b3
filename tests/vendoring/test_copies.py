"""Copies in real folders: taken, edited, outdated, merged, refused."""

import hashlib
import io
import re
import shutil
import subprocess
import sys
from unittest.mock import Mock

import pytest
from vendoring.project import FILES, FIRST, FIRST_OF_NEW, LAST, LICENCE, LOCK, MIDDLE, edit, release, snapshot

from tinyblock.vendoring.cli import main
from tinyblock.vendoring.merging import merge

# add


def test_add_writes_the_text_under_a_header(project):
    dry = project.add("block", "--with-tests", "--dry-run")
    assert snapshot(project.root) == {}
    out = project.add("block", "--with-tests").out
    assert dry.out == out + f"dry run: nothing was written to {project.folder}\n"
    assert {line.split()[0] for line in out.splitlines()} == {*project.names(), LICENCE}
    assert project.path(LICENCE).read_text() == FILES["LICENSE"]
    new = {name: project.upstream.require(name).pristine for name in project.names()}
    assert {"attention.py", "rope.py", "contract/attention.py", "contract/__init__.py"} <= new.keys()
    for name, text in new.items():
        assert project.path(name).read_text() == (
            f"# Copied from tinyblock 0.2.0: tinyblock/{name} (licence: LICENSE.tinyblock)\n"
            f"# Pristine SHA-256: {hashlib.sha256(text.encode()).hexdigest()}\n"
            f"# SPDX-License-Identifier: MIT\n{text}"
        )
    before = snapshot(project.root)
    assert project.add("block", "--with-tests").out.count("up to date") == len(new) + 1
    assert snapshot(project.root) == before


def test_add_refuses_copies_that_are_outdated_and_edited_ones_that_were_asked_for(project, old):
    project.add("rope", upstream=old)
    expected = r"earlier tinyblock \(0\.1\.0\): run `tinyblock update"
    project.assert_refused(expected, "add", "transformer", "--to", project.folder)
    project.run("update", project.folder)
    edit(project.path("rope.py"), LAST, "last = 'ours'")
    expected = r"rope\.py is there already, edited: see `tinyblock diff"
    project.assert_refused(expected, "add", "rope", "ffn", "--to", project.folder)
    assert re.search(r"rope\.py +kept, with your edits", project.add("transformer").out)
    assert "last = 'ours'" in project.path("rope.py").read_text()
    assert project.states() == dict.fromkeys(project.states(), "pristine") | {"rope.py": "edited"}


def test_add_restores_missing_copies_and_a_lost_lock(project):
    project.add("block", "--with-tests")
    before = snapshot(project.root)
    for lost in (["ffn.py", "contract/harness.py", LICENCE], [LOCK]):
        for name in lost:
            project.path(name).unlink()
        project.add("block", "--with-tests")
        assert snapshot(project.root) == before


def test_add_refuses_to_replace_what_it_does_not_know(project):
    add = ("add", "block", "--with-tests", "--to", project.folder)
    for name in ("rmsnorm.py", "contract/harness.py", LICENCE):
        project.path(name).parent.mkdir(parents=True)
        project.path(name).write_text("mine\n")
        project.assert_refused(r"is there already, and not in tinyblock\.lock: move it away", *add)
        project.path(name).unlink()
        project.path(name).mkdir()
        project.assert_refused(f"{name}: Is a directory", *add)
        shutil.rmtree(project.folder)


# check and diff


def test_check_knows_every_state(project, old):
    project.add("transformer", upstream=old)
    edit(project.path("rmsnorm.py"), LAST, "")
    edit(project.path("rope.py"), LAST, "")
    project.path("ffn.py").unlink()
    edit(project.path("block.py"), LAST, f"<<<<<<< {project.folder}/block.py\n{LAST}")
    edit(project.path("transformer.py"), "# Pristine SHA-256: ", "# Pristine SHA-256: " + "0" * 64 + "\n# ")
    done = project.run("check", project.folder)
    assert done.code == 1
    assert done.out.splitlines() == [
        "LICENSE.tinyblock  pristine",
        "attention.py       outdated          0.1.0 -> 0.2.0",
        "block.py           conflict",
        "ffn.py             missing",
        "rmsnorm.py         edited",
        "rope.py            edited, outdated  0.1.0 -> 0.2.0",
        "transformer.py     lock mismatch",
    ]


def test_check_lets_edits_pass_unless_asked(project):
    project.add("rope")
    assert project.run("check", project.folder, "--fail-on-edits").code == 0
    edit(project.path("rope.py"), LAST, "<<<<<<< HEAD\na\n=======\nb\n>>>>>>> other")  # not `update`'s marks
    assert project.states()["rope.py"] == "edited"
    assert [project.run("check", project.folder, *option).code for option in ([], ["--fail-on-edits"])] == [0, 1]
    project.path(LOCK).write_text('{"lock_version": 2, "files": {}}')  # every entry was deleted
    assert project.run("check", project.folder) == (0, "", "")


def test_diff_shows_edits_and_changes_upstream_apart(project, old):
    project.add("attention", "rmsnorm", upstream=old)
    edit(project.path("attention.py"), LAST, "last = 'ours'")
    project.path("rmsnorm.py").unlink()
    mine, upstream, both = (project.run("diff", project.folder, *only).out for only in (["--mine"], ["--upstream"], []))
    assert mine.startswith(f"--- tinyblock 0.1.0/attention.py\n+++ {project.path('attention.py')}\n@@")
    assert re.findall(r"^[-+]\w.*", mine, re.MULTILINE) == [f"-{LAST}", "+last = 'ours'"]
    assert mine.endswith(f"{project.path('rmsnorm.py')} is missing\n")
    assert upstream.startswith("--- tinyblock 0.1.0/attention.py\n+++ tinyblock 0.2.0/attention.py\n@@")
    assert re.findall(r"^[-+]\w.*", upstream, re.MULTILINE) == [f"-{FIRST}", f"+{FIRST_OF_NEW}"]
    assert both == mine + upstream


def test_diff_of_tests_says_in_words_what_it_cannot_show(project, old):
    project.add("rmsnorm", "--with-tests", upstream=old)
    assert project.run("diff", project.folder, "--mine") == (0, "", f"tinyblock: no difference in {project.folder}\n")
    edit(project.path("contract/harness.py"), FIRST, "first = 'ours'")
    assert project.run("diff", project.folder).out == (
        f"{project.path('contract/harness.py')} is edited; tinyblock.lock has no text of tinyblock 0.1.0 to show how\n"
        "contract/harness.py has changed between tinyblock 0.1.0 and 0.2.0\n"
    )
    shown = project.run("diff", project.folder, upstream=old).out  # of which the text is at hand
    assert re.findall(r"^[-+]\w.*", shown, re.MULTILINE) == [f"-{FIRST}", "+first = 'ours'"]


def test_diff_can_be_applied_whatever_the_encoding(project, monkeypatch):
    project.add("rope")
    pristine = project.path("rope.py").read_bytes()
    edited = pristine.replace(MIDDLE.encode(), b"middle = 2") + b"# caf\xe9, and no newline at the end"
    project.path("rope.py").write_bytes(edited)
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(["diff", str(project.folder)], project.upstream) == 0
    (project.root / "copy.py").write_bytes(pristine)
    patch = re.sub(rb"(?m)^(---|\+\+\+) .*$", rb"\1 a/copy.py", terminal.buffer.getvalue())
    subprocess.run(["git", "apply", "-"], input=patch, cwd=project.root, check=True)
    assert (project.root / "copy.py").read_bytes() == edited


# update


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])  # as git writes them on Windows, the lock file too
def test_update_merges_edits_with_what_changed(newline, project, old):
    project.add("attention", "rope", "ffn", upstream=old)
    for path in project.folder.iterdir():
        path.write_bytes(path.read_bytes().replace(b"\n", newline))
    assert set(project.states().values()) == {"pristine", "outdated"}
    assert project.run("diff", project.folder, "--mine").out == ""
    first, last = b"# Ours since 2026." + newline, newline + b"a = 1\r" + newline + b"# caf\xe9"
    path = project.path("rope.py")
    path.write_bytes(first + path.read_bytes() + last)
    path.chmod(0o640)
    before = snapshot(project.root)
    dry, done = (project.run("update", project.folder, *options) for options in (["--dry-run"], []))
    assert dry.out == done.out + f"dry run: nothing was written to {project.folder}\n"
    assert done.code == 0
    assert done.out.splitlines() == [
        "LICENSE.tinyblock  up to date",
        "attention.py       updated",
        "ffn.py             up to date",
        "rope.py            merged with your edits",
    ]
    copied = {name: project.upstream.require(name).text.encode().replace(b"\n", newline) for name in project.names()}
    assert path.read_bytes() == first + copied["rope.py"] + last
    assert path.stat().st_mode & 0o777 == 0o640
    assert project.path("attention.py").read_bytes() == copied["attention.py"]
    after = snapshot(project.root)
    assert after.keys() == before.keys()
    changed = {name.rpartition("/")[2] for name in after if after[name] != before[name]}
    assert changed == {"attention.py", "rope.py", LOCK}
    assert project.states() == dict.fromkeys(project.states(), "pristine") | {"rope.py": "edited"}
    assert project.run("update", project.folder).out.count("up to date") == 4


def test_update_marks_a_conflict_and_keeps_the_file_before(project, old):
    project.add("attention", "rope", upstream=old)
    conflict = project.path("attention.py")
    edit(conflict, FIRST, "first = 'ours'")
    project.path("attention.py.orig").write_text("mine")
    assert project.run("update", project.folder, "--dry-run").code == 1
    done = project.run("update", project.folder)
    assert done.code == 1
    assert done.err == "tinyblock: resolve what stands between <<<<<<< and >>>>>>>; NAME.orig is the file as it was\n"
    assert re.search(r"^attention\.py +CONFLICT\nrope\.py +updated$", done.out, re.MULTILINE)
    assert project.path("attention.py.orig").read_text() == "mine"
    assert "first = 'ours'" in project.path("attention.py.orig2").read_text()
    mine = f"<<<<<<< {conflict.as_posix()}\nfirst = 'ours'\n=======\n"
    theirs = f"{FIRST_OF_NEW}\n>>>>>>> tinyblock 0.2.0\n"
    marked = conflict.read_text()
    assert mine + theirs in marked
    before = snapshot(project.root)
    for part in (mine + theirs, mine, theirs):  # half resolved is not resolved
        conflict.write_text(marked.replace(mine + theirs, part))
        assert project.states()["attention.py"] == "conflict"
        assert re.search(r"attention\.py +has conflict marks", project.run("update", project.folder).out)
        project.assert_refused("has conflict marks", "add", "attention", "--to", project.folder)
    conflict.write_text(marked)
    assert snapshot(project.root) == before
    for resolved, state in ((FIRST_OF_NEW, "pristine"), ("first = 'both'", "edited")):
        conflict.write_text(marked.replace(mine + theirs, f"{resolved}\n"))
        assert project.states()["attention.py"] == state
    conflict.write_text(marked)  # keeps no other copy from an update
    newer = release(project.root / "newer", "0.3.0", {"rope.py": FILES["rope.py"] + "# newer\n"})
    done = project.run("update", project.folder, upstream=newer)
    assert (done.code, conflict.read_text()) == (1, marked)
    assert re.search(r"^rope\.py +updated$", done.out, re.MULTILINE)


def test_update_replaces_edited_tests_and_licence_and_keeps_them_beside(project, old):
    project.add("rmsnorm", "--with-tests", upstream=old)
    for name in ("contract/harness.py", "contract/loading.py", LICENCE):
        with project.path(name).open("a") as file:
            file.write("# ours\n")
    edited = {name: project.path(name).read_bytes() for name in ("contract/harness.py", LICENCE)}
    changed = {"contract/harness.py": FIRST_OF_NEW, "LICENSE": "Everybody may.\n"}
    newer = release(project.root / "newer", "0.3.0", changed)
    done = project.run("update", project.folder, upstream=newer)
    assert done.code == 1
    for name, content in edited.items():
        assert re.search(rf"^{name} +REPLACED, your edits are in NAME\.orig$", done.out, re.MULTILINE)
        assert project.path(f"{name}.orig").read_bytes() == content
        assert project.path(name).read_text() == newer.require(name).text
    assert project.states(newer) == dict.fromkeys(project.states(newer), "pristine") | {"contract/loading.py": "edited"}


def test_update_leaves_alone_what_is_missing_and_what_tinyblock_no_longer_has(project, old):
    project.add("attention", "rope", "ffn", upstream=old)
    project.path("rope.py").unlink()
    newer = release(project.root / "newer", "9.0.0rc1", {"attention.py": "# newer\n"}, left_out="ffn.py")
    ffn = project.path("ffn.py").read_bytes()
    done = project.run("update", project.folder, upstream=newer)
    assert done.code == 0
    for line in (r"attention\.py +updated", r"ffn\.py +no longer in tinyblock.*", r"rope\.py +missing, left so"):
        assert re.search(f"^{line}$", done.out, re.MULTILINE)
    assert project.path("ffn.py").read_bytes() == ffn
    assert not project.path("rope.py").exists()
    assert re.search("^ffn.py +pristine  no longer in", project.run("check", project.folder, upstream=newer).out, re.M)


def test_update_brings_what_the_new_version_needs(project):
    without = {
        "block.py": FILES["block.py"].replace("from .rmsnorm import middle as rmsnorm\n", ""),
        "contract/attention.py": FILES["contract/attention.py"].replace("from .rope import formula\n", ""),
    }
    older = release(project.root / "older", "0.1.0", without)
    project.add("block", upstream=older)
    project.path("rmsnorm.py").write_text("mine\n")
    project.assert_refused(r"rmsnorm\.py is there already", "update", project.folder)
    project.path("rmsnorm.py").unlink()
    assert re.search(r"^rmsnorm\.py +copied$", project.run("update", project.folder).out, re.MULTILINE)
    shutil.rmtree(project.folder)
    project.add("attention", "--with-tests", upstream=older)
    assert "rope.py" not in project.names()
    assert project.run("update", project.folder).code == 0
    assert {"rope.py", "contract/rope.py"} <= project.names()
    assert set(project.states().values()) == {"pristine"}


def test_update_without_git_still_replaces_what_was_not_edited(project, old, monkeypatch):
    project.add("attention", "rope", upstream=old)
    edit(project.path("rope.py"), LAST, "")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    project.assert_refused("install git", "update", project.folder)
    project.path("rope.py").unlink()
    assert project.run("update", project.folder).code == 0
    assert project.states()["attention.py"] == "pristine"


def test_copy_and_lock_of_different_versions_are_told(project, old):
    """As after a merge of branches that took the copy from one side and the lock file from the other."""
    project.add("attention", "rope", upstream=old)
    old_lock, old_copy = (project.path(name).read_bytes() for name in (LOCK, "attention.py"))
    project.run("update", project.folder)
    new_lock = project.path(LOCK).read_bytes()
    project.path(LOCK).write_bytes(old_lock)
    assert project.states()["attention.py"] == "pristine"  # this tinyblock knows the newer text
    assert project.run("update", project.folder).code == 0
    assert project.path(LOCK).read_bytes() == new_lock
    project.path("attention.py").write_bytes(old_copy)
    assert project.states()["attention.py"] == "lock mismatch"
    expected = "is of another version than the lock file says: restore one of them"
    project.assert_refused(expected, "add", "attention", "--to", project.folder)
    before = snapshot(project.root)
    done = project.run("update", project.folder)
    assert (done.code, expected in done.out, snapshot(project.root)) == (1, True, before)


def test_update_brings_as_much_of_a_header_up_to_date_as_is_there(project, old):
    project.add("attention", "rope", upstream=old)
    edit(project.path("rope.py"), "# SPDX-License-Identifier: MIT\n", "")
    text = project.path("attention.py").read_text()
    project.path("attention.py").write_text(text.partition("MIT\n")[2])
    assert project.run("update", project.folder).code == 0
    new = {name: project.upstream.require(name) for name in ("attention.py", "rope.py")}
    assert project.path("attention.py").read_text() == new["attention.py"].pristine
    assert project.path("rope.py").read_text() == new["rope.py"].text.replace("# SPDX-License-Identifier: MIT\n", "")
    assert project.states()["attention.py"] == "edited"


# What is refused, or interrupted


def test_symbolic_links_are_followed_to_the_folder_and_not_inside(project):
    elsewhere = project.root / "elsewhere"
    project.add("rope", "--with-tests")
    (project.root / "link").symlink_to(project.folder)
    assert project.run("check", project.root / "link").code == 0
    for name in ("rope.py", LOCK, "contract", "contract/rope.py"):
        shutil.move(project.path(name), elsewhere)
        project.path(name).symlink_to(elsewhere)
        for command in (("add", "rope", "--with-tests", "--to", project.folder), *project.commands()[1:]):
            project.assert_refused("is reached by a symbolic link", *command)
        project.path(name).unlink()
        shutil.move(elsewhere, project.path(name))
    project.path("ffn.py").symlink_to(elsewhere)  # nothing is there
    project.assert_refused("is reached by a symbolic link", "add", "ffn", "--to", project.folder)


def test_folder_without_copies_is_refused(project):
    for make in (lambda path: None, lambda path: path.mkdir(), lambda path: path.rmdir() or path.write_text("mine")):
        make(project.folder)
        for command in project.commands()[1:]:
            project.assert_refused(r"there is no .*/tinyblock\.lock: nothing was copied there", *command)
    for folder in (project.folder, project.folder / "inside"):
        project.assert_refused("Not a directory", "add", "rope", "--to", folder)
    assert project.run("add", "rope", "--to", project.root / "nowhere" / ".." / "layers").code == 0
    assert {path.name for path in project.root.iterdir()} == {project.folder.name, "layers"}


def test_update_loses_nothing_while_it_decides(project, old, monkeypatch):
    project.add("attention", "rope", upstream=old)
    path = project.path("rope.py")
    edit(path, LAST, "last = 'ours'")
    before = snapshot(project.root)

    def merge_while_an_editor_saves(*texts):
        path.write_text("saved")
        return merge(*texts)

    monkeypatch.setattr("tinyblock.vendoring.copies.merge", Mock(side_effect=KeyboardInterrupt))
    assert project.run("update", project.folder) == (130, "", "tinyblock: interrupted\n")
    assert snapshot(project.root) == before
    monkeypatch.setattr("tinyblock.vendoring.copies.merge", merge_while_an_editor_saves)
    code, _, err = project.run("update", project.folder)
    assert (code, err.endswith("rope.py was changed meanwhile by another program: repeat\n")) == (2, True)
    assert snapshot(project.root) == before | {f"{project.folder.name}/rope.py": b"saved"}
