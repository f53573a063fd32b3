"""The contract in a folder of copies, where tinyblock is not installed."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from contract import solutions

import tinyblock
from tinyblock import copies
from tinyblock.contract import target

PACKAGE = Path(tinyblock.__file__).parent
PYTEST_ALONE = "import sys, pytest; sys.modules['tinyblock'] = None; pytest.main()"


def test_every_layer_has_a_page_and_no_case_is_skipped():
    """A skipped case means here that an option or a function was renamed."""
    target.select(PACKAGE)
    from tinyblock.contract.test_every_layer import CASES, PAGES

    assert set(PAGES) == {layer.__name__.split(".")[-1] for layer in tinyblock.LAYERS}
    for name, case in CASES.items():
        try:
            case.construct()
        except pytest.skip.Exception as reason:
            pytest.fail(f"{name}: {reason}")


def replace(path, old, new):
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def test_report_for_copies(tmp_path):
    """One layer has another eps by default, one is broken, and there is no block."""
    folder = tmp_path / "my layers"
    shutil.copytree(PACKAGE, folder)
    for name in ("__init__", "block", "transformer"):
        (folder / f"{name}.py").unlink()
    replace(folder / "attention.py", "eps: float = 1e-5", "eps: float = 1e-4")
    replace(folder / "ffn.py", "F.silu(self.w1(x)) * self.w3(x)", "self.w1(x)")
    command = [sys.executable, "-c", PYTEST_ALONE, "contract"]
    command += ["-c", "contract/contract.ini"]
    command += ["-k", "equation and float64 and cpu and (SwiGLU or all)"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    [failed] = re.findall(r"\nFAILED (.*)", done.stdout)
    case = re.escape("ffn: test_equation, 2 of 3, first [cpu-ffn, SwiGLU, float64]: ")
    numbers = r"result in torch.float64 at \[.*\]: got .*, expected .*, allowed "
    assert re.match(case + numbers, failed), failed


@pytest.mark.parametrize("name", solutions.RIGHT)
def test_right_solutions_of_others_pass(name, tmp_path, capfd):
    solutions.write(solutions.RIGHT[name], tmp_path)
    code = copies.main(["verify", str(tmp_path), "-vv"])
    report = capfd.readouterr().out
    assert code == 0, report
    for layer in ("rmsnorm", "rope", "attention"):
        passed = re.findall(rf"{layer}.* PASSED", report)
        assert len(passed) >= 20, f"{layer}: {len(passed)}"
    assert '-m "not numbers"' in report.splitlines()[-1]
