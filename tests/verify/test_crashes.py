"""`tinyblock verify` tells a crash from code that is not written, and leaves out no case."""

import shutil
from pathlib import Path

from edits import replace
from forked import verify

SOLUTION = Path(__file__).parent / "solutions" / "real_tables"


def test_an_operation_that_torch_lacks_and_a_type_error_in_one_case_are_failures(
    tmp_path,
):
    """What torch lacks, such as cdist in float16, is a NotImplementedError, too."""
    for layer in ("rmsnorm.py", "ffn.py"):
        shutil.copy(SOLUTION / layer, tmp_path)
    # The numbers of one case are as large as these.
    replace(
        tmp_path / "rmsnorm.py",
        "        in_dtype = x.dtype\n",
        "        in_dtype = x.dtype\n        if x.abs().max() > 100:\n            len(1)\n",
    )
    replace(
        tmp_path / "ffn.py",
        "        gate = self.w1(x)\n",
        "        torch.cdist(x.half(), x.half())\n        gate = self.w1(x)\n",
    )
    code, report = verify(tmp_path, "-k", "equation and float32")
    assert code == 1, report
    assert "\nFAILED rmsnorm: test_equation" in report
    assert "\nFAILED ffn: test_equation" in report
    assert "NOT WRITTEN" not in report
