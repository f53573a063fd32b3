"""A profile as a picture: the roofline on the left, and the parts on the right."""

from itertools import cycle
from pathlib import Path

from lab.tables import number, share
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .measure import Profile


def plot(profile: Profile, path: Path) -> None:
    """Draw the profile in the format that the suffix of `path` names."""
    height = max(5, 2 + 0.3 * len(profile.rows))
    figure = Figure(figsize=(12, height), layout="constrained")
    figure.suptitle(profile.title, fontsize=11, fontweight="bold")
    figure.supxlabel(profile.machine, fontsize=8)
    left, right = figure.subplots(1, 2)
    _roofline(left, profile)
    _times(right, profile)
    figure.savefig(path, dpi=144)


def _roofline(axes: Axes, profile: Profile) -> None:
    """Place each part by its FLOPs per byte and its rate, below both limits."""
    rates = profile.rates
    rows = [row for row in profile.rows if row.flops and row.total > 0]
    for row, marker in zip(rows, cycle("osD^vPXphd*"), strict=False):
        axes.loglog(
            row.flops / row.bytes, row.flops / row.total, marker, label=row.name
        )
    axes.axhline(rates.flops, color="black", label="matmul")
    copied = [(byte, byte * rates.bytes) for byte in (1, 10)]
    axes.axline(*copied, color="black", linestyle="dashed", label="memory copy")
    axes.set(
        xlabel="FLOP per byte", ylabel="FLOP/s", title="How far from the roofline?"
    )
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)


def _times(axes: Axes, profile: Profile) -> None:
    """Draw a bar for each row, and the least time that the roofline allows."""
    rows, whole = profile.rows, profile.whole.total
    names = [
        f"{row.name}: {number(1e3 * row.total)} ms, {share(row.total / whole)}"
        for row in rows
    ]
    axes.barh(names, [1e3 * row.total for row in rows], color="C0", alpha=0.5)
    axes.barh(names, [1e3 * row.forward for row in rows], color="C0")
    axes.barh(names, [1e3 * row.least for row in rows], fill=False, linewidth=1.5)
    axes.invert_yaxis()
    axes.set_xlabel("ms; dark: forward; outline: time at the limit")
    axes.set_title(f"Where do {number(1e3 * whole)} ms go?")
