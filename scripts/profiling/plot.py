"""A profile as a picture to be read 800 pixels wide: roofline and parts of one size, or the scaling of a sweep."""

import math
from pathlib import Path
from typing import Any

from lab.plots import BELOW, COLORS, MARKERS, new_figure, save
from lab.tables import number, share, time_unit
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from .analysis import addends
from .report import describe, origin, rates, value_on


def plot(document: dict[str, Any], path: Path) -> None:
    """Draw the points of a profile in the format that the suffix of `path` names."""
    axis = document["settings"]["sweep"]
    points = [point for point in document["points"] if "whole" in point]
    title = describe(*(point["size"] for point in points))
    figure = new_figure(title, origin(document))
    if axis:
        _sweep(figure, points, axis)
    else:
        left, right = figure.subplots(1, 2, width_ratios=[1, 1.1])
        _roofline(left, points[0], document["ceilings"])
        _times(right, points[0], document["settings"]["mode"])
    save(figure, path)


def _look(index: int) -> dict[str, Any]:
    return {"color": COLORS[index % 10], "marker": MARKERS[index % 10]}


def _finish(axes: Axes, values: list[int], ncols: int) -> None:
    axes.minorticks_off()
    axes.set_xticks(values, [str(value) for value in values])
    axes.grid(alpha=0.3)
    axes.legend(**BELOW, ncols=ncols)


def _roofline(axes: Axes, point: dict[str, Any], ceilings: dict[str, Any]) -> None:
    """Place each pass of each part, by its markers beside the names on the right, and the whole."""
    parts = [
        (part, _look(index) | {"markersize": 7})
        for index, part in enumerate(point["parts"])
    ]
    parts.append((point["whole"], {"color": "black", "marker": "*", "markersize": 11}))
    intensities = [ceilings["ridge"]]
    taken: list[tuple[float, float]] = []
    for pass_, filled in (("forward", "full"), ("backward", "none")):
        for part, look in parts:
            if pass_ in part and (speed := part[pass_]["flops_per_second"]) is not None:
                x, y = math.log10(part[pass_]["intensity"]), math.log10(speed)
                while any(abs(x - u) < 0.12 and abs(y - v) < 0.05 for u, v in taken):
                    x += 0.12  # a marker is there
                taken.append((x, y))
                intensities += [part[pass_]["intensity"], 10**x]
                axes.plot(
                    intensities[-2:],
                    [speed, speed],
                    color="grey",
                    linewidth=0.8,
                    zorder=1,
                )
                axes.plot(10**x, speed, linestyle="", fillstyle=filled, **look)
        if pass_ in point["whole"]:
            label = f"{pass_} ({'filled' if filled == 'full' else 'hollow'}; star: the whole)"
            axes.plot(
                [],
                [],
                color="grey",
                marker="o",
                linestyle="",
                fillstyle=filled,
                label=label,
            )
    low, high = min(intensities) / 2, max(intensities) * 2
    measured = {
        key: ceilings[key]["median"] for key in ("flops_per_second", "bytes_per_second")
    }
    for name, line, sheet in (
        ("measured", "-", measured),
        ("datasheet", ":", ceilings["datasheet"]),
    ):
        if sheet is not None and sheet["flops_per_second"] is not None:
            peak, bandwidth = sheet["flops_per_second"], sheet["bytes_per_second"]
            corners = [low, min(max(peak / bandwidth, low), high), high]
            label = f"{name}: {rates(peak, bandwidth)}"
            roof = [min(peak, x * bandwidth) for x in corners]
            axes.plot(
                corners, roof, color="black", linewidth=1.2, linestyle=line, label=label
            )
    axes.set(xscale="log", yscale="log", ylabel="FLOP/s")
    axes.set_xlabel("FLOP per byte (a line leads back to a marker's place)")
    axes.set_title("How far from the roofline?", fontsize=11)
    axes.grid(alpha=0.3)
    axes.legend(**BELOW, ncols=1)


def _times(axes: Axes, point: dict[str, Any], mode: str) -> None:
    """Draw a bar for each part, which ends where its last pass does, and the least time that it could take."""
    unit, factor = time_unit(point["whole"]["forward"]["seconds"]["median"])
    total = factor * point["whole"][mode]["seconds"]["median"]
    labels = []
    for row, part in enumerate(addends(point)):
        labels.append(
            part["name"] + (f" (x {part['count']})" if part["count"] > 1 else "")
        )
        end = least = 0.0
        for pass_, alpha in (("forward", 1.0), ("optimizer", 1.0), ("backward", 0.5)):
            if pass_ in part:
                seconds = part["count"] * factor * part[pass_]["seconds"]["median"]
                axes.barh(
                    row, seconds, 0.7, left=end, color=COLORS[row % 10], alpha=alpha
                )
                end, least = (
                    end + seconds,
                    least + part["count"] * factor * part[pass_]["roofline_seconds"],
                )
        axes.plot([least, least], [row - 0.42, row + 0.42], color="black", linewidth=2)
        text = f"{number(end)} {unit}, {share(end / total)}"
        axes.annotate(
            text,
            (max(end, least), row),
            (6, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
        axes.plot(
            -0.035,
            row,
            transform=axes.get_yaxis_transform(),
            clip_on=False,
            markersize=7,
            **_look(row),
        )
    axes.set_yticks(range(len(labels)), labels, fontsize=10)
    axes.tick_params(axis="y", length=0, pad=20)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.6 * axes.get_xlim()[1])
    axes.set_xlabel(f"{unit}; dark: forward, light: backward, black line: roofline")
    axes.set_title(f"Where do {number(total)} {unit} go?", fontsize=11)
    axes.grid(axis="x", alpha=0.3)


def _sweep(figure: Figure, points: list[dict[str, Any]], axis: str) -> None:
    values = [int(value_on(axis, point)) for point in points]
    left, right = figure.subplots(1, 2)
    wholes = [
        name for name in ("forward", "backward", "step") if name in points[0]["whole"]
    ]
    for index, name in enumerate(wholes):
        records = [point["whole"][name] for point in points]
        median, p20, p80 = (
            [1e3 * record["seconds"][key] for record in records]
            for key in ("median", "p20", "p80")
        )
        left.plot(values, median, label=name, **_look(index))
        left.fill_between(values, p20, p80, alpha=0.2, color=COLORS[index])
        floors = [1e3 * record["roofline_seconds"] for record in records]
        left.plot(
            values,
            floors,
            color=COLORS[index],
            linestyle=":",
            label=f"{name}: roofline",
        )
    left.set_title("Time of the whole: median, p20 to p80", fontsize=11)
    passes = [name for name in ("forward", "backward") if name in wholes]
    for index, parts in enumerate(
        zip(*(point["parts"] for point in points), strict=True)
    ):
        times = [
            1e3
            * part["count"]
            * sum(part[name]["seconds"]["median"] for name in passes)
            for part in parts
        ]
        right.plot(values, times, label=parts[0]["name"], **_look(index))
    right.set_title(f"Time of the parts: {' and '.join(passes)}", fontsize=11)
    for axes in (left, right):
        axes.set(xscale="log", yscale="log", xlabel=axis, ylabel="ms")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        _finish(axes, values, ncols=3)
