"""Numbers with units."""

from lab.tables import number


def si(value: float, unit: str = "") -> str:
    """Write a number with a decimal prefix, such as 3.11 MB."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(value) < 999.5:
            return f"{number(value)} {prefix}{unit}".strip()
        value /= 1000
    return f"{number(value)} P{unit}"


def share(value: float) -> str:
    """Write a fraction in percent, such as 4.2%."""
    return f"{value:.1%}" if abs(value) < 0.9995 else f"{value:.0%}"


def seconds(value: float) -> str:
    """Write a time, such as 12.3 ms."""
    if abs(value) < 0.9995e-3:
        return f"{number(1e6 * value)} us"
    if abs(value) < 0.9995:
        return f"{number(1e3 * value)} ms"
    return f"{number(value)} s"
