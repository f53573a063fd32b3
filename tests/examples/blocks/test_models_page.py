"""docs/models.md agrees with the files of blocks/ and the tests of models."""

import ast
import math
import re
from pathlib import Path

import models_without_row
import pytest
from imports import imports_of, neighbors_of
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


# The cells of each row, by the name of its model in transformers.
ROWS = {
    kind: [cell.strip() for cell in row.strip("|").split("|")]
    for row, kind in re.findall(r"^(\|[^|]+\| `(\w+)` \|.*)$", PAGE, re.MULTILINE)
}
each_row = pytest.mark.parametrize("kind", ROWS)
# The test file that compares each model, in a test of its name: test_equals_mistral.
TEST_FILES = {
    kind: path
    for path in sorted(Path(__file__).parent.glob("test_*.py"))
    for kind in re.findall(r"^def test_equals_(\w+)\(", path.read_text(), re.MULTILINE)
}


def files_of(kind):
    """Return the files of blocks/ that a row names."""
    *_, files, _ = ROWS[kind]
    return set(re.findall(r"`(\w+)` \(\d+\)", files))


def test_each_row_has_a_test_of_its_name():
    assert rows(PAGE) == ROWS.keys() == TEST_FILES.keys()


@each_row
def test_the_test_of_a_row_imports_its_files(kind):
    """Also indirectly: a test of DeltaNet need not import delta_rule."""
    imported = imports_of(TEST_FILES[kind])
    for file in imported & NAMES:
        imported |= neighbors_of(BLOCKS / f"{file}.py")
    assert files_of(kind) <= imported, f"{TEST_FILES[kind].name} does not import them"


def test_the_page_states_the_tolerance_of_the_tests():
    assert f"less than 2^{math.log2(TOLERANCE):g} of its norm" in " ".join(PAGE.split())


# How the row of a model says what a file changes.
WORDS = {
    "bounded_scores": "bounded scores",
    "depth_scaled_residual": "residual sums scaled by depth",
    "experts": "experts",
    "gated_delta_net": "Gated DeltaNet",
    "gelu_gate": "GeGLU",
    "hyper_connections": "four residual streams",
    "indexer": "indexer",
    "joint_qk_norm": "joint q/k norm",
    "kimi_delta_attention": "Kimi delta attention",
    "latent_attention": "latent attention",
    "no_positions": "positions",
    "norm_without_gain": "without gains",
    "output_gate": "gate per",
    "parallel_branches": "parallel branches",
    "partial_rope": "RoPE on a part of the head",
    "reordered_norm": "norms after the branches",
    "residual_gate": "gate for the residual stream",
    "sandwich_norm": "two norms per branch",
    "scaled_residual": "scaled residual sums",
    "short_convolution": "short convolutions",
    "sinks": "sinks",
    "squared_relu": "squared ReLU",
    "windows": "windows",
}
# The tests of these models compare no experts.
WITHOUT_EXPERTS = {"gpt_oss", "deepseek_v4"}


@each_row
def test_a_row_names_the_files_of_its_words_and_what_they_import(kind):
    _, _, changes, _, _ = ROWS[kind]
    expected = set()
    for file, words in WORDS.items():
        if words in changes:
            expected.add(file)
            expected.update(neighbors_of(BLOCKS / f"{file}.py"))
    if kind in WITHOUT_EXPERTS:
        expected.remove("experts")
    assert files_of(kind) == expected
