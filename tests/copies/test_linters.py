"""Copies under ruff with its default rules. No configuration of a project changes them."""

import subprocess
import sys

import pytest

from tinyblock import copies

pytest.importorskip("ruff", reason="requires the extra dev")


@pytest.fixture
def everything(empty):
    """Copies of all files and their tests."""
    empty.run("add", *copies.TITLES, "--with-tests")
    return empty


def ruff(*arguments):
    command = [sys.executable, "-m", "ruff", *arguments, "--isolated", "--no-cache"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed
    return printed


@pytest.mark.parametrize("rules", ["", "--extend-select=E,F,I,N,RUF,UP,W"])
def test_ruff_reports_nothing(rules, everything):
    options = [rules] if rules else []
    printed = ruff("check", everything.folder, *options)
    assert printed == "All checks passed!\n"


def test_ruff_changes_nothing(everything):
    ruff("check", everything.folder, "--fix", "--unsafe-fixes", "--select=F,I,RUF,UP")
    ruff("format", everything.folder, "--line-length=60")
    assert everything.run("check") == {}


def test_ruff_leaves_an_edit_alone(everything):
    everything.edit("rope.py", "import math\n", "import math, os  # noqa: F401\n")
    before = everything.exactly("rope.py")
    ruff("check", everything.folder, "--fix")
    ruff("format", everything.folder)
    assert everything.exactly("rope.py") == before
