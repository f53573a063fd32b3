"""Copies in real folders: added, edited, outdated, merged, rejected."""

import dataclasses
import io
import json
import os
import re
import signal
import subprocess
import sys

import pytest
from copies.releases import (
    FIRST,
    FIRST_OF_NEW,
    LAST,
    LICENSE,
    LOCK,
    PACKAGE,
    edit,
    snapshot,
)

from tinyblock.copies import main

OURS = "last = 'ours'"
KILL = "count == {} and os.kill(os.getpid(), signal.SIGKILL)"


def changed_lines(patch):
    """Return the lines that a patch removes and adds."""
    return re.findall(r"^[-+](?:first|last) .*", patch, re.MULTILINE)


def test_list_shows_each_layer_with_what_it_needs(project):
    assert project.run("list").out.splitlines() == [
        "norm         Norm",
        "mlp          Mlp",
        "rope         Rope",
        "block        Block (needs mlp, norm)",
        "parallelize  Parallelize",
        "typecheck    Typecheck",
    ]


def test_add_copies_a_layer_and_what_it_imports(project):
    assert project.add("norm").rows == {"norm.py": "copied", LICENSE: "copied"}
    assert project.add("block").rows == {"block.py": "copied", "mlp.py": "copied"}
    assert project.add("block").out == "4 up to date\n"
    for name in project.names():
        source = (project.release.root / name).read_text()
        assert project.path(name).read_text().endswith(f"# fmt: off\n{source}")
    license_ = (project.release.root / "LICENSE").read_text()
    assert project.path(LICENSE).read_text() == license_


def test_add_with_tests_copies_the_tests_of_the_copied_layers(project):
    project.add("block", "--with-tests")
    shared = {"__init__", "checks", "conftest"}
    tests = {"test_block", "test_mlp", "test_norm"}
    expected = {f"contract/{name}.py" for name in shared | tests}
    assert project.names() == {"block.py", "mlp.py", "norm.py"} | expected


def test_add_prints_what_new_copies_need(project):
    assert "\nneeds torch, einops\n" in project.add("norm").out
    done = project.add("block")
    init = project.path("__init__.py")
    hint = f"\nblock.py imports other copies: create {init}, which may be empty\n"
    assert hint in done.out
    assert f"tinyblock add rope --to {project.folder}\n" in done.out
    project.path("block.py").unlink()
    project.path("rope.py").unlink(missing_ok=True)
    init.write_text("")
    assert "create" not in project.add("block", "rope").out
    assert "needs" not in project.add("block").out


def test_add_rejects_an_unknown_layer_with_the_nearest_name(project):
    for layer, expected in {
        "rop": "parallelize, typecheck, got 'rop': did you mean rope?",
        "Mlp": "got 'Mlp': did you mean mlp?",
        "": "LAYER must be one of norm, mlp, rope, block, parallelize, typecheck, got ''\n",
    }.items():
        project.assert_rejected(re.escape(expected), "add", layer, "--to", "x")


def test_add_records_a_file_that_equals_the_original(project):
    project.folder.mkdir()
    for name in ("mlp.py", "norm.py"):
        text = (project.release.root / name).read_text()
        project.path(name).write_text(text)
    edit(project.path("norm.py"), LAST, OURS)
    add = ("add", "block", "--to", project.folder)
    project.assert_rejected(r"norm\.py exists, but is not in .*: move it", *add)
    edit(project.path("norm.py"), OURS, LAST)
    expected = {"mlp.py": "recorded", "norm.py": "recorded"}
    assert project.run(*add).rows.items() >= expected.items()
    assert project.path("norm.py").read_text() == project.original("norm.py")
    assert project.run("check", project.folder).out == "4 pristine\n"


