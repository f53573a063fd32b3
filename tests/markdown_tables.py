"""Markdown tables in the output of scripts."""


def table_rows(text):
    """Return the rows of all tables, headers and rules included, as lists of cells."""
    rows = []
    for line in text.splitlines():
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.split("|")[1:-1]])
    return rows
