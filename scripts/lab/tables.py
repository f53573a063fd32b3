"""Results as text: numbers with units, and aligned Markdown tables, for a terminal, a file or a page."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .timing import Spread


@dataclass
class Table:
    """A title above rows of cells; the first column is text, the others are numbers. `str` makes it Markdown."""

    title: str
    columns: Sequence[str]
    rows: list[list[str]] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.title}\n\n{markdown(self.columns, self.rows)}"


Section = Table | str


def show(sections: Iterable[Section]) -> None:
    """Print tables and paragraphs, with an empty line between two."""
    print("\n\n".join(map(str, sections)), flush=True)


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of at least one column. The first is aligned to the left, the others to the right."""
    lines = [_escaped(line) for line in (columns, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    rule = ["-" * (width - 1) + ":" for width in widths]
    rule[0] = "-" * widths[0]
    header, *body = lines
    return "\n".join(_aligned(line, widths) for line in (header, rule, *body))


def _escaped(cells: Sequence[str]) -> list[str]:
    return [cell.replace("|", "\\|") for cell in cells]


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    first_cell, *other_cells = cells
    first_width, *other_widths = widths
    padded = [first_cell.ljust(first_width)]
    for cell, width in zip(other_cells, other_widths, strict=True):
        padded.append(cell.rjust(width))
    return f"| {' | '.join(padded)} |"


def number(value: float | None, digits: int = 3) -> str:
    """Write a number without an exponent; None is n/a.

    Numbers from 1 on have this many digits, at least 2: 1.23, 12.3. Smaller ones have one significant digit less:
    0.00040.
    """
    if value is None:
        return "n/a"
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        # -0.0 has no sign either.
        return f"{0:.{digits - 1}f}"
    # Rounding may carry: 99.96 has two digits before the point, and 100 has three.
    exponent = _rounded_exponent(value, digits)
    if exponent < 0:
        # So may rounding to one digit less: 0.996 becomes 1.0, which is written as 1.00.
        exponent = _rounded_exponent(value, digits - 1)
    significant = digits if exponent >= 0 else digits - 1
    decimals = max(0, significant - 1 - exponent)
    return f"{value:.{decimals}f}"


def _rounded_exponent(value: float, significant: int) -> int:
    """Return the power of ten of the first digit, once the value is rounded to this many digits."""
    _, _, exponent = f"{value:.{significant - 1}e}".partition("e")
    return int(exponent)


def si(value: float | None, unit: str = "") -> str:
    """Write a number with a decimal prefix, such as 3.11 MB."""
    if value is None:
        return "n/a"
    for factor, prefix in (
        (1e15, "P"),
        (1e12, "T"),
        (1e9, "G"),
        (1e6, "M"),
        (1e3, "k"),
    ):
        if abs(value) >= 0.9995 * factor:
            return f"{number(value / factor)} {prefix}{unit}"
    return f"{number(value) if value % 1 else int(value)} {unit}".rstrip()


def share(value: float | None) -> str:
    """Write a fraction in percent."""
    if value is None:
        return "n/a"
    digits = 2 if abs(value) < 0.1 else 3
    return f"{number(100 * value, digits)}%"


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def time_unit(seconds: float) -> tuple[str, float]:
    """Return the unit for times of this order, and how many of it make a second."""
    return ("us", 1e6) if seconds < 1e-3 else ("ms", 1e3)


def number_range(low: float, high: float) -> str:
    """Write a range, such as -22.8 to 76.5."""
    return f"{number(low)} to {number(high)}"


def spread_cells(spread: Spread, factor: float) -> list[str]:
    """Return the median, and the range from p20 to p80, each multiplied by `factor`."""
    return [
        number(spread.median * factor),
        number_range(spread.p20 * factor, spread.p80 * factor),
    ]
