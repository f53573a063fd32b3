"""A profile as a picture: the roofline on the left, and the parts on the right."""

from pathlib import Path
from typing import Any

from lab.machine import in_one_line
from lab.tables import number
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

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
    rates_seen = [profile.rates.flops]
    intensities = [profile.rates.flops / profile.rates.bytes]
    for index, row in enumerate(profile.rows):
        if row.flops and row.bytes and row.total > 0:
            intensities.append(row.flops / row.bytes)
            rates_seen.append(row.flops / row.total)
            axes.plot(intensities[-1], rates_seen[-1], **_style(index))
    for rates, name, line in (
        (profile.rates, "measured", "-"),
        (profile.datasheet, "datasheet", ":"),
    ):
        if rates is not None:
            ridge = rates.flops / rates.bytes
            ends = [
                min(intensities) / 2,
                ridge,
                2 * max(*intensities, ridge, 10 * min(intensities)),
            ]
            roof = [min(rates.flops, end * rates.bytes) for end in ends]
            axes.plot(ends, roof, line, color="black", label=f"{name} limit")
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="FLOP/s")
    axes.xaxis.set_minor_formatter(NullFormatter())
    # At least one decade, or the axis has no labeled tick.
    axes.set_ylim(min(rates_seen) / 4, max(4 * max(rates_seen), 2.5 * min(rates_seen)))
    axes.set_title("How far from the roofline?")
    axes.legend()
    axes.grid(alpha=0.3)


def _times(axes: Axes, profile: Profile) -> None:
    """Draw a bar for each row, with a line at the least time that the roofline allows."""
    rows, whole = profile.rows, profile.whole
    names = [row.name for row in rows]
    styles = [_style(index) for index in range(len(rows))]
    colors = [style["color"] for style in styles]
    total = [1e3 * row.total for row in rows]
    forward = [1e3 * row.forward for row in rows]
    axes.barh(names, total, color=colors, alpha=0.5)
    ends = [max(ms, 1e3 * row.least) for ms, row in zip(total, rows, strict=True)]
    labels = [f"{number(ms)} ms, {share(1e-3 * ms / whole.total)}" for ms in total]
    for index, label in enumerate(labels):  # beyond the bar, and the line of the limit
        place = max(0.0, ends[index]) + 0.015 * max(ends)
        axes.text(place, index, label, va="center", fontsize=9)
    axes.barh(names, forward, color=colors)
    for index, row in enumerate(rows):
        if row.bytes:
            least = 1e3 * row.least
            axes.vlines(least, index - 0.4, index + 0.4, color="black", linewidth=2)
            # The marker of the roofline, beside the name.
            beside = axes.get_yaxis_transform()
            axes.plot(-0.03, index, transform=beside, clip_on=False, **styles[index])
    axes.tick_params(axis="y", length=0, pad=18)
    axes.invert_yaxis()
    axes.set_xlim(min(0.0, 1.1 * min(total)), 1.5 * max(ends))
    axes.set_xlabel("ms; dark: forward, light: backward; black line: time at the limit")
    axes.set_title(f"Where do {number(1e3 * whole.total)} ms go?")
