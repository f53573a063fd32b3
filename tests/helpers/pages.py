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


def cells_of(row):
    return [cell.strip(" `") for cell in row.split("|")[1:-1]]


def tables(text):
    """Return the rows of each table of a text, by column; the first column has their name."""
    found = []
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        columns, _, *rows = map(cells_of, table.splitlines())
        found.append([dict(zip(columns, row, strict=True)) for row in rows])
    return found


def name_of(row):
    return next(iter(row.values()))


def require_shown(shown, printed, command):
    """Require each printed line to be shown, but what `...` stands for, of lines or in one."""
    patterns = [
        r"(?:.*\n)*?"
        if line == "..."
        else ".*".join(map(re.escape, line.split("..."))) + "\n"
        for line in shown.splitlines()
    ]
    if not re.fullmatch("".join(patterns), printed):
        pytest.fail(f"{command} prints:\n{printed}\nThe page shows:\n{shown}")
