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


def text_of(page):
    """Return a page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def tables(text):
    """Return each table of a text: its rows by their first cell, and their cells by column."""
    found = []
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        columns, _, *rows = [
            [cell.strip(" `") for cell in line.split("|")[1:-1]]
            for line in table.splitlines()
        ]
        found.append({row[0]: dict(zip(columns, row, strict=True)) for row in rows})
    return found


def require_shown(shown, printed, command):
    """Require each printed line to be shown; `...` stands for what is not, of lines or in one."""
    lines = [
        r"(?:.*\n)*?"
        if line == "..."
        # On CI or a wide terminal, pytest adds the reason to a line.
        else ".*".join(map(re.escape, line.split("..."))) + r".*\n"
        for line in shown.splitlines()
    ]
    if not re.fullmatch("".join(lines), printed):
        pytest.fail(f"{command} prints:\n{printed}\nThe page shows:\n{shown}")
