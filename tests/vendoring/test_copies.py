"""Copies in real folders: added, edited, outdated, merged, removed, rejected."""

import json
import re
import shutil

import pytest
from vendoring.project import (
    FIRST,
    FIRST_OF_NEW,
    LAST,
    LICENSE,
    LOCK,
    edit,
    release,
    snapshot,
)

OURS = "# last = 'ours'"


def test_add_writes_each_file_under_a_header(project):
    dry = project.add("block", "--with-tests", "--dry-run")
    assert snapshot(project.root) == {}
    done = project.add("block", "--with-tests")
    assert f"{done.out}dry run: nothing was written to {project.folder}\n" == dry.out
    assert done.rows == dict.fromkeys({*project.names(), LICENSE}, "copied")
    for name in project.names():
        header = f"# Copied from tinyblock 0.2.0: {name} (license: LICENSE.tinyblock)\n# SPDX-License-Identifier: MIT\n"
        assert (
            project.path(name).read_text()
            == header + (project.upstream.root / name).read_text()
        )
    assert (
        project.path(LICENSE).read_text()
        == (project.upstream.root / "LICENSE").read_text()
    )
    before = snapshot(project.root)
    for lost in ([], ["ffn.py", "contract/harness.py", LICENSE], [LOCK]):
        for name in lost:
            project.path(name).unlink()
        assert project.add("block", "--with-tests").rows == dict.fromkeys(
            {*lost} - {LOCK}, "copied"
        )
        assert snapshot(project.root) == before


def test_check_reports_every_state(project, old):
    project.add("transformer", upstream=old)
    assert project.run("check", project.folder, upstream=old) == (0, "7 pristine\n", "")
    edit(project.path("rmsnorm.py"), LAST, "")
    edit(project.path("rope.py"), LAST, "")
    project.path("ffn.py").unlink()
    edit(project.path("block.py"), LAST, f"<<<<<<< HEAD\n{LAST}")
    done = project.run("check", project.folder)
    assert (done.code, done.out.splitlines()[-1]) == (1, "2 pristine")
    assert done.rows == {
        "attention.py": "outdated: 0.1.0 -> 0.2.0",
        "block.py": "conflict markers",
        "ffn.py": "missing",
        "rmsnorm.py": "edited",
        "rope.py": "edited, outdated: 0.1.0 -> 0.2.0",
    }
    for name in ("attention", "block", "ffn", "rope"):
        assert project.run("check", project.folder, name).code == 1
    assert project.run("check", project.folder, "rmsnorm", "transformer").code == 0
    assert project.run("check", project.folder, "rmsnorm", "--fail-on-edits").code == 1


def test_diff_shows_edits_and_upstream_changes(project, old):
    project.add("attention", "rmsnorm", "--with-tests", upstream=old)
    edit(project.path("attention.py"), LAST, OURS)
    project.path("rmsnorm.py").unlink()
    folder = project.folder
    mine, theirs, both = (
        project.run("diff", folder, *only).out
        for only in (["--mine"], ["--upstream"], [])
    )
    assert both == mine + theirs
    assert f"--- tinyblock 0.1.0: attention.py\n+++ {folder}/attention.py\n@@" in mine
    lines = re.findall(r"^[-+]# (?:last|first) .*", mine, re.MULTILINE)
    assert lines == [f"-{LAST}", f"+{OURS}", f"-{FIRST}", f"-{LAST}"]
    assert theirs.startswith(
        "--- tinyblock 0.1.0: attention.py\n+++ tinyblock 0.2.0: attention.py\n@@"
    )
    changed = [f"-{FIRST}", f"+{FIRST_OF_NEW}"]
    assert (
        re.findall(r"^[-+][\w#].*", theirs, re.MULTILINE) == 3 * changed
    )  # of attention, of the harness, of rope
    assert (
        re.findall(
            r"^[-+][\w#].*", project.run("diff", folder, "rope").out, re.MULTILINE
        )
        == changed
    )


@pytest.mark.parametrize(
    "newline", [b"\n", b"\r\n"]
)  # as git writes them on Windows, the lock file too
def test_update_merges_edits_with_upstream_changes(newline, project, old):
    project.add("attention", "rope", "ffn", upstream=old)
    for path in project.folder.iterdir():
        path.write_bytes(path.read_bytes().replace(b"\n", newline))
    first, last = (
        b"# Ours since 2026." + newline,
        newline + b"a = 1\r" + newline + b"# caf\xe9",
    )
    path = project.path("rope.py")
    path.write_bytes(first + path.read_bytes() + last)
    path.chmod(0o440)
    rows = project.run("update", project.folder).rows
    assert rows == {"attention.py": "updated", "rope.py": "merged with your edits"}
    copied = {
        name: project.original(name).encode().replace(b"\n", newline) for name in rows
    }
    assert path.read_bytes() == first + copied["rope.py"] + last
    assert path.stat().st_mode & 0o777 == 0o440
    assert project.path("attention.py").read_bytes() == copied["attention.py"]
    assert project.run("check", project.folder).rows == {"rope.py": "edited"}
    assert project.run("update", project.folder).out == "4 up to date\n"


