"""`tinyblock verify` judges layers that are not copies of tinyblock's."""

import re
from pathlib import Path

import pytest

from tinyblock import copies

SOLUTIONS = Path(__file__).parent / "solutions"


@pytest.mark.parametrize("name", ["real_tables", "complex_tables", "torch_functions"])
def test_right_solutions_have_no_failures(name, capfd):
    code = copies.main(["verify", str(SOLUTIONS / name), "-vv"])
    report = capfd.readouterr().out
    assert code == 0, report
    for layer in ("rmsnorm", "ffn", "rope", "attention", "block"):
        passed = re.findall(rf"test_{layer}\.py::test_equation.* PASSED", report)
        assert passed, f"{layer}: {report}"
