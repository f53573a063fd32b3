"""examples/cs336 judges solutions by the functions of their tests/adapters.py."""

import re
import shutil
from pathlib import Path

import forked
import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "cs336"
SOLUTIONS = Path(__file__).parents[1] / "contract" / "solutions"
DEFECTS = {
    "attention": ("            token_positions = token_positions.unsqueeze(-2)\n", ""),
    "ffn": ("gate = self.w1(x)", "gate = self.w3(x)"),
    "rmsnorm": ("x = x.to(torch.float32)", "pass"),
}


@pytest.fixture
def verify(tmp_path, monkeypatch):
    """Return a function that judges a solution with these defects: exit code, output."""

    def verify(defects):
        solution = tmp_path / "cs336_basics"
        shutil.copytree(SOLUTIONS / "real_tables", solution)
        (tmp_path / "tests").mkdir()
        (tmp_path / "tests" / "__init__.py").touch()
        shutil.copy(SOLUTIONS / "adapters.py", tmp_path / "tests")
        for name, (right, wrong) in defects.items():
            text = (solution / f"{name}.py").read_text()
            assert right in text
            (solution / f"{name}.py").write_text(text.replace(right, wrong))
        monkeypatch.syspath_prepend(tmp_path)
        return forked.verify(EXAMPLE)

    return verify


def test_a_right_solution_has_no_failures(verify):
    code, report = verify({})
    assert code == 0, report
    assert "no case" not in report


def test_three_defects_are_found_on_one_screen(verify):
    code, report = verify(DEFECTS)
    assert code == 1
    assert len(report.splitlines()) <= 24, report
    pattern = r"^FAILED (\w+): test_\w+, [1-9]\d* of \d+, first \[.*\]: ."
    failed = re.findall(pattern, report, re.MULTILINE)
    assert set(failed) == {"attention", "block", "ffn", "rmsnorm"}, report
    assert re.search("FAILED attention: test_equation.*positions", report), report
