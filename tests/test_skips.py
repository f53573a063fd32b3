"""A test that is skipped for a reason outside of a list fails."""

import re
import shutil
from pathlib import Path

from forked import run_pytest

TESTS = """\
import pytest

@pytest.mark.skipif(True, reason="requires a GPU")
def test_gpu(): pass

def test_package():
    pytest.importorskip("no_such_package", reason="requires the extra examples")

@pytest.mark.xfail(reason="pytorch issue 196678: see docs/layers.md")
def test_torch(): assert 0

def test_case():
    pytest.skip("there is no RMSNorm in rmsnorm.py")

@pytest.mark.skip
def test_marked(): pass

@pytest.fixture
def layer():
    pytest.skip("requires another layer")

def test_setup(layer): pass

@pytest.mark.xfail(reason="requires a fix")
def test_xfail(): assert 0

def test_right(): pass
"""


def test_a_skip_fails_if_its_reason_is_not_listed(tmp_path):
    """Of tests and of files, also outside of the folder of the list."""
    (tmp_path / "tests").mkdir()
    shutil.copy(Path(__file__).parent / "conftest.py", tmp_path / "tests")
    (tmp_path / "layers").mkdir()
    (tmp_path / "layers" / "test_layers.py").write_text(TESTS)
    (tmp_path / "layers" / "test_file.py").write_text(
        "import pytest\npytest.importorskip('no_such_package', reason='no reason')"
    )
    failed = {"test_case", "test_marked", "test_setup", "test_xfail"}
    for options, more in (
        ([], set()),
        (["--all-packages"], {"test_package", "test_torch"}),
    ):
        _, printed = run_pytest(
            "tests",
            "layers",
            "-q",
            "-rfE",
            "--continue-on-collection-errors",
            *options,
            folder=tmp_path,
        )
        found = set(
            re.findall(r"^(?:FAILED|ERROR) \S*?(\w+)(?:\.py)?(?: |$)", printed, re.M)
        )
        assert found == failed | more | {"test_file"}, printed
        assert "1 passed" in printed
