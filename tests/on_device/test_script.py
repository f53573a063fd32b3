"""The options of cuda_acceptance.sh."""

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "cuda_acceptance.sh"


def call(*options, **variables):
    command = ["bash", str(SCRIPT), *options]
    environment = {"PATH": "/usr/bin:/bin", **variables}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_help_names_the_options_and_shows_examples():
    done = call("--help")
    assert done.returncode == 0
    for name in ("--quick", "-k EXPRESSION", "--device cpu", "LIMIT=", "PYTHON="):
        assert name in done.stdout
    assert "bash scripts/cuda_acceptance.sh OUT --quick" in done.stdout


@pytest.mark.parametrize(
    ("options", "variables", "message"),
    [
        ([], {}, "the folder for the results is missing"),
        (["OUT", "--fast"], {}, "unknown option --fast"),
        (["OUT", "-k"], {}, "-k requires a value"),
        (["OUT", "MORE"], {}, "only one folder can be given, got OUT and MORE"),
        (["OUT", "--device=tpu"], {}, "--device must be cuda or cpu, got tpu"),
        (["OUT", "--device", "cpu"], {}, "--device cpu requires --quick"),
        (["OUT"], {"LIMIT": "1h"}, "LIMIT must be a whole number above 20, got 1h"),
        (["OUT"], {"PYTHON": "missing"}, "there is no missing"),
    ],
)
def test_wrong_option_is_one_line(options, variables, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = call(*options, **variables)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("cuda_acceptance.sh: error: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == []
