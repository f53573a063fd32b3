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
# The layer that calls each function of tests/adapters.py.
FUNCTIONS = {
    "run_rmsnorm": "rmsnorm",
    "run_swiglu": "ffn",
    "run_rope": "rope",
    "run_scaled_dot_product_attention": "attention",
    "run_multihead_self_attention": "attention",
    "run_multihead_self_attention_with_rope": "attention",
    "run_transformer_block": "block",
}


@pytest.fixture
def verify(tmp_path, monkeypatch):
    """Return a function that judges a solution with defects: exit code, report."""

    def verify(defects, *options, added=""):
        solution = tmp_path / "cs336_basics"
        shutil.copytree(SOLUTIONS / "real_tables", solution)
        (tmp_path / "tests").mkdir()
        (tmp_path / "tests" / "__init__.py").touch()
        adapters = (SOLUTIONS / "adapters.py").read_text() + added
        (tmp_path / "tests" / "adapters.py").write_text(adapters)
        for name, (right, wrong) in defects.items():
            replace(solution / f"{name}.py", right, wrong)
        monkeypatch.syspath_prepend(tmp_path)
        return forked.verify(EXAMPLE, *options)

    return verify


def test_a_right_solution_has_no_failures(verify):
    code, report = verify({})
    assert code == 0, report
    assert "skipped" not in report


@pytest.mark.parametrize("function", FUNCTIONS)
def test_each_function_is_called(function, verify, tmp_path):
    raises = f"\n\ndef {function}(**arguments):\n    raise ValueError('{function}')\n"
    code, report = verify({}, FUNCTIONS[function], "-k", "equation", added=raises)
    assert code == 1
    assert f"ValueError: {function}" in report, report


def test_three_defects_are_found_on_one_screen(verify):
    code, report = verify(DEFECTS)
    assert code == 1, report
    assert len(report.splitlines()) <= 24, report
    pattern = r"^FAILED (\w+): test_\S+: .*\(\d+ of \d+ cases fail\): ."
    failed = re.findall(pattern, report, re.MULTILINE)
    assert set(failed) == {"attention", "block", "ffn", "rmsnorm"}, report
    assert re.search("FAILED attention: test_equation.*positions", report), report
