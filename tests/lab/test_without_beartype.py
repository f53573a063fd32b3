"""The scripts on a machine without beartype."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).parents[2] / "scripts"
WITHOUT_BEARTYPE = """
import sys
sys.modules["beartype"] = None  # an import of it fails
sys.path[:0] = sys.argv[1:]
import jaxtyping, lab.environment
import torch, tinyblock
print(tinyblock.RMSNorm(4)(torch.ones(2, 4)).shape)
"""


def test_scripts_run_without_shape_checks_where_beartype_is_missing():
    variables = {**os.environ, "PYTHONPATH": ""}
    variables.pop("JAXTYPING_DISABLE", None)
    command = [
        sys.executable,
        "-c",
        WITHOUT_BEARTYPE,
        str(SCRIPTS),
        str(SCRIPTS.parent),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=variables)
    assert done.stdout == "torch.Size([2, 4])\n", done.stderr
