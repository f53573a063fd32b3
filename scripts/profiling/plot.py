"""A profile as a picture to be read 800 pixels wide: roofline and parts of one size, or the scaling of a sweep."""

import math
from pathlib import Path
from typing import Any

from lab.plots import BELOW, COLORS, MARKERS, new_figure, save
from lab.tables import number, share, si, time_unit
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from .collectives import Mesh
from .report import describe_all, origin, rates, value_on

_PASSES = ("forward", "backward", "step")


def plot(document: dict[str, Any], path: Path) -> None:
    """Draw a profile's measured points, in the format that the suffix of `path` names."""
    points = [point for point in document["points"] if "whole" in point]
    settings = document["settings"]
    figure = new_figure(describe_all([point["size"] for point in points]), origin(document))
    if "parts" not in points[0]:
        _processes(figure, points[0])
    elif settings["sweep"]:
        _sweep(figure, points, settings["sweep"])
    else:
        left, right = figure.subplots(1, 2, width_ratios=[1, 1.1])
        _roofline(left, points[0], document["ceilings"])
        _times(right, points[0], settings["mode"])
    save(figure, path)


def plot_predictions(document: dict[str, Any], path: Path) -> None:
    """Draw the MFU of each mesh over a sweep, and name the best one at each point."""
    predictions, settings, links = (document[key] for key in ("predictions", "settings", "links"))
    axis = settings["sweep"]
    links_of = ", ".join(si(links[key], "B/s") for key in ("within", "between") if links[key])
    bound = "upper bounds of MFU, as each time is a lower bound"
    source, kind = f"roofline of {document['ceilings']['source']}", bound
    if document["from"] is not None:
        source, kind = f"scaled from a profile: {origin(document['from'])}", "predicted from a profile of one process"
    title = describe_all([prediction["size"] for prediction in predictions])
    how = f"{settings['dtype']}, mode {settings['mode']}{', blocks recomputed' if document['recompute'] else ''}"
    figure = new_figure(title, f"{source}; {how}; links of {links_of}")
    figure.suptitle(title, fontsize=9, fontweight="bold")
    axes = figure.subplots()
    best: dict[int, dict[str, Any]] = {}
    for index, mesh in enumerate(dict.fromkeys(Mesh(**prediction["mesh"]) for prediction in predictions)):
        records = [prediction for prediction in predictions if Mesh(**prediction["mesh"]) == mesh]
        values = [int(value_on(axis, record)) for record in records]
        mfu = [100 * record["mfu"] for record in records]
        axes.plot(values, mfu, label=str(mesh), color=COLORS[index % 10], marker=MARKERS[index % 10])
        for value, record in zip(values, records, strict=True):
            best[value] = max(record, best.get(value, record), key=lambda record: record["mfu"])
    for value, record in best.items():
        text = f"{Mesh(**record['mesh'])}\n{share(record['mfu'])}"
        axes.annotate(text, (value, 100 * record["mfu"]), (0, 9), textcoords="offset points", ha="center", fontsize=8)
    axes.plot([*best], [100 * record["mfu"] for record in best.values()], "ko", fillstyle="none", ms=13, label="best")
    axes.set(xscale="log", xlabel=axis, ylabel="MFU, %", ylim=(0, 115))
    axes.margins(x=0.08)
    axes.set_yticks(range(0, 101, 20))
    axes.set_title(f"The best mesh for each {axis}: {kind}", fontsize=11)
    _ticks(axes, sorted(best))
    axes.legend(**BELOW, ncols=5)
    save(figure, path)


def _ticks(axes: Axes, values: list[int]) -> None:
    axes.minorticks_off()
    axes.set_xticks(values, [str(value) for value in values])
    axes.grid(alpha=0.3)


def _marker(index: int, filled: bool = True) -> dict[str, Any]:
    """Return how the marker of a part looks."""
    look = {"marker": MARKERS[index % 10], "color": COLORS[index % 10], "linestyle": "", "markersize": 7}
    return look | {"markerfacecolor": COLORS[index % 10] if filled else "white"}


