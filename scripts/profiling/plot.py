"""A profile as a picture: the roofline on the left, and the parts on the right."""

from pathlib import Path
from typing import Any

from lab.machine import in_one_line
from lab.tables import number
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .measure import Profile
from .report import title
from .units import share

# Okabe and Ito's palette, which people with any kind of color blindness can tell apart.
_COLORS = ["#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#8A8A00"]
_MARKERS = "osD^vPXphd*"


def plot(profile: Profile, path: Path) -> None:
    """Draw the profile in the format that the suffix of `path` names."""
    height = max(5, 2 + 0.3 * len(profile.rows))
    figure = Figure(figsize=(12, height), layout="constrained")
    figure.suptitle(title(profile), fontsize=11, fontweight="bold")
    figure.supxlabel(in_one_line(profile.environment), fontsize=8)
    left, right = figure.subplots(1, 2)
    _roofline(left, profile)
    _times(right, profile)
    figure.savefig(path, dpi=144)


def _style(index: int) -> dict[str, Any]:
    return {
        "color": _COLORS[index % len(_COLORS)],
        "marker": _MARKERS[index % len(_MARKERS)],
        "linestyle": "",
    }


def _roofline(axes: Axes, profile: Profile) -> None:
    """Place each part by its FLOPs per byte and its rate, below the roofline."""
    intensities = [profile.ceilings.flops / profile.ceilings.bytes]
    for index, row in enumerate(profile.rows[:-1]):
        if row.work.flops and row.work.bytes and row.total > 0:
            intensities.append(row.work.flops / row.work.bytes)
            axes.plot(intensities[-1], row.work.flops / row.total, **_style(index))
    for rates, name, line in (
        (profile.ceilings, "measured", "-"),
        (profile.datasheet, "datasheet", ":"),
    ):
        if rates is not None:
            ridge = rates.flops / rates.bytes
            ends = [min(intensities) / 2, ridge, 2 * max(*intensities, ridge)]
            roof = [min(rates.flops, end * rates.bytes) for end in ends]
            axes.plot(ends, roof, line, color="black", label=name)
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="FLOP/s")
    axes.set_title("How far from the roofline?")
    axes.legend()
    axes.grid(alpha=0.3)


def _times(axes: Axes, profile: Profile) -> None:
    """Draw a bar for each row, with a line at the least time that the roofline allows."""
    *rows, whole = profile.rows
    names = [row.name for row in rows]
    styles = [_style(index) for index in range(len(rows))]
    colors = [style["color"] for style in styles]
    total = [1e3 * row.total for row in rows]
    forward = [1e3 * row.seconds.get("forward", 0.0) for row in rows]
    bars = axes.barh(names, total, color=colors, alpha=0.5)
    labels = [f"{number(ms)} ms, {share(1e-3 * ms / whole.total)}" for ms in total]
    axes.bar_label(bars, labels, padding=5, fontsize=9)
    axes.barh(names, forward, color=colors)
    for index, row in enumerate(rows):
        if row.work.bytes:
            least = 1e3 * row.least_seconds
            axes.vlines(least, index - 0.4, index + 0.4, color="black", linewidth=2)
            # The marker of the roofline, beside the name.
            beside = axes.get_yaxis_transform()
            axes.plot(-0.03, index, transform=beside, clip_on=False, **styles[index])
    axes.tick_params(axis="y", length=0, pad=18)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.5 * max(total))
    axes.set_xlabel("ms; dark: forward, light: backward; black line: roofline")
    axes.set_title(f"Where do {number(1e3 * whole.total)} ms go?")
