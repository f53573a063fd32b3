"""Copied pages run in a project's own pytest, and change nothing of its other tests."""

import collections
import re

import pytest
from edits import replace
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
# The equation is enough, and no compilation, which takes long.
FEW = ["-k", "test_last or test_first or (test_equation and not 64 and not 16)"]
# The outcomes of each page.
OUTCOMES = {
    "b/layers/contract/test_rope.py": {"PASSED"},
    "broken/contract/test_rmsnorm.py": {"PASSED"},
    "broken/contract/test_rope.py": {"FAILED"},
    "missing/contract/test_rmsnorm.py": {"PASSED"},
    "missing/contract/test_rope.py": {"SKIPPED"},
    "of_ones_own/contract/test_rmsnorm.py": {"PASSED"},
    # Without the promises of tinyblock.
    "of_ones_own/contract/test_rope.py": {"PASSED", "SKIPPED"},
    "package/layers/contract/test_rope.py": {"PASSED"},
}


def add(folder, *layers):
    assert copies.main(["add", *layers, "--with-tests", "--to", str(folder)]) == 0


def add_own_tests(project):
    """Add tests that import the project's conftest.py, before and after the layers."""
    (project / "conftest.py").write_text("def helper():\n    return 'of the project'\n")
    for name in ("a_tests", "z_tests"):
        (project / name).mkdir()
        (project / name / f"test_{name}.py").write_text(OF_THE_PROJECT)


def run(project, *options):
    """Require the project's own tests to pass, and return the outcomes of each page."""
    arguments = [*STRICT, *FEW, "-v", *options]
    _, printed = run_pytest(*arguments, folder=project, without=["tinyblock"])
    assert "error" not in printed.splitlines()[-1], printed
    found = re.findall(
        r"^([^\s:]+)::(\S+) (PASSED|FAILED|SKIPPED)", printed, re.MULTILINE
    )
    outcomes = collections.defaultdict(set)
    own = collections.defaultdict(list)
    for page, test, outcome in found:
        if "contract" in page:
            outcomes[page].add(outcome)
        else:
            own[page].append((test, outcome))
    passed = [(test, "PASSED") for test in ORDER]
    assert own == {
        "a_tests/test_a_tests.py": passed,
        "z_tests/test_z_tests.py": passed,
    }, printed
    return outcomes


@pytest.mark.parametrize("mode", ["prepend", "importlib"])
def test_contracts_leave_a_project_and_each_other_alone(mode, tmp_path):
    """In folders with and without __init__.py, beside what stopped the project's tests."""
    add_own_tests(tmp_path)
    if mode == "importlib":  # pytest does not support an import of conftest.py in it
        for page in tmp_path.glob("*/test_*.py"):
            own = "helper = 'of the project'.strip"
            replace(page, "from conftest import helper", own)
    add(tmp_path / "b" / "layers", "rope")
    add(tmp_path / "broken", "rope", "rmsnorm", "typecheck")
    for layer in ("rope", "attention"):
        (tmp_path / "broken" / f"{layer}.py").write_text("import no_such_package\n")
    add(tmp_path / "missing", "rope", "rmsnorm")
    (tmp_path / "missing" / "rope.py").unlink()
    add(tmp_path / "of_ones_own", "rope", "rmsnorm")
    (tmp_path / "of_ones_own" / ".tinyblock" / "rope.py.base").unlink()
    add(tmp_path / "package" / "layers", "rope")
    for package in ("package", "package/layers"):
        (tmp_path / package / "__init__.py").touch()
    assert run(tmp_path, f"--import-mode={mode}") == OUTCOMES


def test_doctests_of_a_project(tmp_path):
    add_own_tests(tmp_path)
    add(tmp_path / "layers", "rope")
    outcomes = run(tmp_path, "--doctest-modules")
    assert outcomes == {"layers/contract/test_rope.py": {"PASSED"}}