def test_add_keeps_the_comments_of_a_file_that_it_records(project):
    project.folder.mkdir()
    source = (project.release.root / "rope.py").read_text()
    text = f"# Copyright Ann 2025\n# pylint: skip-file\n{source}"
    project.path("rope.py").write_text(text)
    assert project.add("rope").rows["rope.py"] == "recorded, with your edits"
    assert project.path("rope.py").read_text() == text
    assert project.run("check", project.folder).rows == {"rope.py": "edited"}


def test_copies_from_a_newer_tinyblock_are_left_alone(project):
    newer = dataclasses.replace(project.release, version="0.10.0.dev1")
    project.add("rope", release=newer)
    expected = (
        r"the copies are from tinyblock 0\.10\.0\.dev1, newer than the installed "
        r"0\.2\.0: upgrade tinyblock"
    )
    for argv in (["update"], ["check"], ["diff"], ["add", "mlp", "--to"]):
        project.assert_rejected(expected, *argv, project.folder)


def test_change_of_the_header_alone_is_no_change(project):
    project.add("rope")
    url = "https://example.org/layers"
    project.release = dataclasses.replace(project.release, repository=url)
    assert project.run("check", project.folder) == (0, "2 pristine\n", "")
    assert project.run("diff", project.folder).out == ""


def test_check_reports_every_state(project, old):
    project.add("block", "rope", release=old)
    project.add("typecheck", release=old)
    check = ("check", project.folder)
    assert project.run(*check, release=old) == (0, "6 pristine\n", "")
    edit(project.path("norm.py"), LAST, OURS)
    edit(project.path("rope.py"), LAST, OURS)
    project.path("typecheck.py").unlink()
    edit(project.path("block.py"), LAST, f"<<<<<<< HEAD\n{LAST}")
    done = project.run(*check)
    assert (done.code, done.out.splitlines()[-1]) == (1, "1 pristine")
    assert done.rows == {
        "block.py": "conflict markers",
        "mlp.py": "outdated: 0.1.0 -> 0.2.0",
        "norm.py": "edited",
        "rope.py": "edited, outdated: 0.1.0 -> 0.2.0",
        "typecheck.py": "missing",
    }
    for layer in ("block", "mlp", "rope", "typecheck"):
        assert project.run(*check, layer).code == 1
    assert project.run(*check, "norm").code == 0
    assert project.run(*check, "norm", "--fail-on-edits").code == 1


def test_diff_shows_edits_and_changes(project, old):
    project.add("mlp", "norm", "--with-tests", release=old)
    edit(project.path("mlp.py"), LAST, OURS)
    project.path("norm.py").unlink()
    diff = ("diff", project.folder)
    mine = project.run(*diff, "--mine").out
    theirs = project.run(*diff, "--upstream").out
    assert project.run(*diff).out == mine + theirs

    labels = f"--- tinyblock 0.1.0: mlp.py\n+++ {project.path('mlp.py')}\n@@"
    assert labels in mine
    removed = [f"-{FIRST}", f"-{LAST}"]
    assert changed_lines(mine) == [f"-{LAST}", f"+{OURS}", *removed]

    labels = "--- tinyblock 0.1.0: mlp.py\n+++ tinyblock 0.2.0: mlp.py\n@@"
    assert labels in theirs
    changed = [f"-{FIRST}", f"+{FIRST_OF_NEW}"]
    assert changed_lines(theirs) == 2 * changed  # of mlp and the checks
    of_mlp = project.run(*diff, "mlp", "--upstream").out
    assert changed_lines(of_mlp) == changed


def test_diff_can_be_applied_whatever_the_encoding_of_the_terminal(
    project, monkeypatch
):
    source = project.release.root / "typecheck.py"
    source.write_text("# beartype, é, and no newline at the end", encoding="utf-8")
    project.add("typecheck")
    pristine = project.path("typecheck.py").read_bytes()
    edited = pristine.replace(b"beartype", b"nothing")
    project.path("typecheck.py").write_bytes(edited)
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(["diff", str(project.folder)], project.release) == 0
    patch = terminal.buffer.getvalue()
    patch = re.sub(rb"(?m)^(---|\+\+\+) .*$", rb"\1 a/copy.py", patch)
    (project.root / "copy.py").write_bytes(pristine)
    subprocess.run(["git", "apply", "-"], input=patch, cwd=project.root, check=True)
    assert (project.root / "copy.py").read_bytes() == edited


