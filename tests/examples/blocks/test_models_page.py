"""docs/models.md: each row has a test of its name, and each file the lines that it says."""

import ast
import re
from pathlib import Path
from types import SimpleNamespace

import models_without_row
import pytest
from models_without_row import rows

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "models.md").read_text()
FILES = sorted((ROOT / "examples" / "blocks").glob("*.py"))


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


def test_each_row_has_a_test_of_its_name():
    """For a model that transformers calls mistral, test_equals_mistral compares them."""
    tests = set()
    others = set(Path(__file__).parent.glob("test_*.py")) - {Path(__file__)}
    for path in others:
        source = path.read_text()
        for function in re.split(r"^def ", source, flags=re.MULTILINE):
            if "require_same_model(" in function or "require_same_layer(" in function:
                tests.add(function.partition("(")[0].removeprefix("test_equals_"))
    assert rows(PAGE) == tests


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
