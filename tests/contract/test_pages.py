"""The contract's pages for tinyblock's layers, and in projects that copied them."""

import importlib
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from forked import run_pytest

import tinyblock
from tinyblock import copies
from tinyblock.contract import conftest, every_layer, target
from tinyblock.contract.checks import Case, use_rope_of

PACKAGE = Path(tinyblock.__file__).parent
MODULES = [layer.__name__.rpartition(".")[2] for layer in tinyblock.LAYERS]
SHARED = {name for name in vars(every_layer) if name.startswith("test_")}
# A table has no initial weights. Not every layer rounds its result only once.
NOT_SHARED = {
    "rope": {"test_initial_weights", "test_built_on_the_default_device"},
    "ffn": {"test_rounds_once"},
    "block": {"test_rounds_once"},
    "transformer": {"test_rounds_once"},
}


def page_of(layer):
    return importlib.import_module(f"tinyblock.contract.test_{layer}")


@pytest.mark.parametrize("layer", MODULES)
def test_page_imports_what_holds_for_every_layer(layer):
    imported = {name for name in SHARED if hasattr(page_of(layer), name)}
    assert imported == SHARED - NOT_SHARED.get(layer, set())


@pytest.mark.parametrize("layer", MODULES)
def test_no_case_of_a_layer_is_skipped(layer):
    """A skipped case means here that an option or a function was renamed."""
    target.select(PACKAGE)
    for title, case in page_of(layer).CASES.items():
        try:
            case.construct()
        except pytest.skip.Exception as reason:
            pytest.fail(f"{title}: {reason}")


def test_a_page_may_not_hide_a_shared_test():
    def test_equation():
        pass

    page = SimpleNamespace(module=None, function=test_equation, fixturenames=[])
    with pytest.raises(pytest.fail.Exception, match="test_equation hides the test"):
        conftest.pytest_generate_tests(page)


def test_a_copy_that_imports_an_own_layer_is_no_copy(tmp_path, monkeypatch):
    """Only the tests that every correct layer passes may judge it."""
    monkeypatch.setattr(target, "found", {})
    monkeypatch.setattr(target, "foreign", set())
    monkeypatch.setattr(target, "ABOVE", tmp_path)  # as if the tests were beside it
    assert copies.main(["add", "block", "--to", str(tmp_path)]) == 0
    (tmp_path / ".tinyblock" / "ffn.py.base").unlink()
    target.select(tmp_path)
    assert target.foreign == {"ffn", "block"}


def test_layers_beside_the_tests_are_those_that_the_project_imports(monkeypatch):
    monkeypatch.setattr(target, "found", {})
    target.select(PACKAGE)
    assert target.load("rope") is tinyblock.rope


def test_a_page_of_a_layer_that_is_not_selected_is_skipped(monkeypatch):
    monkeypatch.setattr(target, "found", {})
    with pytest.raises(pytest.skip.Exception, match=r"^rope.py is not in the folder"):
        target.load("rope")


def test_a_file_without_its_classes_is_named(monkeypatch):
    monkeypatch.setattr(Case, "find", lambda case: None)
    request = SimpleNamespace(module=page_of("ffn"))
    message = r"^ffn.py must define SwiGLU or FeedForward$"
    with pytest.raises(pytest.fail.Exception, match=message):
        every_layer.test_layer_is_defined(request)


def test_a_rope_has_the_head_size_that_a_layer_is_given():
    """A layer that is no copy gets the RoPE beside it."""
    target.select(PACKAGE)
    rope = page_of("attention").ROPE["rope"]
    options = {"d_model": 24, "num_heads": 4, "d_head": 20, "rope": rope}
    use_rope_of(tinyblock.CausalMultiHeadSelfAttention, options)
    assert options["rope"].d_k == 20


def test_a_folder_without_layers_is_an_error_that_names_them(tmp_path):
    names = "be or contain one of rmsnorm, ffn, rope, attention, block, transformer"
    message = re.escape(f"{tmp_path} must exist, and {names}")
    with pytest.raises(pytest.UsageError, match=message):
        target.select(tmp_path)


