"""A profile as a picture: the roofline and the parts of one size, or the scaling of a sweep."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from .report import describe, describe_all

__all__ = ["plot"]

# Okabe and Ito's palette, which people with any kind of colour blindness can tell apart; the markers say it again.
_COLOURS = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#56B4E9",
    "#CC79A7",
    "#8A8A00",
    "#999999",
    "#661100",
    "#332288",
)
_MARKERS = "osD^vPXphd"
_FORWARD, _BACKWARD = "#0072B2", "#E69F00"


def plot(document: dict[str, Any], path: Path) -> None:
    """Draw a profile's measured points, in the format that the suffix of `path` names."""
    points = [point for point in document["points"] if "parts" in point]
    figure = _sweep(points, document) if document["settings"]["sweep"] else _point(points[0], document)
    figure.savefig(path, dpi=150)


def _point(point: dict[str, Any], document: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(14, 6.2), layout="constrained")
    settings = document["settings"]
    how = "compiled" if settings["compile"] else "eager"
    figure.suptitle(
        f"{describe(point['size'])}\n{document['environment']['device']}, {settings['dtype']}, {how}", fontsize=11
    )
    left, right = figure.subplots(1, 2, width_ratios=[1.15, 1])
    _roofline(left, point, document["ceilings"])
    _bars(right, point)
    return figure


def _roofline(axes: Axes, point: dict[str, Any], ceilings: dict[str, Any]) -> None:
    passes = [name for name in ("forward", "backward") if name in point["whole"]]
    records = [(part["name"], name, part[name]) for part in point["parts"] for name in passes]
    records += [("whole", name, point["whole"][name]) for name in passes]
    records = [record for record in records if record[2]["flops_per_second"] is not None]
    intensities = [record["intensity"] for *_, record in records] + [ceilings["ridge"]]
    low, high = min(intensities) / 2, max(intensities) * 2
    ridge = ceilings["ridge"]
    peak, bandwidth = ceilings["flops_per_second"]["median"], ceilings["bytes_per_second"]["median"]
    axes.plot(
        [low, ridge, high], [low * bandwidth, peak, peak], color="black", linewidth=1.5, label="measured ceilings"
    )
    sheet = ceilings["datasheet"]
    if sheet is not None and sheet["flops_per_second"] is not None:
        peak, bandwidth = sheet["flops_per_second"], sheet["bytes_per_second"]
        corner = min(max(peak / bandwidth, low), high)
        corners = [low * bandwidth, min(peak, corner * bandwidth), peak]
        axes.plot([low, corner, high], corners, color="black", linewidth=1, linestyle=":", label="datasheet")
    names = list(dict.fromkeys(name for name, *_ in records))
    for index, name in enumerate(names):
        colour, marker = ("black", "*") if name == "whole" else (_COLOURS[index % 10], _MARKERS[index % 10])
        for of, pass_, record in records:
            if of == name:
                filled = pass_ == "forward"
                axes.plot(
                    record["intensity"],
                    record["flops_per_second"],
                    linestyle="",
                    marker=marker,
                    markersize=13 if name == "whole" else 8,
                    markerfacecolor=colour if filled else "white",
                    markeredgecolor=colour,
                    markeredgewidth=1.5,
                    label=name if filled else None,
                )
    axes.set(xscale="log", yscale="log", xlabel="arithmetic intensity (FLOP per byte)", ylabel="FLOP/s")
    hollow = ": forward filled, backward hollow" if len(passes) == 2 else ""
    axes.set_title(f"Roofline{hollow}", fontsize=10)
    axes.grid(which="major", alpha=0.3)
    # Below the axes, where it covers no point.
    axes.legend(fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.12), frameon=False)


