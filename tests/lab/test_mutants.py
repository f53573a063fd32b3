"""The program that changes a module, on a module of which each change is known."""

import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parents[2] / "scripts" / "mutants.py"
# Six changes: the operator ==, its negation, 0, the division, 2, and no ndigits.
MODULE = """
def share(part: float, whole: int | None) -> float:
    if whole == 0:
        raise ValueError(f"whole must not be {0 + 0}")
    return round(part / whole, ndigits=2)
"""
TEST = """
from module import share

def test_share():
    assert share(1, 4) == 0.25
"""
REPORT = """\
module.py:3: 0  ->  1
module.py:5: 2  ->  3
The tests notice 4 of 6 changes.
"""


def test_each_change_that_no_test_notices_is_printed(tmp_path):
    (tmp_path / "module.py").write_text(MODULE)
    (tmp_path / "test_module.py").write_text(TEST)
    command = [sys.executable, str(PROGRAM), "module.py", "--tests", "test_module.py"]
    run = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert sorted(run.stdout.splitlines()) == sorted(REPORT.splitlines())