def test_update_merges_edits_with_changes(project, old):
    project.add("mlp", "rope", "norm", release=old)
    path = project.path("rope.py")
    edit(path, LAST, OURS)
    edit(project.path("norm.py"), LAST, OURS)
    path.chmod(0o440)
    done = project.run("update", project.folder)
    assert (done.code, done.rows) == (
        0,
        {
            "mlp.py": "updated",
            "norm.py": "edited, kept",
            "rope.py": "merged with your edits",
        },
    )
    assert path.read_text() == project.original("rope.py").replace(LAST, OURS)
    assert path.stat().st_mode & 0o777 == 0o440
    assert project.path("mlp.py").read_text() == project.original("mlp.py")
    edited = {"norm.py": "edited", "rope.py": "edited"}
    assert project.run("check", project.folder).rows == edited
    kept = {"norm.py": "edited, kept", "rope.py": "edited, kept"}
    assert project.run("update", project.folder).rows == kept


def test_update_keeps_line_endings_and_bytes_that_are_no_text(project, old):
    project.add("mlp", "rope", release=old)
    for path in project.folder.iterdir():  # as git writes them on Windows
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    first, last = b"# Ours.\r\n", b"a = 1\r\r\n# caf\xe9"
    path = project.path("rope.py")
    path.write_bytes(first + path.read_bytes() + last)
    rows = project.run("update", project.folder).rows
    assert rows == {"mlp.py": "updated", "rope.py": "merged with your edits"}
    rope = project.original("rope.py").encode().replace(b"\n", b"\r\n")
    assert path.read_bytes() == first + rope + last
    mlp = project.original("mlp.py").encode().replace(b"\n", b"\r\n")
    assert project.path("mlp.py").read_bytes() == mlp


def test_update_marks_a_conflict_and_shows_its_base(project, old):
    project.add("mlp", "rope", release=old)
    path = project.path("mlp.py")
    edit(path, FIRST, "first = 'ours'")
    done = project.run("update", project.folder)
    message = "conflict markers: resolve them"
    assert (done.code, done.rows["mlp.py"]) == (1, message)
    marked = path.read_text()
    ours = "<<<<<<< .*mlp.py\nfirst = 'ours'\n"
    base = "[|]{7} tinyblock 0.1.0: mlp.py\n"
    theirs = ">>>>>>> tinyblock 0.2.0: mlp.py\n"
    pattern = f"{ours}{base}{FIRST}\n=======\n{re.escape(FIRST_OF_NEW)}\n{theirs}"
    assert re.search(pattern, marked)
    for command in (["update"], ["add", "mlp", "--to"]):
        again = project.run(*command, project.folder)
        assert (again.code, again.rows["mlp.py"]) == (1, message)
        assert path.read_text() == marked
    assert project.run("check", project.folder).rows["mlp.py"] == "conflict markers"
    resolve(path)
    assert project.run("check", project.folder).rows["mlp.py"] == "edited"


def test_update_of_one_layer_includes_its_test_and_what_these_import(project, old):
    project.add("block", "rope", "--with-tests", release=old)
    update = ("update", project.folder)
    assert project.run(*update, "norm").rows.keys() == {"contract/checks.py"}
    assert project.run(*update, "rope").rows.keys() == {"rope.py"}
    assert project.run(*update, "block").rows.keys() == {"mlp.py"}
    expected = (
        r"LAYER must be .* copies in .* \(norm, mlp, rope, block\), got 'nothing'\n"
    )
    project.assert_rejected(expected, *update, "nothing")