def _bars(axes: Axes, point: dict[str, Any]) -> None:
    passes = [name for name in ("forward", "backward") if name in point["whole"]]
    rows = [(part["name"], part["count"], {name: part[name]["seconds"] for name in passes}) for part in point["parts"]]
    rows.append(("sum of the parts", 1, {name: point["sum_of_parts"][name]["seconds"] for name in passes}))
    rows.append(("whole", 1, {name: point["whole"][name]["seconds"] for name in passes}))
    longest = max(count * times[name]["median"] for _, count, times in rows for name in passes)
    unit, factor = ("us", 1e6) if longest < 1e-3 else ("ms", 1e3)
    height = 0.8 / len(passes)
    for offset, (name, colour) in enumerate(zip(passes, (_FORWARD, _BACKWARD), strict=False)):
        places = [row + (offset - (len(passes) - 1) / 2) * height for row in range(len(rows))]
        medians = [count * times[name]["median"] * factor for _, count, times in rows]
        p20 = [count * times[name]["p20"] * factor for _, count, times in rows]
        p80 = [count * times[name]["p80"] * factor for _, count, times in rows]
        below = [max(0.0, middle - low) for middle, low in zip(medians, p20, strict=True)]
        above = [max(0.0, top - middle) for middle, top in zip(medians, p80, strict=True)]
        axes.barh(places, medians, height, color=colour, label=name)
        axes.errorbar(medians, places, xerr=[below, above], fmt="none", ecolor="black", elinewidth=1, capsize=2)
    axes.set_yticks(range(len(rows)), [name if count == 1 else f"{name} (x {count})" for name, count, _ in rows])
    axes.invert_yaxis()
    axes.axhline(len(rows) - 2.5, color="grey", linewidth=0.8)
    axes.set_xlabel(f"{unit}: median, p20 to p80")
    axes.set_title("Time of the parts", fontsize=10)
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.12), frameon=False)


def _sweep(points: list[dict[str, Any]], document: dict[str, Any]) -> Figure:
    settings, environment = document["settings"], document["environment"]
    axis = settings["sweep"]
    values = [point["size"][axis.replace("-", "_")] for point in points]
    figure = Figure(figsize=(14, 6.2), layout="constrained")
    how = "compiled" if settings["compile"] else "eager"
    sizes = describe_all([point["size"] for point in points])
    figure.suptitle(f"{sizes}\n{environment['device']}, {settings['dtype']}, {how}", fontsize=11)
    left, right = figure.subplots(1, 2)
    passes = [name for name in ("forward", "backward", "step") if name in points[0]["whole"]]
    for index, name in enumerate(passes):
        seconds = [point["whole"][name]["seconds"] for point in points]
        style = {"color": _COLOURS[index], "marker": _MARKERS[index]}
        left.plot(values, [s["median"] * 1e3 for s in seconds], label=name, **style)
        left.fill_between(
            values,
            [s["p20"] * 1e3 for s in seconds],
            [s["p80"] * 1e3 for s in seconds],
            alpha=0.2,
            color=_COLOURS[index],
        )
        floors = [point["whole"][name]["roofline_seconds"] * 1e3 for point in points]
        left.plot(values, floors, color=_COLOURS[index], linestyle=":", label=f"{name}: roofline")
    left.set_title("Time of the whole: median, p20 to p80", fontsize=10)
    for index, name in enumerate(part["name"] for part in points[0]["parts"]):
        times = [
            1e3
            * sum(
                point["parts"][index]["count"] * point["parts"][index][p]["seconds"]["median"]
                for p in passes
                if p != "step"
            )
            for point in points
        ]
        right.plot(values, times, label=name, color=_COLOURS[index % 10], marker=_MARKERS[index % 10])
    right.set_title(f"Time of the parts: {' and '.join(p for p in passes if p != 'step')}", fontsize=10)
    for axes in (left, right):
        axes.set(xscale="log", yscale="log", xlabel=axis, ylabel="ms")
        axes.minorticks_off()
        axes.set_xticks(values, [str(value) for value in values])
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.12), frameon=False)
    return figure
