"""Copies in real folders: taken, edited, outdated, merged, refused."""

import hashlib
import re
import shutil
import subprocess

import pytest
from vendoring.project import (
    FILES,
    FIRST,
    FIRST_OF_NEW,
    LAST,
    LICENCE,
    LOCK,
    MIDDLE,
    PACKAGE,
    edit,
    release,
    snapshot,
)

from tinyblock.vendoring.copies import Action, Copies, State
from tinyblock.vendoring.merging import encode, merge

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")

# add


def test_add_writes_the_text_under_a_header(project):
    out = project.add("block", "--with-tests").out
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
    assert set(project.states().values()) == {"pristine"}
    before = snapshot(project.root)
    assert project.add("block", "--with-tests").out.count("up to date") == len(new) + 1
    assert snapshot(project.root) == before


def test_add_dry_run_writes_nothing(project):
    out = project.add("block", "--dry-run").out
    assert re.search(r"^block\.py +copied$", out, re.MULTILINE)
    assert "dry run: nothing was written" in out
    assert snapshot(project.root) == {}


def test_add_refuses_to_replace_an_edited_copy_that_was_asked_for(project):
    project.add("rope")
    edit(project.path("rope.py"), LAST, "last = 'ours'")
    expected = r"rope\.py is there already, edited: see `tinyblock diff"
    project.assert_refused(expected, "add", "rope", "ffn", "--to", project.folder)
    assert re.search(r"rope\.py +kept, with your edits", project.add("transformer").out)
    assert "last = 'ours'" in project.path("rope.py").read_text()
    assert project.states() == dict.fromkeys(project.states(), "pristine") | {"rope.py": "edited"}


def test_add_restores_a_missing_copy(project):
    project.add("block", "--with-tests")
    before = snapshot(project.root)
    for name in ("ffn.py", "contract/harness.py", LICENCE):
        project.path(name).unlink()
        assert project.states()[name] == "missing"
    assert project.run("check", project.folder).code == 1
    project.add("ffn", "--with-tests")
    assert snapshot(project.root) == before


def test_add_adopts_copies_whose_lock_was_lost(project):
    project.add("block", "--with-tests")
    before = snapshot(project.root)
    project.path(LOCK).unlink()
    project.add("block", "--with-tests")
    assert snapshot(project.root) == before
    project.path(LOCK).unlink()
    edit(project.path("ffn.py"), LAST, "")
    expected = r"an edited copy that tinyblock\.lock does not know: restore"
    project.assert_refused(expected, "add", "ffn", "--to", project.folder)


def test_add_refuses_an_outdated_sibling(project, old):
    project.add("attention", upstream=old)
    project.assert_refused(
        r"earlier tinyblock \(0\.1\.0\): run `tinyblock update", "add", "block", "--to", project.folder
    )


@pytest.mark.parametrize("name", ["rmsnorm.py", "contract/harness.py", "contract", LICENCE])
def test_add_refuses_to_replace_what_it_did_not_write(name, project):
    add = ("add", "block", "--with-tests", "--to", project.folder)
    project.path(name).parent.mkdir(parents=True)
    project.path(name).write_text("mine\n")
    project.assert_refused("is there already, and no copy of tinyblock's|contract/.*: Not a directory", *add)
    project.path(name).unlink()
    if name != "contract":
        project.path(name).mkdir()
        project.assert_refused("is there already, and is no file", *add)


def test_add_refuses_to_write_into_the_package(project):
    (project.root / "link").symlink_to(PACKAGE)
    for folder in (PACKAGE, PACKAGE / "copies", PACKAGE / "sub" / "..", project.root / "link"):
        project.assert_refused("inside the tinyblock package", "add", "rope", "--to", folder)
    assert not (PACKAGE / LOCK).exists()


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
    edit(project.path("rope.py"), LAST, "")
    assert project.run("check", project.folder).code == 0
    assert project.run("check", project.folder, "--fail-on-edits").code == 1