def test_update_restores_missing_copies_and_keeps_those_that_tinyblock_lacks(
    project, old
):
    project.add("mlp", "rope", release=old)
    project.path("rope.py").unlink()
    mlp = project.path("mlp.py").read_text()
    (project.release.root / "mlp.py").unlink()
    rows = project.run("update", project.folder).rows
    kept = "no longer in tinyblock: delete it, and its entry in tinyblock.lock"
    assert rows == {"mlp.py": kept, "rope.py": "copied"}
    assert project.path("mlp.py").read_text() == mlp
    assert project.run("check", project.folder) == (0, "3 pristine\n", "")


def test_update_brings_what_the_new_version_imports(project, old):
    edit(old.root / "block.py", "from .norm import Norm\n", "")
    project.add("block", release=old)
    project.path("norm.py").write_text("mine\n")
    expected = r"norm\.py exists, but is not in tinyblock\.lock: move"
    project.assert_rejected(expected, "update", project.folder)
    project.path("norm.py").unlink()
    assert project.run("update", project.folder).rows["norm.py"] == "copied"


def test_update_brings_nothing_that_an_edited_copy_no_longer_imports(project):
    project.add("block")
    edit(project.path("block.py"), "from .mlp import Mlp", "from .own import Mlp")
    project.path("mlp.py").unlink()
    lock = json.loads(project.path(LOCK).read_text())
    del lock["mlp.py"]
    project.path(LOCK).write_text(json.dumps(lock))
    assert project.run("update", project.folder).rows == {"block.py": "edited, kept"}
    assert not project.path("mlp.py").exists()


def test_update_leaves_a_file_alone_that_only_an_edit_imports(project):
    project.add("norm")
    edit(project.path("norm.py"), LAST, "from .rope import Rope")
    project.path("rope.py").write_text("mine\n")
    for command in (["update"], ["add", "norm", "--to"]):
        done = project.run(*command, project.folder)
        assert (done.code, done.rows) == (0, {"norm.py": "edited, kept"})
    assert project.path("rope.py").read_text() == "mine\n"


def test_update_reports_that_git_is_missing_or_fails(project, old, monkeypatch):
    project.add("mlp", "rope", release=old)
    update = ("update", project.folder)
    project.path("rope.py").write_bytes(b"\0binary")
    project.assert_rejected(r"git could not merge .*rope\.py: .*binary", *update)
    monkeypatch.setenv("PATH", "")
    project.assert_rejected(r"rope\.py has edits.*install git", *update)
    assert project.run(*update, "mlp").rows == {"mlp.py": "updated"}


@pytest.mark.parametrize(
    "removed", [r"# SPDX.*\n", r"(#.*\n)+"], ids=["one line", "all lines"]
)
def test_update_keeps_a_header_that_was_edited(removed, project, old):
    project.add("rope", release=old)
    path = project.path("rope.py")
    edited = re.sub(removed, "", path.read_text(), count=1)
    path.write_text(edited)
    assert project.run("update", project.folder).code == 0
    original = project.original("rope.py")
    assert path.read_text() == re.sub(removed, "", original, count=1)


def test_lock_of_the_present_format_is_read(project):
    header = "# Copied from tinyblock 0.1.0: rope.py (license: LICENSE.tinyblock)\n"
    header += "# SPDX-License-Identifier: MIT\n"
    source = (project.release.root / "rope.py").read_text()
    text = header + source.replace(FIRST_OF_NEW, FIRST)
    project.folder.mkdir()
    project.path("rope.py").write_text(text.replace(LAST, OURS))
    gone = {"version": "0.1.0", "text": "x = 1\n"}
    project.path("contract").mkdir()
    project.path("contract/harness.py").write_text(gone["text"])
    entries = {
        "contract/harness.py": gone,
        "rope.py": {"version": "0.1.0", "text": text},
    }
    project.path(LOCK).write_text(json.dumps(entries, indent=1) + "\n")
    assert project.run("update", project.folder).rows == {
        "contract/harness.py": "no longer in tinyblock: delete it, and its entry in tinyblock.lock",
        "rope.py": "merged with your edits",
    }
    expected = project.original("rope.py").replace(LAST, OURS)
    assert project.path("rope.py").read_text() == expected