def test_one_page_in_a_strict_project(tmp_path):
    """The project's pytest collects the page, and knows nothing of tinyblock.

    Beside the copy is a layer of the project's own, which has no page.
    """
    layers = tmp_path / "strict" / "layers"
    layers.mkdir(parents=True)
    (tmp_path / "strict" / "__init__.py").touch()
    assert copies.main(["add", "rope", "--with-tests", "--to", str(layers)]) == 0
    (layers / "ffn.py").touch()
    options = ["--strict-markers", "--strict-config", "-W", "error", "-k", "float64"]
    code, printed = run_pytest(*options, folder=tmp_path, without=["tinyblock"])
    assert code == 0, printed
    assert re.search(r"\n=+ \d+ passed.* deselected", printed), printed


@pytest.mark.parametrize("layer", ["rope", "attention"])
def test_verify_md_names_cases_that_students_run(layer):
    """Its table finds a mistake by the first case that fails."""
    table = (PACKAGE.parent / "docs" / "verify.md").read_text()
    titles = re.findall(rf'`{layer}: test_equation`, from "(.*?)" \|', table)
    assert titles
    for title in titles:
        assert page_of(layer).CASES[title].is_common


def replace_once(path, old, new):
    text = path.read_text()
    assert text.count(old) == 1, f"{path.name} must have {old!r} once: {text}"
    path.write_text(text.replace(old, new))


def test_report_for_copies(tmp_path):
    """One layer has another eps by default, one is broken, and there is no block."""
    folder = tmp_path / "my layers"
    shutil.copytree(PACKAGE, folder, ignore=shutil.ignore_patterns(".pytest_cache"))
    for name in ("__init__", "block", "transformer"):
        (folder / f"{name}.py").unlink()
    replace_once(folder / "attention.py", "eps: float = 1e-5", "eps: float = 1e-4")
    replace_once(folder / "ffn.py", "F.silu(self.w1(x)) * self.w3(x)", "self.w1(x)")
    options = ["--layers=.", "-c", "contract/contract.ini"]
    options += ["-k", "equation and float64 and (SwiGLU or all)"]
    _, printed = run_pytest("contract", *options, folder=folder, without=["tinyblock"])
    failures = re.findall(r"\nFAILED (.*)", printed)
    assert len(failures) == 1, printed
    case = re.escape("ffn: test_equation, 3 of 4, first [SwiGLU, float64]: ")
    numbers = r"result in float64 at \[.*\]: got .*, expected .*, allowed "
    assert re.match(case + numbers, failures[0]), failures[0]
    assert "FAILURES" not in printed, "the report must have no tracebacks"
    assert "skipped" not in printed, "pages of layers that are not there must not run"
    assert not list(folder.rglob(".pytest_cache"))


def item_of(path, name, *marks):
    return SimpleNamespace(
        path=path, name=name, get_closest_marker=lambda mark: mark in marks
    )


def test_only_promises_about_a_layer_that_is_no_copy_are_left_out(monkeypatch):
    monkeypatch.setattr(conftest, "foreign", {"rope"})
    pages = PACKAGE / "contract"
    of_every_layer = item_of(pages / "test_rope.py", "test_later_tokens", "numbers")
    promise = item_of(pages / "test_rope.py", "test_any_strides")
    of_a_copy = item_of(pages / "test_ffn.py", "test_any_strides")
    of_the_project = item_of(PACKAGE.parent / "test_rope.py", "test_any_strides")
    left_out = []
    config = SimpleNamespace(
        option=SimpleNamespace(markexpr=""),
        getoption=lambda name, default: default,
        hook=SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items)),
    )
    items = [promise, of_every_layer, of_a_copy, of_the_project]
    conftest.pytest_collection_modifyitems(config, items)
    assert items == [of_every_layer, of_a_copy, of_the_project]
    assert left_out == [promise]
