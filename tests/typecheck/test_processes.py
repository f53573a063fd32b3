"""typecheck in processes of its own: a copied file, and JAXTYPING_DISABLE=1."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import tinyblock

PACKAGE = Path(tinyblock.__path__[0])
PAGE = PACKAGE.parent / "docs" / "shape_checks.md"
HERE = Path(__file__).parent


def errors_of(*arguments, **environment):
    """Run Python, and return the warnings and errors that it prints."""
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    ).stderr


def test_the_lines_of_the_page_check_with_the_copied_file_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(PACKAGE / "typecheck.py", ".")
    shutil.copy(HERE / "users_module.py", "my_module.py")
    shutil.copy(HERE / "copied_project.py", ".")
    [lines] = re.findall(r"```py\n(from typecheck.*?)```", PAGE.read_text(), re.DOTALL)
    Path("lines.py").write_text(lines)
    assert errors_of("-Werror", "copied_project.py") == ""


def test_jaxtyping_disable_leaves_functions_unwrapped_and_needs_no_beartype():
    code = (
        "import sys; sys.modules['beartype'] = None; import tinyblock, torch; "
        "tinyblock.silu(torch.ones(2)); assert tinyblock.typecheck(len) is len"
    )
    assert errors_of("-Werror", "-c", code, JAXTYPING_DISABLE="1") == ""
