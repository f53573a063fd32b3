"""What a page shows of the output of a command."""

import re

import pytest


def blocks(page):
    """Return the text of each block of code."""
    return re.findall(r"^```\w+\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def block_with(page, text):
    """Return the one block of code that contains a text."""
    found = [block for block in blocks(page) if text in block]
    if len(found) != 1:
        pytest.fail(f"{page.name} must have one block with {text!r}, got {len(found)}")
    return found[0]


def require_shown(shown, printed, command):
    """Require each printed line to be shown; a line `...` stands for some that are not."""
    patterns = {"...": r"(?:.*\n)*?"}
    # On CI or a wide terminal, pytest adds the reason to a line.
    lines = [
        patterns.get(line, re.escape(line) + r".*\n") for line in shown.splitlines()
    ]
    if not re.fullmatch("".join(lines), printed):
        pytest.fail(f"{command} prints:\n{printed}\nThe page shows:\n{shown}")
