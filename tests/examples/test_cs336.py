"""examples/cs336 tests solutions through the functions of their tests/adapters.py."""

import re
import shutil
from pathlib import Path

import forked
import pytest
from edits import replace
from pages import block_with, require_shown

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[1] / "examples" / "cs336"
SOLUTIONS = HERE.parent / "verify" / "solutions"
DEFECTS = {
    "attention": ("            token_positions = token_positions.unsqueeze(-2)\n", ""),
    "ffn": ("gate = self.w1(x)", "gate = self.w3(x)"),
    "rmsnorm": ("x = x.to(torch.float32)", "pass"),
}


@pytest.fixture
def solution(tmp_path, monkeypatch):
    """The folder of a right solution."""
    shutil.copytree(SOLUTIONS / "real_tables", tmp_path / "cs336_basics")
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "__init__.py").touch()
    shutil.copy(SOLUTIONS / "adapters.py", tests)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("solution")
def test_a_right_solution_passes():
    code, report = forked.verify(EXAMPLE)
    assert code == 0, report
    assert "\nRIGHT rmsnorm, ffn, rope, attention, block\n" in report


def test_three_defects_are_found_on_one_screen(solution):
    for name, (right, wrong) in DEFECTS.items():
        replace(solution / "cs336_basics" / f"{name}.py", right, wrong)
    code, report = forked.verify(EXAMPLE)
    assert code == 1, report
    assert len(report.splitlines()) <= 30, report
    failed = re.findall(r"^FAILED (\w+): test_\w+: ", report, re.MULTILINE)
    assert set(failed) == {"attention", "block", "ffn", "rmsnorm"}, report
    page = HERE.parents[1] / "docs" / "verify.md"
    require_shown(block_with(page, "FAILED attention"), report, "verify")