def test_check_of_an_emptied_lock_file_finds_nothing(project):
    project.folder.mkdir()
    project.path(LOCK).write_text('{"lock_version": 2, "files": {}}')
    assert project.run("check", project.folder) == (0, "", "")


def test_diff_shows_edits_and_changes_upstream_apart(project, old):
    project.add("attention", upstream=old)
    edit(project.path("attention.py"), LAST, "last = 'ours'")
    mine, upstream, both = (project.run("diff", project.folder, *only).out for only in (["--mine"], ["--upstream"], []))
    assert mine.startswith(f"--- tinyblock 0.1.0/attention.py\n+++ {project.path('attention.py')}\n@@")
    assert re.findall(r"^[-+]\w.*", mine, re.MULTILINE) == [f"-{LAST}", "+last = 'ours'"]
    assert upstream.startswith("--- tinyblock 0.1.0/attention.py\n+++ tinyblock 0.2.0/attention.py\n@@")
    assert re.findall(r"^[-+]\w.*", upstream, re.MULTILINE) == [f"-{FIRST}", f"+{FIRST_OF_NEW}"]
    assert both == mine + upstream


def test_diff_of_tests_says_in_words_what_it_cannot_show(project, old):
    project.add("rmsnorm", "--with-tests", upstream=old)
    edit(project.path("contract/harness.py"), FIRST, "first = 'ours'")
    done = project.run("diff", project.folder)
    assert done.out == (
        f"{project.path('contract/harness.py')} is edited; tinyblock.lock has no text of tinyblock 0.1.0 to show how\n"
        "contract/harness.py has changed between tinyblock 0.1.0 and 0.2.0\n"
    )
    shown = project.run("diff", project.folder, upstream=old).out  # of which the text is at hand
    assert re.findall(r"^[-+]\w.*", shown, re.MULTILINE) == [f"-{FIRST}", "+first = 'ours'"]
    project.path("contract/harness.py").unlink()
    assert "harness.py is missing; tinyblock.lock has no text" in project.run("diff", project.folder, "--mine").out


def test_diff_without_any_says_so(project):
    project.add("rope", "--with-tests")
    assert project.run("diff", project.folder) == (0, "", "tinyblock: no difference in " + str(project.folder) + "\n")


def test_diff_of_a_missing_copy_removes_it(project):
    project.add("rope")
    lines = project.path("rope.py").read_text().splitlines()
    project.path("rope.py").unlink()
    out = project.run("diff", project.folder).out
    assert out.splitlines()[1] == "+++ /dev/null"
    assert [line[1:] for line in out.splitlines()[3:]] == lines


@needs_git
def test_diff_can_be_applied(project):
    project.add("rope")
    pristine = project.path("rope.py").read_bytes()
    edited = pristine.replace(MIDDLE.encode(), b"middle = 2") + b"# caf\xe9, and no newline at the end"
    project.path("rope.py").write_bytes(edited)
    patch = encode(Copies(project.folder, project.upstream).edits("rope.py"))
    (project.root / "copy.py").write_bytes(pristine)
    patch = re.sub(rb"^(---|\+\+\+) .*$", rb"\1 a/copy.py", patch, flags=re.MULTILINE)
    subprocess.run(["git", "apply", "-"], input=patch, cwd=project.root, check=True)
    assert (project.root / "copy.py").read_bytes() == edited


# update


@needs_git
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])  # as git writes them on Windows, the lock file too
def test_update_merges_edits_with_what_changed(newline, project, old):
    project.add("attention", "rope", "ffn", upstream=old)
    for path in project.folder.iterdir():
        path.write_bytes(path.read_bytes().replace(b"\n", newline))
    assert set(project.states().values()) == {"pristine", "outdated"}
    assert project.run("diff", project.folder, "--mine").out == ""
    first, last = b"# Ours since 2026." + newline, newline + b"OURS = True" + newline
    path = project.path("rope.py")
    path.write_bytes(first + path.read_bytes() + last)
    assert project.states()["rope.py"] == "edited, outdated"
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
    assert project.path("attention.py").read_bytes() == copied["attention.py"]
    after = snapshot(project.root)
    assert after.keys() == before.keys()
    assert {name for name in after if after[name] != before[name]} == {
        f"{project.folder.name}/{name}" for name in ("attention.py", "rope.py", LOCK)
    }
    assert project.states() == dict.fromkeys(project.states(), "pristine") | {"rope.py": "edited"}
    assert project.run("update", project.folder).out.count("up to date") == 4


