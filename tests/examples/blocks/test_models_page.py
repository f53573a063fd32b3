"""docs/models.md: each row has a test of its name, and each file the lines that it says."""

import ast
import math
import re
from pathlib import Path
from types import SimpleNamespace

import models_without_row
import pytest
from models_without_row import rows
from their_models import TOLERANCE

ROOT = Path(__file__).parents[3]
PAGE = models_without_row.PAGE.read_text()
BLOCKS = ROOT / "examples" / "blocks"
FILES = sorted(BLOCKS.glob("*.py"))
NAMES = {path.stem for path in FILES}


def lines_of_code(source):
    """Count the lines of statements: no docstrings, no `main`, no code of a script."""
    tree = ast.parse(source)
    kept = [
        statement
        for statement in tree.body
        if not isinstance(statement, ast.If)
        and getattr(statement, "name", None) != "main"
    ]
    tree.body = kept
    lines = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and not is_docstring(node):
            lines.update(lines_of(node))
    for node in ast.walk(tree):
        if is_docstring(node):
            lines.difference_update(lines_of(node))
    text = source.splitlines()
    return sum(
        bool(text[line - 1].strip()) and not text[line - 1].strip().startswith("#")
        for line in lines
    )


def lines_of(node):
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def is_docstring(node):
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_page_says_how_many_lines_of_code_a_file_has(path):
    numbers = set(re.findall(rf"`{path.stem}` \((\d+)\)", PAGE))
    assert numbers == {str(lines_of_code(path.read_text()))}


def imported_names(tree):
    """Return the module of each name that a file imports from a module."""
    return {
        imported.name: statement.module
        for statement in tree.body
        if isinstance(statement, ast.ImportFrom)
        for imported in statement.names
    }


def used_by_tests(path):
    """Return what each test of a file uses, at any depth: names, modules and keywords."""
    tree = ast.parse(path.read_text())
    modules = imported_names(tree)
    definitions: dict[str, ast.AST] = {}
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            definitions[statement.name] = statement
        elif isinstance(statement, ast.Assign):
            for target in statement.targets:
                definitions[ast.unparse(target)] = statement

    def add(name, found):
        for node in ast.walk(definitions[name]):
            used = getattr(node, "id", None) or getattr(node, "arg", None)
            if used is not None and used not in found:
                found.update({used, modules.get(used, used)})
                if used in definitions:
                    add(used, found)
        return found

    return {name: add(name, set()) for name in definitions if name.startswith("test_")}


def with_dependencies(files):
    """Add the files of blocks/ that these files import."""
    found = set(files)
    for file in files:
        tree = ast.parse((BLOCKS / f"{file}.py").read_text())
        found |= with_dependencies(NAMES.intersection(imported_names(tree).values()))
    return found


# What the test of each model uses, and the cells of its row, by transformers' names.
TESTS = {
    test.removeprefix("test_equals_"): used
    for path in sorted(Path(__file__).parent.glob("test_*.py"))
    for test, used in used_by_tests(path).items()
    if used & {"require_same_model", "require_same_layer"}
}
ROWS = {
    kind: [cell.strip() for cell in row.strip("|").split("|")]
    for row, kind in re.findall(r"^(\|[^|]+\| `(\w+)` \|.*)$", PAGE, re.MULTILINE)
}
each_row = pytest.mark.parametrize("kind", ROWS)


def test_each_row_has_a_test_of_its_name():
    """For a model that transformers calls mistral, test_equals_mistral compares them."""
    assert rows(PAGE) == ROWS.keys() == TESTS.keys()


@each_row
def test_a_row_names_the_files_that_its_test_uses(kind):
    *_, files, _ = ROWS[kind]
    named = set(re.findall(r"`(\w+)` \(\d+\)", files))
    assert named == with_dependencies(TESTS[kind] & NAMES)


def test_the_page_states_the_tolerance_of_the_tests():
    assert f"less than 2^{math.log2(TOLERANCE):g} of its norm" in " ".join(PAGE.split())


# What a test uses, and the words for it in the row of the model.
WORDS = {
    "bounded_scores": "bounded scores",
    "depth_scaled_residual": "residual sums scaled by depth",
    "experts": "experts",
    "gated_delta_net": "Gated DeltaNet",
    "gelu_gate": "GeGLU",
    "hyper_connections": "four residual streams",
    "indexer": "indexer",
    "is_normalized": "not normalized",
    "is_softmax": "experts with softmax scores",
    "joint_qk_norm": "joint q/k norm",
    "kimi_delta_attention": "delta attention",
    "latent_attention": "latent attention",
    "no_positions": "positions",
    "norm_without_gain": "without gains",
    "output_gate": "gate per",
    "parallel_branches": "parallel branches",
    "partial_rope": "RoPE on a part of the head",
    "qk_norm": "q/k norm",
    "reordered_norm": "norms after the branches",
    "residual_gate": "gate for the residual stream",
    "sandwich_norm": "two norms per branch",
    "scaled_residual": "scaled residual sums",
    "short_convolution": "short convolutions",
    "sinks": "sinks",
    "squared_relu": "squared ReLU",
    "windows": "windows",
}


@each_row
def test_a_row_says_what_its_test_changes(kind):
    _, _, changes, _, _ = ROWS[kind]
    for model, _, others, _, _ in ROWS.values():
        if re.search(rf"{model.split(',')[0]} with", changes):  # "OLMo 2 with windows"
            changes += others
    for used in WORDS.keys() & TESTS[kind]:
        assert WORDS[used] in changes


def test_models_without_row_prints_their_decoder_layers(tmp_path, monkeypatch, capsys):
    for model in ("old", "new"):
        folder = tmp_path / "models" / model
        folder.mkdir(parents=True)
        source = "class ALayer: ...\nclass ADecoderLayer(Module): ...\n"
        source += f"class {model}DecoderLayer(Module): ...\n"
        (folder / f"modeling_{model}.py").write_text(source)
    page = tmp_path / "models.md"
    page.write_text("| Old | `old` | yes |\n| Removed | `removed` | yes |\n")
    package = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(models_without_row, "find_spec", lambda name: package)
    monkeypatch.setattr(models_without_row, "PAGE", page)
    models_without_row.main()
    assert capsys.readouterr().out.splitlines() == [
        "new: ADecoderLayer, newDecoderLayer",
        "1 of 2 models have a row",
    ]


def test_without_transformers_the_list_names_the_repair(monkeypatch):
    monkeypatch.setattr(models_without_row, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="must be installed: pip install transformers"):
        models_without_row.main()