@pytest.mark.parametrize(
    "name",
    ["../rope.py", "/etc/rope.py", "contract/../../rope.py", "", "link/rope.py"],
)
def test_no_path_of_the_lock_leads_out_of_the_folder(name, project):
    project.add("rope")
    project.path("link").symlink_to(project.root)
    entries = {name: {"version": "0.1.0", "text": "old"}}
    project.path(LOCK).write_text(json.dumps(entries))
    for command in ("check", "update"):
        project.assert_rejected("must be in .*, got", command, project.folder)


def test_folder_may_be_a_symbolic_link(project):
    project.add("rope")
    (project.root / "link").symlink_to(project.folder)
    assert project.run("add", "mlp", "--to", project.root / "link").code == 0
    assert project.run("check", project.folder).out == "3 pristine\n"


def test_wrong_folder_or_lock_is_rejected_with_the_fix(project):
    expected = r"there is no tinyblock\.lock in .*: `tinyblock add LAYER --to DIR`"
    project.assert_rejected(expected, "check", project.folder)
    project.add("rope")
    for above in (project.root, project.root.parent):
        project.assert_rejected(f"did you mean {project.folder}", "update", above)
    for command in (["check"], ["add", "mlp", "--to"]):
        expected = r"rope\.py is a file: give the folder"
        project.assert_rejected(expected, *command, project.path("rope.py"))
    for content in ("", "[]", '{"rope.py": {}}', '{"rope.py": 1}', "{"):
        project.path(LOCK).write_text(content)
        expected = r"tinyblock\.lock is damaged: restore it"
        project.assert_rejected(expected, "update", project.folder)
    project.path(LOCK).write_text("<<<<<<< HEAD\n{}")
    expected = r"tinyblock\.lock has conflict markers: restore it"
    project.assert_rejected(expected, "update", project.folder)


def test_update_stops_before_a_file_that_another_program_changed(
    project, old, monkeypatch
):
    project.add("mlp", "rope", release=old)
    replace = os.replace
    path = project.path("rope.py")

    def replace_and_save(source, target):
        if target.name == "mlp.py":
            path.write_text(path.read_text() + OURS)
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace_and_save)
        done = project.run("update", project.folder)
    expected = r"rope\.py was changed by another program: run the command again\n"
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert re.search(expected, done.err)
    assert path.read_text().endswith(OURS)
    assert project.run("update", project.folder).code == 0
    assert path.read_text() == project.original("rope.py") + OURS


def interrupt_at(name, monkeypatch):
    """Let Ctrl-C end a command just before it replaces this file."""
    replace = os.replace

    def interrupt_or_replace(source, target):
        if target.name == name:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", interrupt_or_replace)


def resolve(path):
    """Replace a conflict by our version."""
    text, conflicts = re.subn(r"<{7}(.|\n)*>{7}.*\n", f"{OURS}\n", path.read_text())
    assert conflicts == 1
    path.write_text(text)


@pytest.mark.parametrize("version", ["0.2.0", "0.1.0"])
def test_repeated_update_completes_an_interrupted_conflict(
    version, project, old, monkeypatch
):
    """Also if both versions have the same number, as between two releases."""
    project.add("mlp", release=old)
    project.release = dataclasses.replace(project.release, version=version)
    path = project.path("mlp.py")
    edit(path, FIRST, "first = 'ours'")
    update = ("update", project.folder)
    with monkeypatch.context() as patch:
        interrupt_at(LOCK, patch)
        assert project.run(*update, "mlp").code == 130
    marked = path.read_text()
    assert project.run(*update).code == 1
    assert path.read_text() == marked
    resolve(path)
    assert project.run(*update) == (0, "mlp.py  edited, kept\n1 up to date\n", "")


