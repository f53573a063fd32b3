"""What can be copied, and which files come along."""

import re

import pytest
from vendoring.project import PACKAGE

from tinyblock.vendoring import CommandError
from tinyblock.vendoring.catalogue import NAMES, Upstream


def test_layer_comes_with_its_imports_and_with_its_contract_if_asked(new):
    assert new.with_imports(["rmsnorm.py"]) == ["rmsnorm.py"]
    assert new.with_imports(["block.py"]) == [
        "attention.py",
        "block.py",
        "ffn.py",
        "rmsnorm.py",
    ]
    names = (
        "__init__",
        "attention",
        "harness",
        "loading",
        "rmsnorm",
        "rope",
        "test_contract",
    )
    expected = [
        "attention.py",
        "rmsnorm.py",
        "rope.py",
        *(f"contract/{name}.py" for name in names),
    ]
    assert new.with_imports(["attention.py"], with_tests=True) == expected


@pytest.mark.parametrize("layer", NAMES)
def test_copies_of_this_tinyblock_import_no_file_that_is_left_behind(layer, project):
    project.add(layer, "--with-tests")
    for name in project.names():
        text = project.path(name).read_text(encoding="utf-8")
        assert not re.search(r"^(from|import) tinyblock", text, re.MULTILINE)
        for module, imported in re.findall(
            r"^ *from \.(\w*) import (.*)", text, re.MULTILINE
        ):
            paths = [
                (PACKAGE / name).with_name(f"{stem}.py")
                for stem in (module or imported).split(", ")
            ]
            assert {
                path.relative_to(PACKAGE).as_posix() for path in paths if path.is_file()
            } <= project.names()


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
    assert (PACKAGE / "LICENSE").read_bytes() == (
        PACKAGE.parent / "LICENSE"
    ).read_bytes()
