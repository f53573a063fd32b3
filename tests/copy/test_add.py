"""`tinyblock add`: what it writes, and what it leaves as it is."""

from imports import neighbors_of

LICENSE = "LICENSE.tinyblock"
NOT_A_COPY = "is not a copy with a base"
KEPT = "kept, because it is not a copy with a base"


def with_bases(project, names):
    """Return the contents of a folder of copies as docs/copy.md describes it."""
    copies = {name: project.written(name) for name in names}
    bases = {f".tinyblock/{name}.base": copies[name] for name in names}
    license_text = (project.tinyblock / "LICENSE").read_bytes()
    return copies | bases | {LICENSE: license_text, ".tinyblock/version": b"0.1.0\n"}


def with_crlf(text):
    return text.replace(b"\n", b"\r\n")


def test_add_writes_a_layer_what_it_imports_their_bases_and_the_license(empty):
    names = ["attention.py", "block.py", "ffn.py", "rmsnorm.py"]
    assert empty.rows("add", "block") == dict.fromkeys(names, "copied")
    assert empty.contents() == with_bases(empty, names)


def test_add_with_tests_writes_the_pages_and_what_they_import(empty):
    empty.run("add", "rope", "typecheck", "--with-tests")
    pages = {"conftest", "test_rope"}
    for page in list(pages):
        pages |= neighbors_of(empty.tinyblock / "contract" / f"{page}.py")
    names = ["rope.py", "typecheck.py", *(f"contract/{page}.py" for page in pages)]
    assert empty.contents() == with_bases(empty, names)


def test_add_with_tests_writes_no_tests_if_a_layer_has_none(empty):
    empty.run("add", "typecheck", "--with-tests")
    assert empty.contents() == with_bases(empty, ["typecheck.py"])


def test_a_layer_is_named_in_any_way(empty):
    for name in ("rope", "rope.py", "here/rope.py", "test_rope.py"):
        assert list(empty.rows("add", name)) == ["rope.py"], name


def test_add_updates_what_is_a_copy_already(project):
    project.release("0.2.0", rope="# new")
    assert project.rows("add", "rope") == {"rope.py": "updated"}
    assert project.contents()["rope.py"] == project.written("rope.py")


def test_add_takes_an_unedited_file_as_a_copy(empty):
    """Copied by hand or from a wheel of Windows, or by an `add` without its base."""
    source = (empty.tinyblock / "rope.py").read_bytes()
    written = empty.written("rope.py")
    states = {
        "by hand": (source, written),
        "by hand, with CRLF": (with_crlf(source), with_crlf(written)),
        "without its base": (written, written),
    }
    empty.folder.mkdir(parents=True)
    for title, (before, after) in states.items():
        (empty.folder / "rope.py").write_bytes(before)
        assert empty.rows("add", "rope") == {"rope.py": "copied"}, title
        assert empty.contents()["rope.py"] == after, title
        assert empty.rows("check") == {}, title
        empty.base("rope.py").unlink()


# The user's own ffn.py.
OWN_FILES = {
    "a file": b"class SwiGLU: ...\n",
    "an empty file": b"",
    "a file in another encoding": b"# gr\xfcn\n",
    "a file with our head in its text": b'"""\n# Copied from tinyblock: ffn.py\n"""\n',
    "a copy with an edit, whose base is lost": (
        b"# Copied from tinyblock: ffn.py\n# mine\n"
    ),
}


def test_add_never_replaces_a_file_that_is_not_a_copy(empty):
    empty.folder.mkdir(parents=True)
    (empty.folder / LICENSE).write_text("mine\n")
    for title, text in OWN_FILES.items():
        (empty.folder / "ffn.py").write_bytes(text)
        before = empty.contents()
        assert NOT_A_COPY in empty.run("add", "rope", "ffn", code=2), title
        assert empty.contents() == before, title


def test_add_keeps_a_file_that_a_layer_imports_and_says_so(empty):
    empty.folder.mkdir(parents=True)
    for title, text in OWN_FILES.items():
        (empty.folder / "ffn.py").write_bytes(text)
        assert empty.rows("add", "block")["ffn.py"] == KEPT, title
        contents = empty.contents()
        assert contents["ffn.py"] == text, title
        assert ".tinyblock/ffn.py.base" not in contents, title


def test_add_keeps_a_folder_of_the_name_of_a_layer(empty):
    for name in ("rmsnorm/__init__.py", "ffn/__pycache__/kept_by_git.pyc"):
        (empty.folder / name).parent.mkdir(parents=True)
        (empty.folder / name).touch()
    rows = empty.rows("add", "transformer")
    assert (rows["rmsnorm.py"], rows["ffn.py"]) == (KEPT, "copied")
    assert "rmsnorm.py" not in empty.contents()
