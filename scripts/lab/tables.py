"""Numbers, and Markdown tables that are also aligned in a terminal."""

from collections.abc import Sequence
from decimal import Decimal


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table: the first column is aligned left, the others right."""
    widths = [max(3, *map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    rule = ["-" * widths[0]]
    rule += ["-" * (width - 1) + ":" for width in widths[1:]]
    lines = []
    for cells in (columns, rule, *rows):
        padded = [cells[0].ljust(widths[0])]
        padded += map(str.rjust, cells[1:], widths[1:])
        lines.append(f"| {' | '.join(padded)} |")
    return "\n".join(lines)


def number(value: float) -> str:
    """Write three significant digits without an exponent: 0.0120, 1.23, 12300."""
    return f"{Decimal(f'{value:#.3g}'):f}" if value else "0"


def si(value: float, unit: str = "") -> str:
    """Write a number with a decimal prefix, such as 3.11 MB or 12.3 ms."""
    if not value:
        return f"0 {unit}".strip()
    value *= 1e6
    for prefix in ("u", "m", "", "k", "M", "G", "T"):
        if abs(value) < 999.5:
            return f"{number(value)} {prefix}{unit}".strip()
        value /= 1000
    return f"{number(value)} P{unit}"


def share(value: float) -> str:
    """Write a fraction in percent, such as 4.20%."""
    return f"{number(100 * value)}%"
