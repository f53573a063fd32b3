"""examples/cs336 judges solutions by the functions of their tests/adapters.py."""

import re
import shutil
from pathlib import Path

import forked
import pytest
from defects import replace

EXAMPLE = Path(__file__).parents[2] / "examples" / "cs336"
SOLUTIONS = Path(__file__).parents[1] / "contract" / "solutions"
DEFECTS = {
    "attention": ("            token_positions = token_positions.unsqueeze(-2)\n", ""),
    "ffn": ("gate = self.w1(x)", "gate = self.w3(x)"),
    "rmsnorm": ("x = x.to(torch.float32)", "pass"),
}
# A case of test_equation for each function of tests/adapters.py.
# Without its function, a case is skipped, which is no failure.
EQUATIONS = [
    ("rmsnorm", "two batch axes"),
    ("ffn", "SwiGLU"),
    ("rope", "positions for each sequence"),
    ("attention", "function"),
    ("attention", "plain"),
    ("attention", "positions"),
    ("block", "RoPE"),
]


@pytest.fixture
def verify(tmp_path, monkeypatch):
    """Return a function that judges a solution with defects: exit code, report."""

    def verify(defects, *options):
        solution = tmp_path / "cs336_basics"
        shutil.copytree(SOLUTIONS / "real_tables", solution)
        (tmp_path / "tests").mkdir()
        (tmp_path / "tests" / "__init__.py").touch()
        shutil.copy(SOLUTIONS / "adapters.py", tmp_path / "tests")
        for name, (right, wrong) in defects.items():
            replace(solution / f"{name}.py", right, wrong)
        monkeypatch.syspath_prepend(tmp_path)
        return forked.verify(EXAMPLE, *options)

    return verify


def test_each_function_of_a_right_solution_passes(verify):
    code, report = verify({}, "-vv")
    assert code == 0, report
    for layer, case in EQUATIONS:
        passed = f"test_{layer}.py::test_equation[{case}, float32] PASSED"
        assert passed in report, f"{layer}, {case}: {report}"


def test_three_defects_are_found_on_one_screen(verify):
    code, report = verify(DEFECTS)
    assert code == 1, report
    assert len(report.splitlines()) <= 24, report
    pattern = r"^FAILED (\w+): test_\w+, [1-9]\d* of \d+, first \[.*\]: ."
    failed = re.findall(pattern, report, re.MULTILINE)
    assert set(failed) == {"attention", "block", "ffn", "rmsnorm"}, report
    assert re.search("FAILED attention: test_equation.*positions", report), report
