"""`tinyblock verify`: which tests run on which layers, and what it prints."""

import importlib.util
import platform
import re
import shutil
import sys
from pathlib import Path

import pytest
from defects import replace
from forked import verify
from pages import block_with, require_shown

from tinyblock import copies

ROOT = Path(__file__).parents[2]
SOLUTIONS = Path(__file__).parent / "solutions"


def failed(report):
    """Return the layer, the test, and the message of each line about a failure."""
    return re.findall(r"^FAILED (\w+): (\S+): (.*)", report, re.MULTILINE)


@pytest.fixture
def solution(tmp_path):
    """A right solution, to change."""
    return Path(shutil.copytree(SOLUTIONS / "real_tables", tmp_path / "layers"))


def test_the_readme_shows_the_line_of_a_norm_without_eps(solution):
    replace(solution / "rmsnorm.py", " + self.eps)", ")")
    shown = block_with(ROOT / "README.md", "verify examples/cs336")
    _, report = verify(solution, "rmsnorm")
    require_shown(shown.partition("verify examples/cs336\n")[2], report, "verify")


def test_each_failed_test_has_one_line_and_the_equation_is_first(solution):
    """A wrong norm makes the block fail, too, so the layers are in this order."""
    replace(solution / "rmsnorm.py", " + self.eps)", ")")
    replace(solution / "ffn.py", "gate = self.w1(x)", "gate = self.w3(x)")
    code, report = verify(solution, "-k", "equation or rounds")
    assert code == 1, report
    lines = failed(report)
    assert [layer for layer, _, _ in lines] == sorted(
        (layer for layer, _, _ in lines),
        key=["rmsnorm", "ffn", "rope", "attention", "block"].index,
    )
    assert len({(layer, test) for layer, test, _ in lines}) == len(lines)
    layer, test, message = lines[0]
    assert (layer, test) == ("rmsnorm", "test_equation[cpu-float32]")
    assert message.startswith("two batch axes (2 of 3 cases fail): eps is missing: ")
    assert "Traceback" not in report


def test_layers_and_options_select_tests(solution):
    code, report = verify(solution, "ffn", "rope.py", "-vv", "-k", "equation")
    assert code == 0, report
    ran = set(re.findall(r"test_(\w+)\.py::\w+::(\w+).* PASSED", report))
    assert ran == {("ffn", "test_equation"), ("rope", "test_equation")}


def test_one_file_is_one_layer(solution):
    code, report = verify(solution / "rope.py", "-vv")
    assert code == 0, report
    assert set(re.findall(r"test_(\w+)\.py::", report)) == {"rope"}
    assert "\nRIGHT rope\n" in report


def test_the_tests_beside_copies_test_them(tmp_path):
    """Their formula may be edited, as in docs/vendoring.md."""
    assert copies.main(["add", "rope", "--with-tests", "--to", str(tmp_path)]) == 0
    (tmp_path / "conftest.py").write_text("raise RuntimeError('of the project')")
    page = tmp_path / "contract" / "test_rope.py"
    replace(page, "theta ** (-2 * k / d_k)", "theta ** (-2 * k / d_k) / 8")
    code, report = verify(tmp_path, "-k", "test_equation and float32")
    assert code == 1, report
    assert failed(report), report
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


@pytest.mark.parametrize(
    ("layers", "message"),
    [(["nothing"], "must exist, and be or contain"), (["x", "rope"], "must exist")],
)
def test_a_folder_without_these_layers_is_an_error(layers, message, tmp_path):
    code, report = verify(tmp_path / layers[0], *layers[1:])
    assert code == 2
    assert message in report


def test_a_layer_without_tests_beside_it_is_an_error(tmp_path):
    assert copies.main(["add", "rope", "--with-tests", "--to", str(tmp_path)]) == 0
    assert copies.main(["add", "rmsnorm", "--to", str(tmp_path)]) == 0
    code, report = verify(tmp_path)
    assert code == 2
    assert "tinyblock add rmsnorm --to DIR --with-tests" in report