def test_conflict_that_was_resolved_before_the_repeated_update_does_not_return(
    project, old, monkeypatch
):
    project.add("mlp", release=old)
    path = project.path("mlp.py")
    edit(path, FIRST, "first = 'ours'")
    update = ("update", project.folder)
    with monkeypatch.context() as patch:
        interrupt_at(LOCK, patch)
        assert project.run(*update, "mlp").code == 130
    resolve(path)
    resolved = path.read_text()
    assert project.run("check", project.folder).rows == {"mlp.py": "edited"}
    assert project.run(*update).code == 0
    assert path.read_text() == resolved
    entry = json.loads(project.path(LOCK).read_text())["mlp.py"]
    assert entry == {"version": "0.2.0", "text": project.original("mlp.py")}


@pytest.mark.parametrize("killed_at", range(1, 6))
def test_repeated_add_completes_one_that_was_killed(killed_at, project):
    add = ("add", "rope", "mlp", "--to", project.folder)
    killed = project.start(*add, before_replace=KILL.format(killed_at))
    assert killed.wait() == -signal.SIGKILL
    assert project.run(*add).code == 0
    assert project.run("check", project.folder).out == "3 pristine\n"


@pytest.mark.parametrize("killed_at", range(1, 6))
def test_repeated_update_completes_one_that_was_killed(killed_at, project, old):
    project.add("rope", "mlp", release=old)
    edit(project.path("rope.py"), LAST, OURS)
    before = snapshot(project.folder)
    update = ("update", project.folder)
    killed = project.start(*update, before_replace=KILL.format(killed_at))
    assert killed.wait() == -signal.SIGKILL
    updated = {
        "mlp.py": project.original("mlp.py").encode(),
        "rope.py": project.original("rope.py").replace(LAST, OURS).encode(),
    }
    for name, content in updated.items():
        assert project.path(name).read_bytes() in (before[name], content)
    assert project.run(*update).code == 0
    after = snapshot(project.folder)
    assert after.items() >= updated.items()
    assert after.keys() == {*updated, LOCK, LICENSE}  # no temporary file


def test_interrupted_command_leaves_whole_files(project, old, monkeypatch):
    project.add("mlp", "rope", release=old)
    before = project.path("rope.py").read_bytes()
    with monkeypatch.context() as patch:
        interrupt_at("rope.py", patch)
        done = project.run("update", project.folder)
    assert done == (130, "", "tinyblock: interrupted\n")
    assert project.path("rope.py").read_bytes() == before
    outdated = {"rope.py": "outdated: 0.1.0 -> 0.2.0"}  # the lock has the others
    assert project.run("check", project.folder).rows == outdated
    assert project.run("update", project.folder).rows == {"rope.py": "updated"}
    assert project.run("check", project.folder).out == "3 pristine\n"


def test_commands_in_the_same_folder_take_turns(project):
    slow = "time.sleep(0.05)"
    started = [
        project.start("add", layer, "--to", project.folder, before_replace=slow)
        for layer in ("norm", "mlp", "rope", "typecheck")
    ]
    assert [process.wait() for process in started] == [0, 0, 0, 0]
    assert project.run("check", project.folder).out == "5 pristine\n"


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["unknown", "x"],
        ["add", "rope"],
        ["add", "rope", "--to", ""],
        ["diff", "x", "--mine", "--upstream"],
    ],
)
def test_wrong_usage_is_rejected_in_one_line(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        main(argv)
    out, err = capsys.readouterr()
    assert (stop.value.code, out, err.count("\n")) == (2, "", 1)


def test_closed_output_is_no_error(project, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(["list"], project.release) == 141


def test_command_imports_the_standard_library_only():
    for name in ("copies.py", "__main__.py"):
        text = (PACKAGE / name).read_text(encoding="utf-8")
        imported = re.findall(r"^ *(?:from|import) ([a-z]\w*)", text, re.MULTILINE)
        assert set(imported) <= sys.stdlib_module_names
