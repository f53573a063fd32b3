"""Copied pages run in a project's own pytest, and change nothing of its other tests."""

import re

import pytest
from defects import replace
from forked import run_pytest

from tinyblock import copies

OF_THE_PROJECT = """
from conftest import helper

def test_last():
    assert helper() == "of the project"

def test_first():
    pass

def test_equation():
    pass
"""
ORDER = ["test_last", "test_first", "test_equation"]
STRICT = ["--strict-markers", "--strict-config", "-W", "error"]
# One page in each case is enough, and no compilation, which takes long.
FEW = ["-k", "test_last or test_first or (test_equation and not 64 and not 16)"]


@pytest.fixture
def project(tmp_path):
    """A project whose own tests import its conftest.py, before and after the layers."""
    (tmp_path / "conftest.py").write_text(
        "def helper():\n    return 'of the project'\n"
    )
    for name in ("a_tests", "z_tests"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"test_{name}.py").write_text(OF_THE_PROJECT)
    return tmp_path


def add(folder, *layers):
    assert copies.main(["add", *layers, "--with-tests", "--to", str(folder)]) == 0


def leave_conftest_alone(project):
    """Let no test import conftest.py, which pytest does not support in mode importlib."""
    for name in ("a_tests", "z_tests"):
        path = project / name / f"test_{name}.py"
        replace(path, "from conftest import helper", "helper = 'of the project'.strip")


def run(project, *options):
    """Require the project's own tests to pass, and return the outcomes of the pages."""
    arguments = [*STRICT, *FEW, "-v", *options]
    _, printed = run_pytest(*arguments, folder=project, without=["tinyblock"])
    assert "error" not in printed.splitlines()[-1], printed
    found = re.findall(
        r"^([^\s:]+)::(\S+) (PASSED|FAILED|SKIPPED)", printed, re.MULTILINE
    )
    for name in ("a_tests", "z_tests"):
        own = [(test, outcome) for page, test, outcome in found if name in page]
        assert own == [(test, "PASSED") for test in ORDER], printed
    return {
        (page, outcome) for page, _, outcome in found if "contract" in page
    }, printed


@pytest.mark.parametrize("mode", ["prepend", "importlib"])
def test_two_contracts_in_folders_without_init(project, mode):
    add(project / "b" / "layers", "rope")
    add(project / "c" / "layers", "rope", "rmsnorm")
    if mode == "importlib":
        leave_conftest_alone(project)
    pages, printed = run(project, f"--import-mode={mode}")
    assert pages == {
        ("b/layers/contract/test_rope.py", "PASSED"),
        ("c/layers/contract/test_rmsnorm.py", "PASSED"),
        ("c/layers/contract/test_rope.py", "PASSED"),
    }, printed


@pytest.mark.parametrize("mode", ["prepend", "importlib"])
def test_a_contract_in_a_package(project, mode):
    folder = project / "mine" / "layers"
    add(folder, "rope")
    for package in (folder, folder.parent):
        (package / "__init__.py").touch()
    if mode == "importlib":
        leave_conftest_alone(project)
    pages, printed = run(project, f"--import-mode={mode}")
    assert pages == {("mine/layers/contract/test_rope.py", "PASSED")}, printed


def test_a_layer_that_cannot_be_imported_fails_in_its_own_page(project):
    folder = project / "layers"
    add(folder, "rope", "rmsnorm")
    (folder / "rope.py").write_text("import no_such_package\n")
    (folder / "attention.py").write_text("import no_such_package\n")
    pages, printed = run(project)
    assert pages == {
        ("layers/contract/test_rope.py", "FAILED"),
        ("layers/contract/test_rmsnorm.py", "PASSED"),
    }, printed


def test_a_layer_that_is_missing_is_skipped(project):
    folder = project / "layers"
    add(folder, "rope", "rmsnorm")
    (folder / "rope.py").unlink()
    pages, printed = run(project)
    assert ("layers/contract/test_rope.py", "SKIPPED") in pages, printed
    assert ("layers/contract/test_rmsnorm.py", "PASSED") in pages, printed


def test_a_copied_typecheck(project):
    add(project / "layers", "typecheck")
    pages, printed = run(project)
    assert not pages, printed


def test_a_layer_of_ones_own_beside_copies(project):
    """The promises of tinyblock are skipped, and no test is reordered."""
    folder = project / "layers"
    add(folder, "rope", "rmsnorm")
    (folder / ".tinyblock" / "rope.py.base").unlink()
    pages, printed = run(
        project, "-k", "project or test_first or test_last or equation"
    )
    assert ("layers/contract/test_rope.py", "SKIPPED") in pages, printed
    assert ("layers/contract/test_rope.py", "PASSED") in pages, printed


def test_doctests_of_the_project(project):
    add(project / "layers", "rope")
    pages, printed = run(project, "--doctest-modules")
    assert pages == {("layers/contract/test_rope.py", "PASSED")}, printed


def test_a_copy_has_no_names_of_mistakes(tmp_path):
    add(tmp_path, "rope", "attention", "block", "transformer")
    files = {path.name for path in (tmp_path / "contract").iterdir()}
    pages = {"rope", "attention", "block", "transformer", "rmsnorm", "ffn"}
    shared = {"checks.py", "conftest.py", "every_layer.py", "target.py"}
    assert files == {f"test_{page}.py" for page in pages} | shared