@pytest.fixture
def conflict(project, old):
    """A copy, updated, of which an edit clashes with what had changed."""
    project.add("attention", "rope", upstream=old)
    edit(project.path("attention.py"), FIRST, "first = 'ours'")
    assert project.run("update", project.folder, "--dry-run").code == 1
    done = project.run("update", project.folder)
    assert done.code == 1
    assert done.err == "tinyblock: resolve what stands between <<<<<<< and >>>>>>>; NAME.orig is the file as it was\n"
    assert re.search(r"^attention\.py +CONFLICT\nrope\.py +updated$", done.out, re.MULTILINE)
    return project.path("attention.py")


@needs_git
def test_update_marks_a_conflict_and_keeps_the_file_before(conflict, project):
    assert "first = 'ours'" in project.path("attention.py.orig").read_text()
    mine, theirs = (
        f"<<<<<<< {conflict.as_posix()}\nfirst = 'ours'\n=======\n",
        f"{FIRST_OF_NEW}\n>>>>>>> tinyblock 0.2.0\n",
    )
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
    conflict.write_text(marked.replace(mine + theirs, f"{FIRST_OF_NEW}\n"))
    assert project.states()["attention.py"] == "pristine"
    newer = release(project.root / "newer", "0.3.0")
    conflict.write_text(marked.replace(mine + theirs, "first = 'both'\n"))
    assert project.states() == dict.fromkeys(project.states(), "pristine") | {"attention.py": "edited"}
    assert project.states(newer)["attention.py"] == "edited, outdated"


@needs_git
def test_giving_up_a_conflict_is_told(conflict, project):
    project.path("attention.py.orig").replace(conflict)
    assert project.states()["attention.py"] == "lock mismatch"
    before = snapshot(project.root)
    done = project.run("update", project.folder)
    assert done.code == 1
    assert "is of another version than the lock file says: restore one of them" in done.out
    assert snapshot(project.root) == before


@needs_git
def test_conflict_does_not_keep_other_copies_from_an_update(conflict, project):
    marked = conflict.read_bytes()
    newer = release(project.root / "newer", "0.3.0", {"rope.py": FILES["rope.py"] + "# newer\n"})
    done = project.run("update", project.folder, upstream=newer)
    assert done.code == 1
    assert re.search(r"^rope\.py +updated$", done.out, re.MULTILINE)
    assert conflict.read_bytes() == marked


def test_marks_in_a_docstring_are_no_conflict(project):
    project.add("rope")
    edit(project.path("rope.py"), LAST, "<<<<<<< HEAD\na\n=======\nb\n>>>>>>> other")
    assert project.states()["rope.py"] == "edited"


@needs_git
def test_update_never_overwrites_an_earlier_backup(project, old):
    project.add("attention", upstream=old)
    edit(project.path("attention.py"), FIRST, "first = 'ours'")
    project.path("attention.py.orig").write_text("mine")
    assert project.run("update", project.folder).code == 1
    assert project.path("attention.py.orig").read_text() == "mine"
    assert "first = 'ours'" in project.path("attention.py.orig2").read_text()


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


