"""The program that changes a module, on modules of which each change is known."""

import ast
import os
import subprocess
import sys

import mutants
import pytest

# Pieces of code, and what they are changed to. Equal arguments are not exchanged.
CHANGES = {
    "a + b": ["a - b"],
    "a and b": ["a or b"],
    "a < b == c": ["a <= b == c", "a < b != c"],
    "not a": ["a"],
    "a if b else c": ["a if not b else c"],
    "a if b == c else d": ["a if b != c else d"],
    "True": ["False"],
    "1.5": ["2.5"],
    "f(a, b, b, c=d)": ["f(b, a, b, c=d)", "f(a, b, b)"],
    "'text'": [],
}


def test_code_is_changed_in_one_place_at_a_time():
    for source, expected in CHANGES.items():
        assert [
            ast.unparse(ast.parse(mutants.replace(source, old, new)))
            for node in mutants.code(ast.parse(source))
            for old, new in mutants.changes(node)
        ] == expected


def test_changes_are_the_same_each_time():
    sources = {"a.py": str(list(range(50))), "b.py": str(list(range(50)))}
    first, second = (
        [(file, old.value) for file, old, _ in mutants.draw(sources, 20)] for _ in "ab"
    )
    assert first == second
    assert len({*first}) == 20
    assert {file for file, _ in first} == {*sources}


# It divides, and checks the result. Annotations and the texts of errors are not changed.
MODULE = """
def share(part: float, whole: int | None) -> float:
    result = part / whole
    if not result:
        raise ValueError(f"a share must not be {0 + 0}", 0)
    return result
"""
TEST = """
import sys

sys.path.insert(0, "scripts/lab")
from module import share

def test_share():
    assert share(1, 1) == 1
"""
# It also says when it runs.
OTHER_TEST = """
def test_run():
    with open({log!r}, "a") as log:
        log.write("run ")
"""


@pytest.fixture
def run(tmp_path):
    """Return a function that changes a file of a checkout, and returns what is printed."""
    for path, text in {
        "scripts/lab/module.py": MODULE,
        "scripts/lab/second.py": "1",
        "docs/module.py": "1",
        "tests/lab/test_module.py": TEST,
        "tests/profiling/test_other.py": OTHER_TEST.format(log=str(tmp_path / "log")),
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    def run(*arguments):
        command = [sys.executable, mutants.__file__, *arguments]
        # Plugins of pytest take half of its start.
        env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return done.stdout

    return run


def test_each_change_that_no_test_notices_is_a_line(run, tmp_path):
    """Also in a log. Only the changes that its own tests do not notice run the others.

    The second one, which the tests notice, is taken back before the third.
    """
    assert run("scripts/lab/second.py", "scripts/lab/module.py").splitlines() == [
        "3 changes take about 1 min at most",
        "scripts/lab/module.py:3: part / whole  ->  part * whole",
        "scripts/lab/second.py:1: 1  ->  2",
        "The tests notice 1 of 3 changes.",
    ]
    log = tmp_path / "log"
    assert log.read_text() == "run run run "  # before any change, and for two
    assert (tmp_path / "scripts" / "lab" / "module.py").read_text() == MODULE


def test_tests_that_are_named_run_alone(run, tmp_path):
    printed = run("docs/module.py", "--tests", "tests/profiling")
    assert printed.endswith("The tests notice 0 of 1 changes.\n")
    assert (tmp_path / "log").read_text() == "run run "


def test_files_without_tests_and_outside_of_the_checkout_are_errors(run, tmp_path):
    assert "docs/module.py has no tests in TESTS" in run("docs/module.py")
    for path in (str(tmp_path / "scripts" / "lab" / "module.py"), "../module.py"):
        assert f"from the root of the checkout, got {path}" in run(path)


def test_tests_must_pass_before_a_change(run, tmp_path):
    (tmp_path / "tests" / "lab" / "test_module.py").write_text("def test(): assert 0")
    printed = run("scripts/lab/module.py")
    assert "must pass before a change: tests/lab/test_module.py" in printed
