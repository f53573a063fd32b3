"""What can be copied, and which files come along."""

import re

import pytest
from vendoring.project import PACKAGE, release

from tinyblock.vendoring import CommandError
from tinyblock.vendoring.catalogue import NAMES, Upstream

HARNESS = {f"contract/{name}.py" for name in ("__init__", "test_contract", "harness")}


def test_list_describes_each_layer_in_one_line(project):
    out = project.run("list").out
    assert "rope         The rope\n" in out
    assert "transformer  The transformer (needs block, rope)\n" in out  # block needs the others
    done = project.run("list", upstream=Upstream())
    assert tuple(done.rows) == NAMES
    assert all(20 < len(line) <= 100 for line in done.out.splitlines())


@pytest.mark.parametrize(
    ("layer", "imported", "with_tests"),
    [
        ("rmsnorm", (), ()),
        ("attention", (), ("rope",)),  # whose contract is imported by that of attention
        ("block", ("attention", "ffn", "rmsnorm"), ("rope",)),
        ("transformer", ("attention", "block", "ffn", "rmsnorm", "rope"), ()),
    ],
)
def test_layer_comes_with_its_imports_and_with_its_contract_if_asked(layer, imported, with_tests, new):
    assert new.with_imports([f"{layer}.py"]) == sorted(f"{name}.py" for name in (layer, *imported))
    tested = {layer, *imported, *with_tests}
    expected = {f"{name}.py" for name in tested} | {f"contract/{name}.py" for name in tested} | HARNESS
    found = new.with_imports([f"{layer}.py"], with_tests=True)
    assert found == sorted(expected, key=lambda name: ("/" in name, name))


def test_contract_may_import_from_the_folder_above(tmp_path):
    changed = {"contract/ffn.py": "from ..typecheck import typecheck\nfrom .. import rope, nothing\n"}
    found = release(tmp_path / "above", "1.0", changed).with_imports(["ffn.py"], with_tests=True)
    assert {*found} - HARNESS == {"ffn.py", "contract/ffn.py", "typecheck.py", "rope.py", "contract/rope.py"}


@pytest.mark.parametrize("layer", NAMES)
def test_copies_of_this_tinyblock_import_no_file_that_is_left_behind(layer, project):
    project.add(layer, "--with-tests", upstream=Upstream())
    for name in project.names():
        text = project.path(name).read_text(encoding="utf-8")
        assert not re.search(r"^(from|import) tinyblock", text, re.MULTILINE)
        for dots, module, imported in re.findall(r"^ *from (\.+)(\w*) import (.*)", text, re.MULTILINE):
            folder = (PACKAGE / name).parents[len(dots) - 1]
            paths = [folder / f"{stem}.py" for stem in ([module] if module else imported.split(", "))]
            assert {path.relative_to(PACKAGE).as_posix() for path in paths if path.is_file()} <= project.names()


def test_unknown_layer_is_rejected_with_the_nearest_name():
    for asked, expected in {
        "rop": "no layer 'rop': did you mean rope",
        "SwiGLU": "did you mean ffn",
        "rms_norm": "did you mean rmsnorm",
        "": "choose from rmsnorm, ffn",
    }.items():
        with pytest.raises(CommandError, match=expected):
            Upstream().layer(asked)


def test_license_of_the_package_is_that_of_the_project():
    assert (PACKAGE / "LICENSE").read_bytes() == (PACKAGE.parent / "LICENSE").read_bytes()