def test_what_is_not_written_is_no_failure(tmp_path):
    (tmp_path / "rmsnorm.py").write_text(
        "class RMSNorm:\n"
        "    def __init__(self, d_model, eps):\n"
        "        raise NotImplementedError('TODO')\n"
        "    def forward(self, x): ...\n"
    )
    code, report = verify(tmp_path)
    assert code == 1, report
    assert "\nNOT WRITTEN rmsnorm: NotImplementedError in __init__\n" in report
    assert "FAILED" not in report
    assert "ERROR" not in report
    assert "RIGHT" not in report


def test_a_layer_whose_equation_cannot_run_is_an_error(tmp_path):
    (tmp_path / "rmsnorm.py").write_text("class RMSNorm:\n    'No arguments.'\n")
    code, report = verify(tmp_path)
    assert code == 2, report
    assert "ERROR rmsnorm: no case of its equation ran" in report


def test_one_broken_layer_leaves_the_others(solution):
    (solution / "rope.py").write_text("def f():\n    1 / 0\nf()\n")
    code, report = verify(solution, "rope", "rmsnorm", "-vv")
    assert code == 2, report
    shown = re.findall(r'File "(.*)", line (\d+)', report)
    assert shown == [(str(solution / "rope.py"), "3"), (str(solution / "rope.py"), "2")]
    assert "ZeroDivisionError: division by zero" in report
    assert "test_rmsnorm.py::TestRMSNorm::test_equation[cpu-float32] PASSED" in report


# What a file of a solution contains, and the end of the one line about it.
IMPORTS = {
    "import math\nimport no_such_one\nimport no_such_two": (
        "rope.py, line 2: No module named 'no_such_one': "
        f"{sys.executable} -m pip install no_such_one no_such_two"
    ),
    "import importlib.metadata as m\nm.version('no_such_package')": (
        "line 2: No package metadata was found for no_such_package: "
        f"install the solution: {sys.executable} -m pip install --no-deps -e "
    ),
    "from tests.no_such_file import x": (
        "run verify in the folder of the solution, or set PYTHONPATH to it"
    ),
    "from beside import x": "beside this file: add {folder} to PYTHONPATH",
    "def f(:": "this is Python {python}; a newer one may read the file",
}


@pytest.mark.parametrize("text", IMPORTS)
def test_a_layer_that_cannot_be_imported_is_one_line_with_the_repair(text, tmp_path):
    (tmp_path / "rope.py").write_text(text)
    (tmp_path / "beside.py").write_text("x = 1")
    code, report = verify(tmp_path)
    assert code == 2, report
    [line] = re.findall(r"^ERROR rope: (.*)", report, re.MULTILINE)
    values = {"folder": tmp_path, "python": platform.python_version()}
    assert IMPORTS[text].format(**values) in line


def test_what_functions_import_is_one_line_for_all_layers(tmp_path):
    """Many adapters import the solution inside of their functions."""
    for layer, name in (("rmsnorm", "RMSNorm"), ("ffn", "SwiGLU")):
        (tmp_path / f"{layer}.py").write_text(
            f"class {name}:\n"
            "    def __init__(self, d_model, d_ff=1, eps=1e-5):\n"
            "        import no_such_package\n"
            "    def forward(self, x): ...\n"
        )
    code, report = verify(tmp_path)
    assert code == 2, report
    assert not failed(report), report
    assert report.count("pip install no_such_package") == 2, report


@pytest.mark.parametrize("missing", ["torch", "pytest", "einops", "jaxtyping"])
def test_verify_names_a_missing_package(missing, monkeypatch, capsys):
    found = importlib.util.find_spec

    def find_spec(name):
        return None if name == missing else found(name)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    assert copies.main(["verify", "layers"]) == 2
    assert f"verify requires {missing}: install" in capsys.readouterr().err


def test_a_class_with_fused_weights_passes_as_the_page_wraps_it(tmp_path):
    page = ROOT / "docs" / "verify.md"
    (tmp_path / "my_model.py").write_text(block_with(page, "class FusedAttention("))
    (tmp_path / "attention.py").write_text(block_with(page, "functional_call("))
    code, report = verify(tmp_path, folder=tmp_path)
    assert code == 0, report
    assert "6 passed, 3 skipped" in report
