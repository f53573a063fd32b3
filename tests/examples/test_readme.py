"""examples/README.md names all examples, and says how the layers of users are called."""

import re
from pathlib import Path
from typing import Any

import pytest
from language_model import LanguageModel
from torch import nn

EXAMPLES = Path(__file__).parents[2] / "examples"
PAGE = (EXAMPLES / "README.md").read_text()


def test_the_page_names_each_example():
    named = re.findall(r"examples/(\w+)\.py|--block (\w+):build", PAGE)
    assert {"".join(names) for names in named} == {
        path.stem for path in EXAMPLES.glob("*.py")
    }


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
