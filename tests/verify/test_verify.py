"""`tinyblock verify`: which tests run on which layers, and what it prints."""

import importlib.util
import platform
import re
import shutil
import sys
from pathlib import Path

import pytest
from edits import replace
from forked import verify
from pages import block_with, require_shown

from tinyblock import copies

ROOT = Path(__file__).parents[2]
RIGHT = Path(__file__).parent / "solutions" / "real_tables"
PIP = f"{sys.executable} -m pip install"

# Of a norm without eps, a RoPE that divides by zero, and attention that is not written.
REPORT = """\
F...

ERROR rope: it cannot be imported:
Traceback (most recent call last):
  File "{folder}/rope.py", line 3, in <module>
...
  File "{folder}/rope.py", line 2, in f
...
ZeroDivisionError: division by zero
FAILED rmsnorm: test_equation: two batch axes (2 of 3 cases fail): result in
    float32 at ...
...
    your numbers are those of   rms = (x.square().mean(-1, keepdim=True) + eps).sqrt()
    with this change:           rms = x.square().mean(-1, keepdim=True).sqrt()
    (and 2 other tests)
NOT WRITTEN attention: NotImplementedError in scaled_dot_product_attention
Common mistakes, by the test that fails: docs/verify.md in tinyblock's
    repository
RIGHT ffn
3 failed, 1 passed, ... deselected, 2 not written or tested in ...
"""


@pytest.fixture
def solution(tmp_path):
    """A right solution, to change."""
    return Path(shutil.copytree(RIGHT, tmp_path / "layers"))


def test_the_report_has_one_line_for_each_cause(solution):
    """What is not written, and what a broken import causes, is no failure."""
    replace(solution / "rmsnorm.py", " + self.eps)", ")")
    replace(
        solution / "attention.py",
        "    scores = einsum",
        "    raise NotImplementedError\n    scores = einsum",
    )
    (solution / "rope.py").write_text("def f():\n    1 / 0\nf()\n")
    code, report = verify(solution, "-k", "equation or rounds")
    assert code == 2, report
    require_shown(REPORT.format(folder=solution), report, "verify")


def test_the_readme_shows_the_line_of_a_norm_without_eps(solution):
    replace(solution / "rmsnorm.py", " + self.eps)", ")")
    shown = block_with(ROOT / "README.md", "verify ../tinyblock/examples/cs336")
    code, report = verify(solution, "rmsnorm")
    assert code == 1, report
    require_shown(shown.partition("examples/cs336\n")[2], report, "verify")


def test_layers_files_and_options_select_tests(solution):
    for arguments, expected in {
        (solution, "ffn", "rope.py", "-k", "equation"): {"ffn", "rope"},
        (solution / "rope.py", "-k", "equation"): {"rope"},
    }.items():
        code, report = verify(*arguments, "-vv")
        assert code == 0, report
        ran = set(re.findall(r"test_(\w+)\.py::\w+::(\w+).* PASSED", report))
        assert ran == {(layer, "test_equation") for layer in expected}


def test_the_tests_beside_copies_test_them(tmp_path):
    """Their formula may be edited, as in docs/copy.md."""
    assert copies.main(["add", "rope", "--with-tests", "--to", str(tmp_path)]) == 0
    (tmp_path / "conftest.py").write_text("raise RuntimeError('of the project')")
    page = tmp_path / "contract" / "test_rope.py"
    replace(page, "theta ** (-2 * k / d_k)", "theta ** (-2 * k / d_k) / 8")
    code, report = verify(tmp_path, "-k", "test_equation and float32")
    assert code == 1, report
    assert "\nFAILED rope: test_equation: " in report
    replace(tmp_path / "rope.py", "(-even / self.d_k)", "(-even / self.d_k) / 8")
    code, report = verify(tmp_path, "-k", "test_equation")
    assert code == 0, report


def test_a_copy_that_imports_a_layer_of_ones_own_is_no_copy(tmp_path):
    """Only what every correct layer does is tested."""
    assert copies.main(["add", "block", "--to", str(tmp_path)]) == 0
    (tmp_path / ".tinyblock" / "ffn.py.base").unlink()
    _, report = verify(tmp_path, "ffn", "rmsnorm", "block", "-vv", "-k", "strides")
    strides = set(re.findall(r"test_(\w+)\.py::\w+::test_any_strides", report))
    assert strides == {"rmsnorm"}, report


