"""Draw a profile as a picture to be read 800 pixels wide: roofline and parts of one size, or the scaling of a sweep."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

from lab.machine import Rates
from lab.plots import BELOW, COLORS, MARKERS, new_figure, save
from lab.tables import number, share, time_unit
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from .analysis import Analysis, analyze, part_seconds
from .records import Part, Point, Profile
from .report import (
    describe,
    describe_rates,
    doubts_of,
    interruption,
    model_name,
    origin,
    value_on,
)

_WARNING = "#B00000"


def plot(profile: Profile, path: Path) -> None:
    """Draw the points of a profile in the format that the suffix of `path` names."""
    points = [point for point in profile.points if isinstance(point, Point)]
    title = describe(*(point.size for point in points))
    warnings = [
        f"{doubt.claim}: {'; '.join(doubt.reasons)}" for doubt in doubts_of(profile)
    ]
    warnings.extend(interruption(profile))
    for warning in warnings:
        title = "\n".join([title, *textwrap.wrap(warning, 120)])
    figure = new_figure(title, origin(profile))
    if warnings:
        figure.suptitle(title, fontsize=10, fontweight="bold", color=_WARNING)
    axis = profile.settings.sweep
    if axis is not None:
        _sweep(figure, profile, points, axis)
    else:
        left, right = figure.subplots(1, 2, width_ratios=[1, 1.1])
        analysis = analyze(points[0], profile)
        _roofline(left, points[0], analysis, profile)
        _times(right, points[0], analysis, profile.settings.mode)
    save(figure, path)


def _color(index: int) -> str:
    return COLORS[index % len(COLORS)]


def _marker(index: int) -> str:
    return MARKERS[index % len(MARKERS)]


def _roofline(axes: Axes, point: Point, analysis: Analysis, profile: Profile) -> None:
    """Place each pass of each part, by its marker beside the names on the right, and the whole."""
    intensities = [profile.ceilings.rates.ridge]
    for index, part in enumerate(point.addends):
        intensities += _place(axes, part, _color(index), _marker(index), size=7)
    intensities += _place(axes, point.whole, "black", "*", size=11)
    low, high = min(intensities) / 2, max(intensities) * 2
    if analysis.roofline_seconds is not None:
        _roof(axes, "measured", "-", profile.ceilings.rates, low, high)
    if profile.datasheet is not None:
        _roof(axes, "datasheet", ":", profile.datasheet, low, high)
    filled = "forward" if point.optimizer is None else "forward and AdamW"
    _explain(axes, f"filled: {filled}; star: the {model_name(point.size)}", "full")
    if "backward" in point.whole.passes:
        _explain(axes, "hollow: backward", "none")
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="FLOP/s")
    has_roofline = analysis.roofline_seconds is not None
    title = "How far from the roofline?" if has_roofline else "How fast are the parts?"
    axes.set_title(title, fontsize=11)
    axes.grid(alpha=0.3)
    axes.legend(**BELOW, ncols=1)


def _place(axes: Axes, part: Part, color: str, marker: str, size: float) -> list[float]:
    """Draw a marker for each pass that was timed alone, and return where they are along the axis."""
    intensities = []
    for name, each in part.passes.items():
        if name in ("train", "step") or each.flops_per_second is None:
            continue
        intensities.append(each.cost.intensity)
        axes.plot(
            each.cost.intensity,
            each.flops_per_second,
            linestyle="",
            color=color,
            marker=marker,
            markersize=size,
            fillstyle="none" if name == "backward" else "full",
        )
    return intensities


def _explain(axes: Axes, label: str, fill: str) -> None:
    """Add a line to the legend that says which markers are filled."""
    axes.plot([], [], "o", color="grey", fillstyle=fill, label=label)


def _roof(
    axes: Axes, name: str, line: str, rates: Rates, low: float, high: float
) -> None:
    """Draw a roofline between two intensities."""
    corners = [low, min(max(rates.ridge, low), high), high]
    roof = [min(rates.flops_per_second, x * rates.bytes_per_second) for x in corners]
    label = f"{name}: {describe_rates(rates)}"
    axes.plot(corners, roof, color="black", linewidth=1.2, linestyle=line, label=label)


def _times(axes: Axes, point: Point, analysis: Analysis, mode: str) -> None:
    """Draw a bar for each part and one for what no part accounts for. All shares are of the total."""
    total = point.whole.passes[mode].seconds.median
    unit, factor = time_unit(total)
    labels = []
    for row, part in enumerate(point.addends):
        copies = f" (x {part.count})" if part.count > 1 else ""
        labels.append(part.name + copies)
        _bars(axes, row, part, factor)
        _mark_least(axes, row, part, analysis, factor)
        _write_time(axes, row, part_seconds(part), total)
        _mark_row(axes, row)
    rest = factor * max(0.0, analysis.whole_minus_parts)
    axes.barh(len(labels), rest, 0.7, color="white", edgecolor="grey", hatch="//")
    _write_time(axes, len(labels), analysis.whole_minus_parts, total)
    labels.append(f"{model_name(point.size)} minus parts")
    axes.set_yticks(range(len(labels)), labels, fontsize=10)
    axes.tick_params(axis="y", length=0, pad=20)
    axes.invert_yaxis()
    longest = factor * max(part_seconds(part) for part in point.addends)
    axes.set_xlim(0, 1.6 * max(longest, rest))  # leaves room for the text
    roofline = "" if analysis.roofline_seconds is None else "; black line: roofline"
    axes.set_xlabel(f"{unit}; dark: forward, light: backward{roofline}")
    axes.set_title(f"Where do {number(factor * total)} {unit} go?", fontsize=11)
    axes.grid(axis="x", alpha=0.3)


def _mark_least(
    axes: Axes, row: int, part: Part, analysis: Analysis, factor: float
) -> None:
    """Mark the least time of a part, unless it is unknown.

    A mark beyond the axis is not drawn: it must not make the bars shorter.
    """
    if analysis.roofline_seconds is None:
        return
    least = part.count * sum(analysis.roofline_seconds[part.name].values())
    at = factor * least
    axes.plot([at, at], [row - 0.42, row + 0.42], color="black", linewidth=2)


def _bars(axes: Axes, row: int, part: Part, factor: float) -> None:
    """Draw the passes of a part, one after another."""
    end = 0.0
    for name, each in part.passes.items():
        alpha = 0.5 if name == "backward" else 1.0
        length = factor * part.count * each.seconds.median
        axes.barh(row, length, 0.7, left=end, color=_color(row), alpha=alpha)
        end += length


def _write_time(axes: Axes, row: int, seconds: float, total: float) -> None:
    """Write a time and its share to the right of a bar."""
    unit, factor = time_unit(total)
    axes.annotate(
        f"{number(factor * seconds)} {unit}, {share(seconds / total)}",
        (max(0.0, factor * seconds), row),
        (6, 0),
        textcoords="offset points",
        va="center",
        fontsize=9,
    )


def _mark_row(axes: Axes, row: int) -> None:
    """Draw the marker of a part beside its name."""
    axes.plot(
        -0.035,
        row,
        transform=axes.get_yaxis_transform(),
        clip_on=False,
        markersize=7,
        color=_color(row),
        marker=_marker(row),
    )


def _sweep(
    figure: Figure, profile: Profile, points: Sequence[Point], axis: str
) -> None:
    left, right = figure.subplots(1, 2)
    values = [int(value_on(axis, point.size)) for point in points]
    _wholes(left, values, points, profile)
    _parts(right, values, points)
    for axes in (left, right):
        axes.set(xscale="log", yscale="log", xlabel=axis, ylabel="ms")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        axes.set_xticks(values, [str(value) for value in values])
        axes.grid(alpha=0.3)
        axes.legend(**BELOW, ncols=3)


def _wholes(
    axes: Axes, values: list[int], points: Sequence[Point], profile: Profile
) -> None:
    """Draw the passes of the whole, and their rooflines."""
    names = [
        name
        for name in ("forward", "backward", "step")
        if name in points[0].whole.passes
    ]
    analyses = [analyze(point, profile) for point in points]
    for index, name in enumerate(names):
        spreads = [point.whole.passes[name].seconds for point in points]
        median = [1e3 * spread.median for spread in spreads]
        p20 = [1e3 * spread.p20 for spread in spreads]
        p80 = [1e3 * spread.p80 for spread in spreads]
        color = _color(index)
        axes.plot(values, median, label=name, color=color, marker=_marker(index))
        axes.fill_between(values, p20, p80, alpha=0.2, color=color)
        least = []
        for analysis in analyses:
            if analysis.roofline_seconds is not None:
                least.append(1e3 * analysis.roofline_seconds["whole"][name])
        if least:
            label = f"{name}: roofline"
            axes.plot(values, least, color=color, linestyle=":", label=label)
    title = f"Time of the {model_name(points[0].size)}: median, p20 to p80"
    axes.set_title(title, fontsize=11)


def _parts(axes: Axes, values: list[int], points: Sequence[Point]) -> None:
    """Draw the time of each part, in all of its passes."""
    parts_of_points = [point.parts for point in points]
    for index, same_part in enumerate(zip(*parts_of_points, strict=True)):
        times = [1e3 * part_seconds(part) for part in same_part]
        name, color, marker = same_part[0].name, _color(index), _marker(index)
        axes.plot(values, times, label=name, color=color, marker=marker)
    passes = " and ".join(points[0].parts[0].passes)
    axes.set_title(f"Time of the parts: {passes}", fontsize=11)
