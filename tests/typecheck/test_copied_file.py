"""typecheck in a project that has a copy of typecheck.py alone, without tinyblock."""

import shutil
from pathlib import Path

import pytest
from forked import run_pytest
from pages import block_with

import tinyblock

PACKAGE = Path(tinyblock.__path__[0])
PAGE = PACKAGE.parent / "docs" / "shape_checks.md"
HERE = Path(__file__).parent


def test_the_lines_of_the_page_check_with_the_copied_file_alone(tmp_path):
    shutil.copy(PACKAGE / "typecheck.py", tmp_path)
    shutil.copy(HERE / "users_module.py", tmp_path / "my_module.py")
    shutil.copy(HERE / "copied_project.py", tmp_path)
    (tmp_path / "lines.py").write_text(block_with(PAGE, "from typecheck import"))
    code, printed = run_pytest(
        "-Werror", "copied_project.py", folder=tmp_path, without=["tinyblock"]
    )
    assert code == pytest.ExitCode.OK, printed