def test_update_marks_a_conflict_and_keeps_the_file_before(project, old):
    project.add("attention", "rope", upstream=old)
    conflict = project.path("attention.py")
    edit(conflict, FIRST, "# first = 'ours'")
    project.path("attention.py.orig").write_text("mine")
    edited = conflict.read_bytes()
    done = project.run("update", project.folder)
    assert done.code == project.run("update", project.folder, "--dry-run").code == 1
    message = "conflict markers: resolve them; NAME.orig is the file before"
    assert done.rows == {"attention.py": message, "rope.py": "updated"}
    assert project.path("attention.py.orig").read_text() == "mine"
    assert project.path("attention.py.orig2").read_bytes() == edited
    mine = f"<<<<<<< {conflict.as_posix()}\n# first = 'ours'\n=======\n"
    theirs = f"{FIRST_OF_NEW}\n>>>>>>> tinyblock 0.2.0: attention.py\n"
    marked = conflict.read_text()
    for part in (mine + theirs, mine, theirs):  # half resolved is not resolved
        edit(conflict, mine + theirs, part)
        before = snapshot(project.root)
        for command in (
            ["update", project.folder],
            ["add", "attention", "--to", project.folder],
        ):
            done = project.run(*command)
            assert (done.code, done.rows["attention.py"], snapshot(project.root)) == (
                1,
                message,
                before,
            )
        project.assert_rejected("has edits", "remove", project.folder, "attention")
        conflict.write_text(marked)


def test_update_of_one_layer_includes_its_contract_and_what_these_import(project, old):
    project.add("transformer", "--with-tests", upstream=old)
    expected = {"attention.py", "contract/harness.py"}
    assert project.run(
        "update", project.folder, "attention", "--dry-run"
    ).rows.keys() == expected | {"rope.py"}
    assert project.run("update", project.folder, "rope").rows.keys() == {
        "contract/harness.py",
        "rope.py",
    }
    layers = "rmsnorm, ffn, rope, attention, block, transformer"
    project.assert_rejected(
        f"no copy of 'nothing' in .*; it has {layers}\n",
        "update",
        project.folder,
        "nothing",
    )


def test_update_restores_missing_copies_and_leaves_alone_what_tinyblock_no_longer_has(
    project, old
):
    project.add("attention", "rope", "ffn", upstream=old)
    project.path("rope.py").unlink()
    newer = release(project.root / "newer", "9.0.0rc1")
    edit(newer.root / "attention.py", FIRST, "# newer")
    (newer.root / "ffn.py").unlink()
    ffn = project.path("ffn.py").read_bytes()
    rows = project.run("update", project.folder, upstream=newer).rows
    assert rows == {
        "attention.py": "updated",
        "ffn.py": "no longer in tinyblock, left as it is",
        "rope.py": "copied",
    }
    assert project.path("ffn.py").read_bytes() == ffn
    assert project.run("check", project.folder, upstream=newer) == (
        0,
        "4 pristine\n",
        "",
    )


def test_update_brings_what_the_new_version_imports(project):
    older = release(project.root / "older", "0.1.0")
    edit(older.root / "block.py", "from .rmsnorm import", "import")
    project.add("block", upstream=older)
    project.path("rmsnorm.py").write_text("mine\n")
    for command in (["update"], ["add", "rmsnorm", "--to"]):
        project.assert_rejected(
            r"rmsnorm\.py exists, but is not in tinyblock\.lock: move",
            *command,
            project.folder,
        )
    project.path("rmsnorm.py").unlink()
    assert project.run("update", project.folder).rows["rmsnorm.py"] == "copied"


def test_update_reports_that_git_is_missing_or_fails(project, old, monkeypatch):
    project.add("attention", "rope", upstream=old)
    project.path("rope.py").write_bytes(b"\0binary")
    project.assert_rejected(
        r"git could not merge .*rope\.py: .*binary", "update", project.folder
    )
    monkeypatch.setenv("PATH", "")
    project.assert_rejected(
        r"rope\.py has edits.*install git", "update", project.folder
    )
    assert project.run("update", project.folder, "attention").rows == {
        "attention.py": "updated"
    }