def test_a_folder_without_layers_or_their_tests_is_an_error(tmp_path):
    assert copies.main(["add", "rope", "--with-tests", "--to", str(tmp_path)]) == 0
    assert copies.main(["add", "rmsnorm", "--to", str(tmp_path)]) == 0
    for arguments, message in {
        (tmp_path / "nothing" / "rope",): "must exist, and be or contain",
        (tmp_path, "ffn"): "must exist",
        (tmp_path,): "tinyblock add rmsnorm --to DIR --with-tests",
    }.items():
        code, report = verify(*arguments)
        assert code == 2
        assert message in report


# What a file of a solution contains, and the end of the one line about it.
IMPORTS = {
    "rmsnorm": (
        "import math\nimport no_such_one\nimport no_such_two.part",
        f"rmsnorm.py, line 2: No module named 'no_such_one': {PIP} no_such_one no_such_two",
    ),
    "ffn": (
        "import importlib.metadata as m\nm.version('no_such_package')",
        "ffn.py, line 2: No package metadata was found for no_such_package: "
        f"install the solution: {PIP} --no-deps -e {{parent}}",
    ),
    "rope": (
        "from tests.no_such_file import x",
        "run verify in the folder of the solution, or set PYTHONPATH to it",
    ),
    "attention": (
        "from beside import x",
        "it lies beside this file: add {folder} to PYTHONPATH",
    ),
    "block": (
        "def f(:",
        f"this is Python {platform.python_version()}; a newer one may read the file, "
        "and the course's edition of 2026 requires Python 3.12 or 3.13",
    ),
}


def test_a_layer_that_cannot_be_imported_is_one_line_with_the_repair(tmp_path):
    for layer, (text, _) in IMPORTS.items():
        (tmp_path / f"{layer}.py").write_text(text)
    (tmp_path / "beside.py").write_text("x = 1")
    code, report = verify(tmp_path)
    assert code == 2, report
    lines = dict(re.findall(r"^ERROR (\w+): (.*)", report, re.MULTILINE))
    assert set(lines) == set(IMPORTS)
    for layer, (_, end) in IMPORTS.items():
        right = end.format(folder=tmp_path, parent=tmp_path.parent)
        assert lines[layer].endswith(right)


def test_packages_that_are_imported_later_are_named_at_once(tmp_path):
    """Of files that Python has not read when the first package is missing."""
    (tmp_path / "basics").mkdir()
    (tmp_path / "basics" / "__init__.py").touch()
    (tmp_path / "basics" / "model.py").write_text("from .parts import x\n")
    (tmp_path / "basics" / "parts.py").write_text("import no_such_two\n")
    text = "import no_such_one\ndef f():\n    from basics.model import x\n"
    (tmp_path / "rmsnorm.py").write_text(text)
    code, report = verify(tmp_path, folder=tmp_path)
    assert code == 2, report
    assert f": {PIP} no_such_one no_such_two\n" in report


def test_what_functions_import_is_one_line_for_all_layers(solution):
    """Many adapters import the solution inside of their functions."""
    for layer in ("rmsnorm", "ffn"):
        replace(
            solution / f"{layer}.py",
            "super()",
            "import no_such_package\n        super()",
        )
    code, report = verify(solution, "rmsnorm", "ffn", "rope")
    assert code == 2, report
    assert "FAILED" not in report
    assert report.count(f"{PIP} no_such_package") == 2, report


@pytest.mark.parametrize("missing", ["torch", "pytest", "einops", "jaxtyping"])
def test_verify_names_a_missing_package(missing, monkeypatch, capsys):
    found = importlib.util.find_spec

    def find_spec(name):
        return None if name == missing else found(name)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    assert copies.main(["verify", "layers"]) == 2
    assert f"verify requires {missing}: install" in capsys.readouterr().err


FUSED = """
import torch.nn.functional as F
from torch import nn


class FusedAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x):
        qkv = self.qkv(x).unflatten(-1, (3 * self.heads, -1)).transpose(1, 2)
        q, k, v = qkv.chunk(3, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))
"""


def test_a_class_with_fused_weights_passes_as_the_page_wraps_it(tmp_path):
    page = ROOT / "docs" / "verify.md"
    (tmp_path / "my_model.py").write_text(FUSED)
    (tmp_path / "attention.py").write_text(block_with(page, "functional_call("))
    code, report = verify(tmp_path, folder=tmp_path)
    assert code == 0, report
    assert "\nRIGHT attention\n" in report