def test_update_leaves_a_missing_copy_missing(project, old):
    project.add("attention", "rope", upstream=old)
    project.path("rope.py").unlink()
    done = project.run("update", project.folder)
    assert done.code == 0
    assert re.search(r"^attention\.py +updated\nrope\.py +missing, left so$", done.out, re.MULTILINE)
    assert project.states()["rope.py"] == "missing"


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
    project.empty()
    project.add("attention", "--with-tests", upstream=older)
    assert "rope.py" not in project.names()
    assert project.run("update", project.folder).code == 0
    assert {"rope.py", "contract/rope.py"} <= project.names()
    assert set(project.states().values()) == {"pristine"}


def test_update_leaves_alone_what_tinyblock_no_longer_has(project):
    project.add("rope")
    newer = release(project.root / "newer", "9.0.0", left_out="rope.py")
    before = snapshot(project.folder)
    done = project.run("update", project.folder, upstream=newer)
    assert done.code == 0
    assert re.search(r"rope\.py +no longer in tinyblock", done.out)
    assert snapshot(project.folder) == before
    done = project.run("check", project.folder, upstream=newer)
    assert (done.code, done.out.splitlines()[1]) == (0, "rope.py            pristine  no longer in tinyblock")


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
    project.assert_refused("is of another version than the lock file", "add", "attention", "--to", project.folder)


@needs_git
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


@needs_git
def test_odd_bytes_and_modes_survive_an_update(project, old):
    project.add("attention", "rope", upstream=old)
    odd = b"a = 1\r\nb = 2\n# caf\xe9"
    with project.path("attention.py").open("ab") as file:
        file.write(odd)
    project.path("attention.py").chmod(0o640)
    assert project.run("update", project.folder).code == 0
    assert project.path("attention.py").read_bytes() == project.upstream.require("attention.py").text.encode() + odd
    assert project.path("attention.py").stat().st_mode & 0o777 == 0o640


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
    (project.root / "loop").symlink_to(project.root / "loop")
    project.assert_refused("is reached by a symbolic link", "add", "rope", "--to", project.root / "loop")


def test_folder_that_is_none_is_refused(project):
    for command in project.commands()[1:]:
        project.assert_refused("there is no folder", *command)
    project.folder.mkdir()
    for command in project.commands()[1:]:
        project.assert_refused(r"has no tinyblock\.lock", *command)
    project.empty()
    project.folder.write_text("mine")
    for command in project.commands():
        project.assert_refused("is a file, not a folder", *command)
    project.assert_refused("Not a directory", "add", "rope", "--to", project.folder / "inside")
    assert project.run("add", "rope", "--to", project.root / "nowhere" / ".." / "layers").code == 0
    assert {path.name for path in project.root.iterdir()} == {project.folder.name, "layers"}


@needs_git
@pytest.mark.parametrize("interrupted", [True, False])
def test_nothing_is_lost_while_an_update_decides(interrupted, project, old, monkeypatch):
    project.add("attention", "rope", upstream=old)
    edit(project.path("rope.py"), LAST, "last = 'ours'")
    before = snapshot(project.root)

    def merge_meanwhile(*texts):
        if interrupted:
            raise KeyboardInterrupt
        edit(project.path("rope.py"), "last = 'ours'", "last = 'saved'")  # by an editor
        return merge(*texts)  # type: ignore[arg-type]

    monkeypatch.setattr("tinyblock.vendoring.copies.merge", merge_meanwhile)
    code, _, err = project.run("update", project.folder)
    if interrupted:
        assert (code, err) == (130, "tinyblock: interrupted\n")
    else:
        assert code == 2
        assert re.search(r"rope\.py was changed meanwhile by another program: repeat\n$", err)
        edit(project.path("rope.py"), "last = 'saved'", "last = 'ours'")
    assert snapshot(project.root) == before


def test_copies_can_be_used_from_python(project, old):
    assert Copies(project.folder, old).add(["rope"]) == {"rope.py": Action.COPIED, LICENCE: Action.COPIED}
    copies = Copies(project.folder, project.upstream)
    assert copies.state("rope.py") is State.OUTDATED
    assert copies.update()["rope.py"] is Action.UPDATED
    assert set(copies.states().values()) == {State.PRISTINE}
