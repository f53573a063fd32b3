"""`tinyblock verify`, as it is typed: its exit code, and what it prints."""

import subprocess
import sys
from pathlib import Path

TINYBLOCK = Path(__file__).parents[2] / "tinyblock"


def verify(project, *arguments):
    return subprocess.run(
        [sys.executable, TINYBLOCK, "verify", project.name, *arguments],
        cwd=project.root,
        env={"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_verify_names_the_wrong_layer_and_exits_with_1(empty):
    empty.run("add", "rmsnorm", "ffn", "--with-tests")
    empty.edit("rmsnorm.py", "mean_square + eps", "mean_square + 2 * eps")
    done = verify(empty, "-k", "equation and float64")
    assert (done.returncode, done.stderr) == (1, "")
    failed = [line for line in done.stdout.splitlines() if "FAILED" in line]
    assert failed, done.stdout
    assert all("rmsnorm" in line for line in failed), done.stdout
