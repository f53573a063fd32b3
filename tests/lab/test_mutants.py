"""The program that changes a module, on modules of which each change is known."""

import ast
import os
import subprocess
import sys
from functools import partial

import mutants

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


# It divides, and checks `whole`. Annotations and the texts of errors are not changed.
MODULE = """
def share(part: float, whole: int | None) -> float:
    if not whole:
        raise ValueError(f"whole must not be {0 + 0}")
    return part / whole
"""
TEST = """
from module import share

def test_share():
    assert share(1, 1) == 1
"""


def test_each_change_that_no_test_notices_is_printed(tmp_path):
    (tmp_path / "module.py").write_text(MODULE)
    (tmp_path / "test_module.py").write_text(TEST)
    command = [sys.executable, mutants.__file__, "module.py"]
    # Plugins of pytest take half of its start.
    env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    run = partial(subprocess.run, cwd=tmp_path, env=env, capture_output=True, text=True)
    found = run([*command, "--tests", "test_module.py"])
    assert found.stdout.splitlines() == [
        "module.py:5: part / whole  ->  part * whole",
        "The tests notice 1 of 2 changes.",
    ]
    assert "module.py has no tests in TESTS" in run(command).stderr
