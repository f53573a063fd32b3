"""The merge of two texts that come from one: nothing is lost, and what only calls itself git is found out."""

import os
import subprocess

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from vendoring.project import LAST, edit

from tinyblock.vendoring import Refusal
from tinyblock.vendoring.merging import decode, encode, merge, newline_of

LINES = st.lists(st.sampled_from(["a", "b", "c", "", "\tdef f():", "é"]), max_size=8)
LABELS = ("mine", "base", "theirs")


def joined(lines):
    return "".join(f"{line}\n" for line in lines)


@settings(deadline=None, max_examples=15)
@given(parts=st.tuples(LINES, LINES, LINES, LINES))
def test_merge_of_changes_apart_has_both(parts):
    first, mine, second, theirs = map(joined, parts)
    between = joined([f"unchanged {number}" for number in range(5)])
    merged = merge(mine + between + second, first + between + second, first + between + theirs, LABELS)
    assert merged == (mine + between + theirs, False)


@settings(deadline=None, max_examples=15)
@given(base=LINES, mine=LINES, theirs=LINES)
def test_merge_loses_nothing_that_either_side_added(base, mine, theirs):
    assume(mine != theirs)
    mine, theirs = [f"mine {line}" for line in mine], [f"theirs {line}" for line in theirs]
    text, conflicts = merge(joined(mine), joined(base), joined(theirs), LABELS)
    lines = text.splitlines()
    assert [line for line in lines if line.startswith("mine ")] == mine
    assert [line for line in lines if line.startswith("theirs ")] == theirs
    assert conflicts == any(line.startswith("<<<<<<< mine") for line in lines) == (">>>>>>> theirs" in lines)


def test_merge_does_not_depend_on_the_repository_around(tmp_path, monkeypatch):
    texts = ("a\nmine\nz\n", "a\nbase\nz\n", "a\ntheirs\nz\n")
    expected = merge(*texts, LABELS)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))
    for style in ("diff3", "nonsense"):
        subprocess.run(["git", "config", "merge.conflictStyle", style], check=True)
        assert merge(*texts, LABELS) == expected


def test_what_only_calls_itself_git_changes_nothing(project, old, monkeypatch):
    project.add("attention", "rope", upstream=old)
    edit(project.path("rope.py"), LAST, "last = 'ours'")
    git = project.root / "bin" / "git"
    git.parent.mkdir()
    monkeypatch.setenv("PATH", f"{git.parent}{os.pathsep}{os.environ['PATH']}")
    # The arguments 9 to 11 are my text, the base and theirs.
    stubs = ["exit 0", "exit 127", "cat ${9}", "echo install me >&2; exit 1", "cat ${9} ${11}; exit 1", "kill $$"]
    for stub in stubs:
        git.write_text(f"#!/bin/sh\n{stub}\n")
        git.chmod(0o755)
        project.assert_refused(r"git could not merge .*rope\.py: (install me|exit code)", "update", project.folder)
    with pytest.raises(Refusal, match="git could not merge mine"):  # nothing was added that an answer could lack
        merge("", "base\n", "", LABELS)


@given(st.binary(max_size=20) | st.text("\r\na", max_size=20).map(str.encode))
def test_no_byte_is_lost_between_file_and_text(content):
    text, newline = decode(content), newline_of(content)
    if newline == "\n":
        assert encode(text) == content
    else:
        assert encode(text.replace("\n", newline)).replace(b"\r\n", b"\n") == content.replace(b"\r\n", b"\n")
