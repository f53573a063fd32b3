"""Write the part of a page that a script owns: the text between two marks."""

from pathlib import Path

END = "<!-- to here. -->\n"


def begin(command: str) -> str:
    """Return the mark before the text that a command writes."""
    return f"<!-- {command} replaces everything from here -->\n"


def replaced(page: Path, command: str, text: str) -> str:
    """Return the page with this text between the mark of the command and the next end.

    Raises:
        ValueError: there is no such page, or it has no such marks.
    """
    mark = begin(command)
    old = page.read_text() if page.exists() else ""
    head, found, rest = old.partition(mark)
    _, end, tail = rest.partition(END)
    if not found or not end:
        raise ValueError(
            f"--write must be a page with the lines {mark.strip()} and {END.strip()}, got {page}"
        )
    return f"{head}{mark}\n{text}\n{END}{tail}"
