"""examples/README.md: what each file imports, and how the layers are called."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from imports import neighbors_of
from language_model import LanguageModel
from torch import nn

EXAMPLES = Path(__file__).parents[2] / "examples"
PAGE = (EXAMPLES / "README.md").read_text()
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))


def row_of(name):
    """Return the cells of the row whose command calls an example."""
    [row] = re.findall(rf"^\| `[^`]*\b{name}(?:\.py|:)[^`]*`.*\|$", PAGE, re.MULTILINE)
    return [cell.strip() for cell in row.strip("|").split("|")]


@pytest.mark.parametrize("name", NAMES)
def test_a_row_names_all_examples_that_a_copy_needs(name):
    *_, imports = row_of(name)
    named = set(re.findall(r"\w+", imports))
    assert named == neighbors_of(EXAMPLES / f"{name}.py")


@pytest.mark.parametrize("name", NAMES)
def test_a_row_names_the_packages_that_the_docstring_installs(name):
    *_, packages, _ = row_of(name)
    tree = ast.parse((EXAMPLES / f"{name}.py").read_text())
    installed = re.findall(r"pip install (.*)", ast.get_docstring(tree) or "")
    assert set(re.findall(r"\w+", packages)) == set(" ".join(installed).split())


@pytest.mark.parametrize("option", ["norm", "ffn", "attention", "block"])
def test_the_page_says_how_an_option_is_called(option):
    calls = []

    def note(*sizes, **options):
        calls.append((len(sizes), set(options)))
        return nn.Identity()

    options: dict[str, Any] = {option: note}
    LanguageModel(50, 1, 8, 2, max_seq_len=4, **options)
    [arguments] = re.findall(
        rf"^\| `{option}` \| `{option}\((.*?)\)`", PAGE, re.MULTILINE
    )
    named = re.findall(r"(\w+)=", arguments)
    positional = len(arguments.split(", ")) - len(named)
    assert calls, "it is not called"
    for call in calls:
        assert call == (positional, set(named))
