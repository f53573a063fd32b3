"""Numbers, and tables for Markdown and for a terminal."""

from collections.abc import Sequence
from decimal import Decimal


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table: the first column is aligned left, the others right."""
    widths = [max(3, *map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    rule = ["-" * widths[0]]
    rule += ["-" * (width - 1) + ":" for width in widths[1:]]
    lines = []
    for cells in (columns, rule, *rows):
        lines.append(f"| {' | '.join(_padded(cells, widths))} |")
    return "\n".join(lines)


def terminal(
    columns: Sequence[str], rows: Sequence[Sequence[str]], width: int = 120
) -> str:
    """Return a table as `markdown` does, without rules.

    Long cells of the first column lose their middle, if the table is wider than `width`.
    """
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    space = width - sum(2 + other for other in widths[1:])
    widths[0] = min(widths[0], max(space, 12))
    lines = []
    for first, *others in (columns, *rows):
        cells = [_shorten(first, widths[0]), *others]
        lines.append("  ".join(_padded(cells, widths)).rstrip())
    return "\n".join(lines)


def _padded(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [cells[0].ljust(widths[0]), *map(str.rjust, cells[1:], widths[1:])]


def _shorten(text: str, width: int) -> str:
    """Cut the middle out of a text that is too long, one third from its start."""
    if len(text) <= width:
        return text
    start = (width - 3) // 3
    return f"{text[:start]}...{text[len(text) - (width - 3 - start) :]}"


def number(value: float, digits: int = 3) -> str:
    """Write significant digits without an exponent: 0.0120, 1.23, 12300."""
    return f"{Decimal(f'{value:.{digits - 1}e}'):f}" if value else "0"


def si(value: float, unit: str = "", digits: int = 3) -> str:
    """Write a number with a decimal prefix, such as 3.11 MB or 12.3 ms."""
    if not value:
        return f"0 {unit}".strip()
    value = float(f"{1e6 * value:.{digits - 1}e}")  # so 999.6 is 1.00 k
    for prefix in ("u", "m", "", "k", "M", "G", "T"):
        if abs(value) < 1000:
            return f"{number(value, digits)} {prefix}{unit}".strip()
        value /= 1000
    return f"{number(value, digits)} P{unit}"


def share(value: float, digits: int = 3) -> str:
    """Write a fraction in percent, such as 4.20%."""
    return f"{number(100 * value, digits)}%"
