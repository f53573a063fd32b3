"""A profile as a picture: the roofline on the left, and the parts on the right."""

from pathlib import Path
from typing import Any

from lab.tables import number, share
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from .measure import Profile

_MARKERS = "osD^vPXphd*"  # for people who cannot tell the colors apart


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


def _style(index: int) -> dict[str, Any]:
    marker = _MARKERS[index % len(_MARKERS)]
    return {"color": f"C{index % 10}", "marker": marker, "linestyle": ""}


def _roofline(axes: Axes, profile: Profile) -> None:
    """Place each part by its FLOPs per byte and its rate, below the roofline."""
    intensities = [profile.rates.flops / profile.rates.bytes]
    heights = [profile.rates.flops]
    for index, row in enumerate(profile.rows):
        if row.flops and row.total > 0:
            intensities.append(row.flops / row.bytes)
            heights.append(row.flops / row.total)
            axes.plot(intensities[-1], heights[-1], **_style(index))
    ends = [min(intensities) / 2, intensities[0], 2 * max(intensities)]
    roof = [min(profile.rates.flops, end * profile.rates.bytes) for end in ends]
    axes.plot(ends, roof, color="black", label="measured limit")
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="FLOP/s")
    # At least one decade, or an axis has no labeled tick.
    axes.set_ylim(min(heights) / 4, 4 * max(heights))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_title("How far from the roofline?")
    axes.legend()
    axes.grid(alpha=0.3)


def _times(axes: Axes, profile: Profile) -> None:
    """Draw a bar for each row, with a line at the least time that the roofline allows."""
    longest = max(1e3 * max(row.total, row.least) for row in profile.rows)
    beside = axes.get_yaxis_transform()
    for index, row in enumerate(profile.rows):
        style = _style(index)
        total, least = 1e3 * row.total, 1e3 * row.least
        axes.barh(index, total, color=style["color"], alpha=0.5)
        axes.barh(index, 1e3 * row.forward, color=style["color"])
        if row.bytes:
            axes.vlines(least, index - 0.4, index + 0.4, color="black", linewidth=2)
            # The marker of the roofline, beside the name.
            axes.plot(-0.03, index, transform=beside, clip_on=False, **style)
        # Beyond the bar, and the line of the limit.
        place = max(0.0, total, least) + 0.015 * longest
        label = f"{number(total)} ms, {share(row.total / profile.whole.total)}"
        axes.text(place, index, label, va="center", fontsize=9)
    names = [row.name for row in profile.rows]
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0, pad=18)
    axes.invert_yaxis()
    axes.set_xlim(right=1.5 * longest)
    axes.set_xlabel("ms; dark: forward, light: backward; black line: time at the limit")
    axes.set_title(f"Where do {number(1e3 * profile.whole.total)} ms go?")
