"""`tinyblock diff`: edits and later changes, line by line."""

import io
import re
import sys

import pytest

EDITED = ["-import math", "+import math  # mine"]


def changes(printed):
    """Return the lines of a diff without their context."""
    return re.findall(r"^[-+\\].*", printed, re.MULTILINE)


@pytest.fixture
def edited(project):
    """A copy of rope.py with an edit, and a release with a change of the same file."""
    project.edit("rope.py", "import math\n", "import math  # mine\n")
    project.release("0.2.0", rope="# new")
    return project


def test_mine_shows_the_edits(edited):
    edited.run("diff", "--mine")
    names = ["--- tinyblock 0.1.0: rope.py", f"+++ {edited.rope}"]
    assert changes(edited.printed) == names + EDITED


def test_upstream_shows_later_changes(edited):
    edited.run("diff", "--upstream")
    names = ["--- tinyblock 0.1.0: rope.py", "+++ tinyblock 0.2.0: rope.py"]
    assert changes(edited.printed) == [*names, "+# new"]


def test_without_options_diff_shows_the_edits_and_then_later_changes(edited):
    edited.run("diff", "--mine")
    mine = edited.printed
    edited.run("diff", "--upstream")
    upstream = edited.printed
    edited.run("diff")
    assert edited.printed == mine + upstream


def test_a_new_number_in_the_header_is_no_edit(edited):
    edited.run("update")
    edited.run("diff")
    names = ["--- tinyblock 0.2.0: rope.py", f"+++ {edited.rope}"]
    assert changes(edited.printed) == names + EDITED


def test_a_name_selects_a_layer(edited):
    edited.run("diff", "rope")
    assert "rope.py" in edited.printed
    edited.run("diff", "ffn")
    assert edited.printed == ""


def test_a_missing_copy_shows_no_edits(project):
    project.rope.unlink()
    project.run("diff")
    assert project.printed == ""


def test_a_missing_line_end_at_the_end_is_shown(project):
    text = project.exactly("rope.py").removesuffix("\n")
    project.write("rope.py", text)
    project.run("diff")
    last = text.splitlines()[-1]
    without_end = "\\ No newline at end of file"
    assert changes(project.printed)[2:] == [f"-{last}", f"+{last}", without_end]


def test_a_form_feed_does_not_end_a_line(project):
    project.append("rope.py", "# a page\fand the next")
    project.run("diff")
    assert changes(project.printed)[2:] == ["+# a page\fand the next"]


def test_diff_prints_on_a_console_without_a_letter_of_the_edit(project):
    project.append("rope.py", "# größer ∞")
    output = io.BytesIO()
    console = io.TextIOWrapper(output, encoding="cp1252", write_through=True)
    project.monkeypatch.setattr(sys, "stdout", console)
    project.run("diff")
    assert "+# größer \\u221e" in output.getvalue().decode("cp1252")