def _roofline(axes: Axes, point: dict[str, Any], ceilings: dict[str, Any]) -> None:
    """Place each pass of each part, by its markers beside the names on the right, and the whole."""
    shown = []
    for pass_, filled, name in (("forward", True, "filled"), ("backward", False, "hollow")):
        if pass_ in point["whole"]:
            shown += [(part[pass_], _marker(index, filled)) for index, part in enumerate(point["parts"])]
            star = {"marker": "*", "markersize": 11, "markerfacecolor": "black" if filled else "white"}
            shown.append((point["whole"][pass_], _marker(0) | star | {"color": "black", "label": f"whole, {pass_}"}))
            axes.plot([], [], **_marker(7, filled), label=f"a part, {pass_} ({name})")
    shown = [(record, look) for record, look in shown if record["flops_per_second"] is not None]
    intensities = [record["intensity"] for record, _ in shown] + [ceilings["ridge"]]
    low, high = min(intensities) / 2, max(intensities) * 2
    roofs = [("measured", "-", ceilings["flops_per_second"]["median"], ceilings["bytes_per_second"]["median"])]
    sheet = ceilings["datasheet"]
    if sheet is not None and sheet["flops_per_second"] is not None:
        roofs.append(("datasheet", ":", sheet["flops_per_second"], sheet["bytes_per_second"]))
    for name, line, peak, bandwidth in roofs:
        corner = min(max(peak / bandwidth, low), high)
        roof = [min(peak, x * bandwidth) for x in (low, corner, high)]
        label = f"{name}: {rates(peak, bandwidth)}"
        axes.plot([low, corner, high], roof, color="black", linewidth=1.2, linestyle=line, label=label)
    taken: list[tuple[float, float]] = []
    for record, look in shown:
        place = x, y = math.log10(record["intensity"]), math.log10(record["flops_per_second"])
        while any(abs(x - u) < 0.12 and abs(y - v) < 0.09 for u, v in taken):  # a marker is there: move to its right
            x += 0.12
        taken.append((x, y))
        axes.plot([10 ** place[0], 10**x], [10**y, 10**y], color="grey", linewidth=0.8, zorder=1)
        axes.plot(10**x, 10**y, **look)
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte (a line leads back to a marker's place)")
    axes.set(ylabel="FLOP/s")
    axes.set_title("How far from the roofline?", fontsize=11)
    axes.grid(alpha=0.3)
    axes.legend(**BELOW, ncols=2)


def _times(axes: Axes, point: dict[str, Any], mode: str) -> None:
    """Draw a bar for each part, which ends where its last pass does, and the least time that it could take."""
    passes = [name for name in _PASSES[:2] if name in point["whole"]]
    unit, factor = time_unit(point["whole"]["forward"]["seconds"]["median"])
    total = factor * point["whole"][mode]["seconds"]["median"]
    adamw = {"name": "AdamW", "count": 1, "step": point["optimizer"]}
    rows = [*point["parts"], adamw] if mode == "step" else point["parts"]
    names = [part["name"] + (f" (x {part['count']})" if part["count"] > 1 else "") for part in rows]
    for row, part in enumerate(rows):
        records = [part[name] for name in _PASSES if name in part]
        times = [part["count"] * factor * record["seconds"]["median"] for record in records]
        least = part["count"] * factor * sum(record["roofline_seconds"] for record in records)
        axes.barh(row, times[0], 0.7, color=COLORS[row % 10])
        if len(times) == 2:
            axes.barh(row, times[1], 0.7, left=times[0], color=COLORS[row % 10], alpha=0.5)
        axes.plot([least, least], [row - 0.42, row + 0.42], color="black", linewidth=2)
        end, text = max(*times, sum(times), least), f"{number(sum(times))} {unit}, {share(sum(times) / total)}"
        axes.annotate(text, (end, row), (6, 0), textcoords="offset points", va="center", fontsize=9)
        axes.plot(-0.035, row, transform=axes.get_yaxis_transform(), clip_on=False, **_marker(row))
    axes.set_yticks(range(len(names)), names, fontsize=10)
    axes.tick_params(axis="y", length=0, pad=20)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.6 * axes.get_xlim()[1])
    axes.set_xlabel(unit)
    axes.set_title(f"Where do {number(total)} {unit} go?", fontsize=11)
    axes.grid(axis="x", alpha=0.3)
    for name, alpha in zip(passes, (1.0, 0.5), strict=False):
        axes.barh(0, 0, color="grey", alpha=alpha, label=name)
    axes.plot([], [], color="black", linewidth=2, label="roofline")
    axes.legend(**BELOW, ncols=3)


def _processes(figure: Figure, point: dict[str, Any]) -> None:
    """Draw what one process takes, its equal share, and what all take together."""
    whole, axes = point["whole"], figure.subplots()
    unit, factor = time_unit(whole["forward"]["seconds"]["median"])
    processes = len(whole["forward"]["of_ranks"])
    for column, record in enumerate(whole.values()):
        one, together = (factor * record[key]["median"] for key in ("one_process", "seconds"))
        bars = (one, "one process"), (one / processes, "an equal share of it"), (together, f"{processes} processes")
        for index, (height, label) in enumerate(bars):
            axes.bar(column + 0.27 * (index - 1), height, 0.25, color=COLORS[index], label=None if column else label)
        text = f"x {number(record['speed_up']['median'])}"
        axes.text(column + 0.27, together, text, ha="center", va="bottom", fontsize=9)
    axes.set_xticks(range(len(whole)), list(whole))
    axes.set_ylabel(unit)
    collectives = sum(record["share"] for record in point["collectives"])
    axes.set_title(f"Speed-up over one process; collectives, alone, would take {share(collectives)}", fontsize=11)
    axes.legend(**BELOW, ncols=3)


def _sweep(figure: Figure, points: list[dict[str, Any]], axis: str) -> None:
    values = [int(value_on(axis, point)) for point in points]
    passes = [name for name in _PASSES if name in points[0]["whole"]]
    left, right = figure.subplots(1, 2)
    for index, name in enumerate(passes):
        spreads = [point["whole"][name]["seconds"] for point in points]
        median, p20, p80 = ([1e3 * spread[key] for spread in spreads] for key in ("median", "p20", "p80"))
        left.plot(values, median, label=name, color=COLORS[index], marker=MARKERS[index])
        left.fill_between(values, p20, p80, alpha=0.2, color=COLORS[index])
        floors = [1e3 * point["whole"][name]["roofline_seconds"] for point in points]
        left.plot(values, floors, color=COLORS[index], linestyle=":", label=f"{name}: roofline")
    left.set_title("Time of the whole: median, p20 to p80", fontsize=11)
    passes = passes[:2]
    for index, part in enumerate(points[0]["parts"]):
        rows = [point["parts"][index] for point in points]
        times = [1e3 * row["count"] * sum(row[name]["seconds"]["median"] for name in passes) for row in rows]
        right.plot(values, times, label=part["name"], color=COLORS[index % 10], marker=MARKERS[index % 10])
    right.set_title(f"Time of the parts: {' and '.join(passes)}", fontsize=11)
    for axes in (left, right):
        axes.set(xscale="log", yscale="log", xlabel=axis, ylabel="ms")
        _ticks(axes, values)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.legend(**BELOW, ncols=3)