def test_update_finishes_what_a_killed_update_began(project, old):
    project.add("attention", "rope", "ffn", upstream=old)
    edit(project.path("rope.py"), LAST, OURS)
    before = {
        name: project.path(name).read_bytes()
        for name in (LOCK, "rope.py", "attention.py")
    }
    project.run("update", project.folder)
    after = snapshot(project.root)
    for lost in (
        [LOCK],
        [LOCK, "rope.py"],
        [LOCK, "attention.py"],
    ):  # the lock file is the last to be replaced
        for name in lost:
            project.path(name).write_bytes(before[name])
        assert project.run("update", project.folder).code == 0
        assert snapshot(project.root) == after


def test_update_keeps_a_header_that_was_edited(project, old):
    project.add("attention", "rope", upstream=old)
    for name, removed in {
        "rope.py": r"# SPDX.*\n",
        "attention.py": r"#.*\n#.*\n",
    }.items():
        project.path(name).write_text(
            re.sub(removed, "", project.path(name).read_text(), count=1)
        )
        assert project.run("update", project.folder, name.removesuffix(".py")).code == 0
        assert project.path(name).read_text() == re.sub(
            removed, "", project.original(name), count=1
        )


def test_remove_deletes_copies_without_edits(project):
    project.add("block", "rope", "--with-tests")
    project.assert_rejected(
        r"rope\.py is imported by .*attention\.py.*: remove",
        "remove",
        project.folder,
        "rope",
    )
    project.path("rope.py").unlink()
    before = snapshot(project.root)
    remove = ("remove", project.folder, "ffn", "block", "rope", "attention")
    dry = project.run(*remove, "--dry-run")
    assert snapshot(project.root) == before
    names = {
        f"{folder}{layer}.py" for layer in remove[2:] for folder in ("", "contract/")
    }
    assert dry.rows == project.run(*remove).rows == dict.fromkeys(names, "removed")
    assert not names & project.names()
    assert project.run("check", project.folder).code == 0
    project.assert_rejected("no copy of 'ffn'", "remove", project.folder, "ffn")
    edit(project.path("rmsnorm.py"), LAST, OURS)
    project.assert_rejected(
        r"rmsnorm\.py has edits: delete the file yourself",
        "remove",
        project.folder,
        "rmsnorm",
    )
    edit(project.path("rmsnorm.py"), OURS, LAST)
    project.run("remove", project.folder, "rmsnorm")
    assert snapshot(project.folder) == {
        "contract": None
    }  # with the last layer, all that came with it


def test_symbolic_links_are_followed_to_the_folder_and_not_inside(project):
    elsewhere = project.root / "elsewhere"
    project.add("rope", "--with-tests")
    (project.root / "link").symlink_to(project.folder)
    assert project.run("check", project.root / "link").code == 0
    for name in ("rope.py", LOCK, "contract", "contract/rope.py"):
        shutil.move(project.path(name), elsewhere)
        project.path(name).symlink_to(elsewhere)
        for command in (["add", "rope", "--with-tests", "--to"], ["update"]):
            project.assert_rejected(
                "must be a file in .*, got a symbolic link", *command, project.folder
            )
        project.path(name).unlink()
        shutil.move(elsewhere, project.path(name))


@pytest.mark.parametrize(
    "name",
    ["../rope.py", "/etc/rope.py", "contract/../../rope.py", "", "contract/../rope.py"],
)
def test_paths_of_the_lock_file_cannot_leave_the_folder(name, project):
    project.add("rope")
    project.path(LOCK).write_text(
        json.dumps({name: {"version": "0.1.0", "text": "old"}})
    )
    for command in ("check", "update"):
        project.assert_rejected(
            "must be a file in .*, got .* a path out of it", command, project.folder
        )


def test_wrong_folder_or_lock_is_rejected_with_the_fix(project):
    expected = (
        r"there is no tinyblock\.lock in .*: `tinyblock add LAYER --to DIR` writes one"
    )
    project.assert_rejected(expected, "check", project.folder)
    project.add("rope")
    for above in (project.root, project.root.parent):
        project.assert_rejected(f"did you mean {project.folder}", "update", above)
    for command in (["check"], ["add", "ffn", "--to"]):
        project.assert_rejected(
            r"rope\.py is a file: give the folder", *command, project.path("rope.py")
        )
    for content in ("", "[]", '{"rope.py": {}}', "<<<<<<< HEAD\n{}"):
        project.path(LOCK).write_text(content)
        expected = rf"tinyblock\.lock {'has conflict markers' if '<' in content else 'is damaged'}: restore it"
        project.assert_rejected(expected, "update", project.folder)
