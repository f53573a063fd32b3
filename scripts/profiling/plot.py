"""A profile as a picture: the roofline on the left, and the parts on the right."""

from itertools import cycle

from lab.tables import number, share
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .measure import Profile
from .parts import NO_PART
from .rows import Row, folded
from .runs import NOISE

LABELED = 12  # parts with a marker of their own
BARS = 20  # at most


def draw(profile: Profile) -> Figure:
    bars = bars_of(profile)
    height = max(5, 2 + 0.3 * len(bars))
    longest = max(len(row.name) for row in bars)
    width = 13 + 0.15 * max(0, longest - 20)  # leaves room beside long names
    figure = Figure(figsize=(width, height), layout="constrained")
    title = profile.title
    if profile.others > NOISE:
        title += f" (other programs took {share(profile.others, 2)} of the time)"
    figure.suptitle(title, fontsize=11, fontweight="bold")
    figure.supxlabel(profile.machine, fontsize=8)
    left, right = figure.subplots(1, 2)
    _roofline(left, profile)
    _times(right, bars, profile.whole)
    return figure


def _roofline(axes: Axes, profile: Profile) -> None:
    """Place each part by its FLOPs per byte and its rate, below the roof.

    A part with unknown FLOPs is higher and further to the right than it is drawn.
    """
    rows = [row for row in profile.rows if row.flops_per_s and row.moved_bytes]
    rows.sort(key=lambda row: -row.total_s)
    intensities: list[float] = []
    for row, marker in zip(rows, cycle("osD^vPXphd*"), strict=False):
        label = row.name if len(intensities) < LABELED else None
        if label and row.is_bound:
            label += " (at least)"
        intensity = sum(row.flops.values()) / row.moved_bytes
        intensities.append(intensity)
        axes.loglog(
            intensity,
            row.flops_per_s,
            marker if label else ".",
            color=None if label else "gray",
            fillstyle="none" if row.is_bound else "full",
            label=label,
        )
    rates = profile.rates
    for dtype, flops_per_s in rates.flops_per_s.items():
        # Left of the ridge, copying takes longer than computing.
        ridge = flops_per_s / rates.bytes_per_s
        ends = [*intensities, ridge / 10, ridge * 10]
        roof = [min(ends) / 2, ridge, max(ends) * 2]
        allowed = [min(flops_per_s, rates.bytes_per_s * each) for each in roof]
        axes.loglog(roof, allowed, color="black")
        # The fastest parts are at the right end, so the name is at the left one.
        _name(axes, f"{dtype} matmul", (ridge, flops_per_s), above=True)
    _name(axes, "memory copy", (roof[0], allowed[0]), above=False)
    axes.set(
        xlabel="FLOPs per byte (parts without FLOPs, or with unknown ones, are not shown)",
        ylabel="FLOPs per second",
        title="How far from the roof?",
    )
    if rows:
        title = f"{LABELED} slowest of {len(rows)}" if len(rows) > LABELED else None
        axes.legend(fontsize=8, title=title)
    axes.margins(y=0.15)  # for the names of the lines
    axes.grid(alpha=0.3)


def _name(axes: Axes, text: str, start: tuple[float, float], above: bool) -> None:
    """Name a line from its left end on."""
    axes.annotate(
        text,
        start,
        xytext=(4, 4 if above else -4),
        textcoords="offset points",
        va="bottom" if above else "top",
    )


def bars_of(profile: Profile) -> list[Row]:
    """Return the rows of the table, and one for all others."""
    rows = [row for row in profile.rows if row.name != NO_PART]  # which takes no time
    return folded(rows, profile.whole.total_s, most=BARS)


def _times(axes: Axes, rows: list[Row], total: Row) -> None:
    """Draw a bar for each row, and the least time that the roofline allows."""
    whole = total.total_s
    names = [_label(row, whole) for row in rows]
    forward = [1e3 * (row.forward_s or 0.0) for row in rows]
    later = [
        1e3 * row.total_s - first for row, first in zip(rows, forward, strict=True)
    ]
    # Data in a cache, or changed in place, may take less.
    least = [
        0.0 if row.is_bound else 1e3 * min(row.least_s, max(0.0, row.total_s))
        for row in rows
    ]
    backward = [
        0.0 if _is_other(row) else ms for row, ms in zip(rows, later, strict=True)
    ]
    other = [ms if _is_other(row) else 0.0 for row, ms in zip(rows, later, strict=True)]
    axes.barh(names, forward, color="C0", label="forward")
    if any(backward):
        axes.barh(
            names, backward, left=forward, color="C0", alpha=0.5, label="backward"
        )
    axes.barh(names, other, color="C1", label="no part of the model")
    known = [(name, ms) for name, ms in zip(names, least, strict=True) if ms]
    if known:
        some, limits = zip(*known, strict=True)
        axes.barh(some, limits, fill=False, lw=1.5, label="least time, by the roof")
    axes.axvline(0, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.legend(fontsize=8)
    axes.set(
        xlabel="ms",
        title=f"Where do {number(1e3 * whole, total.digits)} ms go?",
    )


def _is_other(row: Row) -> bool:
    """Say if a row is an optimizer, the rest, or GPU idle."""
    return row.is_optimizer or row.forward_s is None


def _label(row: Row, whole: float) -> str:
    """Name a row with its time and its share of the whole."""
    taken = number(1e3 * row.total_s, row.digits)
    label = f"{row.name}: {taken} ms, {share(row.total_s / whole, row.digits)}"
    if row.is_bound:
        return f"{label}, least time unknown"
    return f"{label}, noise" if row.limit == "noise" else label
