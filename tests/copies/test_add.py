"""`tinyblock add`: what it writes, and what it leaves as it is."""

import shutil

import pytest

from tinyblock import copies

NOT_A_COPY = "kept, because it is not a copy: "


def test_a_copy_is_a_header_and_the_layer(project):
    header = (
        "# Copied from tinyblock 0.1.0: rope.py\n"
        "# Copyright (c) 2026 The tinyblock authors, MIT license: see LICENSE.tinyblock\n"
        "# flake8: noqa\n"
        "# fmt: off\n"
    )
    layer = (copies.ROOT / "rope.py").read_text()
    assert project.rope.read_text() == header + layer


def test_the_base_of_a_new_copy_is_its_text(project):
    assert project.base("rope.py").read_text() == project.rope.read_text()


def test_add_copies_what_a_layer_imports(empty):
    names = ("attention.py", "block.py", "ffn.py", "rmsnorm.py")
    assert empty.run("add", "block") == dict.fromkeys(names, "copied")


def test_add_copies_the_license(project):
    text = (project.folder / "LICENSE.tinyblock").read_text()
    assert text == (copies.ROOT / "LICENSE").read_text()
    assert text.startswith("MIT")


def test_add_copies_no_tests_unless_asked(empty):
    assert empty.run("add", "rope") == {"rope.py": "copied"}
    assert not (empty.folder / "contract").exists()


def test_add_copies_the_tests_of_a_layer_if_asked(empty):
    rows = empty.run("add", "rope", "--with-tests")
    assert rows["contract/test_rope.py"] == "copied"
    assert (empty.folder / "contract" / "test_rope.py").exists()


def test_a_file_that_has_no_tests_is_copied_with_what_tests_share(empty):
    rows = empty.run("add", "typecheck", "--with-tests")
    assert "contract/conftest.py" in rows
    assert set(rows.values()) == {"copied"}


@pytest.mark.parametrize("name", ["rope", "rope.py", "here/rope.py", "test_rope.py"])
def test_a_layer_is_named_in_any_way(name, empty):
    assert empty.run("add", name) == {"rope.py": "copied"}


def test_add_updates_what_is_a_copy_already(project):
    project.release("0.2.0", rope="# new")
    assert project.run("add", "rope") == {"rope.py": "updated"}


@pytest.mark.parametrize("text", ["# mine\n", ""], ids=["a file", "an empty file"])
def test_another_file_is_never_replaced(text, empty):
    empty.folder.mkdir()
    empty.rope.write_text(text)
    empty.run("add", "rope", code=2)
    assert f"{empty.rope} is not a copy with a base" in empty.printed
    assert empty.rope.read_text() == text


def test_add_writes_nothing_if_it_cannot_write_all(empty):
    empty.folder.mkdir()
    empty.rope.write_text("# mine\n")
    empty.run("add", "ffn", "rope", code=2)
    assert list(empty.folder.iterdir()) == [empty.rope]


def test_a_row_names_a_kept_file_and_what_is_imported_from_it(empty):
    empty.folder.mkdir()
    path = empty.folder / "ffn.py"
    path.write_text("# mine\n")
    rows = empty.run("add", "block")
    assert rows["ffn.py"] == NOT_A_COPY + "block.py imports SwiGLU from it"
    assert path.read_text() == "# mine\n"


def test_a_row_names_each_file_that_imports_a_kept_one(empty):
    empty.folder.mkdir()
    (empty.folder / "rmsnorm.py").write_text("# mine\n")
    rows = empty.run("add", "transformer")
    importers = (
        "block.py imports RMSNorm from it; transformer.py imports RMSNorm from it"
    )
    assert rows["rmsnorm.py"] == NOT_A_COPY + importers


def test_a_kept_folder_is_named_as_a_kept_file_is(empty):
    (empty.folder / "ffn").mkdir(parents=True)
    rows = empty.run("add", "block")
    assert rows["ffn.py"] == NOT_A_COPY + "block.py imports SwiGLU from it"
    assert sorted(path.name for path in empty.folder.glob("ffn*")) == ["ffn"]


def test_update_names_a_kept_file_too(project):
    (project.folder / "typecheck.py").write_text("# mine\n")
    project.release(
        "0.2.0", ffn="from .typecheck import (\n    typecheck as check,  # here\n)"
    )
    rows = project.run("update", "ffn")
    assert rows["typecheck.py"] == NOT_A_COPY + "ffn.py imports typecheck from it"


def test_no_row_names_a_file_that_tinyblock_does_not_have(project):
    project.edit("block.py", "from .rmsnorm", "from .mine")
    (project.folder / "mine.py").write_text("# mine\n")
    names = {"attention.py", "block.py", "ffn.py", "rmsnorm.py", "rope.py"}
    assert set(project.run("update")) == names


def test_an_unedited_file_copied_by_hand_becomes_a_copy(empty):
    empty.folder.mkdir()
    shutil.copy(copies.ROOT / "rope.py", empty.folder)
    assert empty.run("add", "rope") == {"rope.py": "copied"}
    assert empty.run("check") == {}
    assert empty.rope.read_text().startswith("# Copied from tinyblock")


@pytest.mark.parametrize("name", ["block.py", "ffn.py"])  # asked for, and imported
def test_add_completes_an_add_that_was_interrupted_before_a_base(name, empty):
    empty.run("add", "block")
    empty.base(name).unlink()
    assert empty.run("add", "block")[name] == "copied"
    assert empty.run("check") == {}


def test_add_says_how_to_check_shapes(empty):
    empty.run("add", "rope")
    assert f"`tinyblock add typecheck --to '{empty.folder}'`" in empty.printed


def test_add_of_typecheck_says_nothing_more(empty):
    empty.run("add", "rope", "typecheck")
    assert empty.printed.splitlines() == [
        "rope.py       copied",
        "typecheck.py  copied",
    ]
