"""Copies keep their line ends and all else that an editor gave them."""

import pytest

from tinyblock import copies


def to_crlf(project):
    """Give every file of the folder CRLF, as git does on Windows."""
    for path in project.folder.rglob("*.*"):
        if path.is_file():
            path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))


def all_end_with_crlf(text):
    return text.count("\n") == text.count("\r\n") > 0


@pytest.fixture
def crlf(project):
    """Copies with CRLF, rope.py with an edit and a later change, and ffn.py unedited."""
    to_crlf(project)
    project.edit("rope.py", "import math\r\n", "import math  # mine\r\n")
    project.release("0.2.0", rope="# new", ffn="# new")
    return project


def test_crlf_is_no_edit(project):
    to_crlf(project)
    assert project.run("check") == {}


def test_diff_shows_an_edit_of_a_copy_with_crlf_alone(crlf):
    crlf.run("diff", "rope", "--mine")
    changed = [line for line in crlf.printed.splitlines() if line[0] in "-+"]
    assert changed[2:] == ["-import math", "+import math  # mine"]


@pytest.mark.parametrize("name", ["rope.py", "ffn.py"])
def test_an_updated_copy_keeps_crlf(name, crlf):
    crlf.run("update")
    text = crlf.exactly(name)
    assert all_end_with_crlf(text)
    assert text.count("# new\r\n") == 1


def test_a_merge_keeps_the_edit_of_a_copy_with_crlf(crlf):
    crlf.run("update")
    assert crlf.exactly("rope.py").count("import math  # mine\r\n") == 1
    assert crlf.run("check") == {"rope.py": "edited"}


def test_a_base_and_the_license_keep_crlf(crlf):
    crlf.run("update")
    assert all_end_with_crlf(crlf.base("rope.py").read_bytes().decode())
    assert all_end_with_crlf(crlf.exactly("LICENSE.tinyblock"))


def test_a_restored_copy_has_the_line_ends_of_its_base(crlf):
    (crlf.folder / "ffn.py").unlink()
    crlf.run("update", "ffn")
    assert all_end_with_crlf(crlf.exactly("ffn.py"))


def test_a_file_copied_by_hand_keeps_crlf(empty):
    empty.folder.mkdir()
    text = (copies.ROOT / "rope.py").read_bytes()
    empty.rope.write_bytes(text.replace(b"\n", b"\r\n"))
    assert empty.run("add", "rope") == {"rope.py": "copied"}
    assert all_end_with_crlf(empty.exactly("rope.py"))


def test_a_conflict_has_crlf_in_the_markers_too(project):
    to_crlf(project)
    project.append("rope.py", "# mine\r")
    project.release("0.2.0", rope="# new")
    project.run("update", code=1)
    assert all_end_with_crlf(project.exactly("rope.py"))
    assert "<<<<<<< yours\r\n# mine\r\n" in project.exactly("rope.py")


def test_an_edit_with_other_line_ends_keeps_them(project):
    project.edit("rope.py", "import math\n", "import math\r\nimport os\r\n")
    project.release("0.2.0", rope="# new")
    project.run("update")
    text = project.exactly("rope.py")
    assert text.count("\r\n") == 2
    assert "import math\r\nimport os\r\n" in text
    assert text.endswith("# new\n")


def test_a_byte_order_mark_stays(project):
    project.write("rope.py", "\ufeff" + project.exactly("rope.py"))
    project.release("0.2.0")
    path = copies.ROOT / "rope.py"  # with a change of the line below the header
    path.write_text(path.read_text().replace('"""Rotary', '"""New: rotary', 1))
    project.run("update")
    assert project.exactly("rope.py").startswith("\ufeff# Copied from tinyblock 0.2.0")
    assert project.run("check") == {"rope.py": "edited"}


def test_a_missing_line_end_at_the_end_stays_missing(project):
    project.write("rope.py", project.exactly("rope.py")[:-1])
    project.release("0.2.0")
    path = copies.ROOT / "rope.py"
    path.write_text(path.read_text().replace("import math\n", "import math  # new\n"))
    project.run("update")
    text = project.exactly("rope.py")
    assert "import math  # new\n" in text
    assert not text.endswith("\n")


@pytest.mark.parametrize("name", ["rope.py", ".tinyblock/rope.py.base"])
@pytest.mark.parametrize("command", ["check", "diff", "update"])
def test_an_error_names_a_file_that_is_not_utf_8(command, name, project):
    path = project.folder / name
    text = path.read_bytes() + b"# gr\xfc\xdfer\n"
    path.write_bytes(text)
    project.run(command, code=2)
    where = f"the byte 0xfc at {text.index(0xFC)}: "
    assert f"error: {path} must be text in UTF-8, got {where}" in project.printed


def test_an_error_names_a_file_of_the_users_that_is_not_utf_8(empty):
    empty.folder.mkdir()
    (empty.folder / "ffn.py").write_bytes(b"\xff\xfe#\0")
    empty.run("add", "block", code=2)
    assert f"error: {empty.folder / 'ffn.py'} must be text in UTF-8" in empty.printed
    assert not (empty.folder / "block.py").exists()
