"""A profile as a picture to be read 800 pixels wide: roofline and parts of one size, or the scaling of a sweep."""

from pathlib import Path
from typing import Any

from lab.tables import number, share, si, time_unit
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from .collectives import Mesh
from .report import describe_all, device_and_threads, rates, value_on

# Okabe and Ito's palette, which people with any kind of colour blindness can tell apart; the markers say it again.
_HUES = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#8A8A00", "#999999", "#661100", "#332288")
_MARKERS = "osD^vPXphd"
_PASSES = ("forward", "backward", "step")
_BELOW: dict[str, Any] = {"fontsize": 9, "loc": "upper center", "bbox_to_anchor": (0.5, -0.13), "frameon": False}
_BELOW |= {"columnspacing": 1.0, "handlelength": 1.5}


def plot(document: dict[str, Any], path: Path) -> None:
    """Draw a profile's measured points, in the format that the suffix of `path` names."""
    points = [point for point in document["points"] if "whole" in point]
    settings, environment = document["settings"], document["environment"]
    figure = Figure(figsize=(10, 5), layout="constrained")
    figure.suptitle(describe_all([point["size"] for point in points]), fontsize=12, fontweight="bold")
    how = f"{settings['dtype']}, {'compiled' if settings['compile'] else 'eager'}"
    date = environment["date"].partition("T")[0]
    origin = f"{device_and_threads(document)}; {how}; torch {environment['torch']}; {date}"
    figure.supxlabel(origin, fontsize=8, color="dimgrey")
    if "parts" not in points[0]:
        _processes(figure, points[0])
    elif settings["sweep"]:
        _sweep(figure, points, settings["sweep"])
    else:
        left, right = figure.subplots(1, 2, width_ratios=[1, 1.1])
        _roofline(left, points[0], document["ceilings"])
        _times(right, points[0], settings["mode"])
    figure.savefig(path, dpi=144)


def plot_predictions(document: dict[str, Any], path: Path) -> None:
    """Draw the MFU of each mesh over a sweep."""
    predictions, settings, links = (document[key] for key in ("predictions", "settings", "links"))
    axis = settings["sweep"]
    figure = Figure(figsize=(10, 5), layout="constrained")
    figure.suptitle(describe_all([prediction["size"] for prediction in predictions]), fontsize=10, fontweight="bold")
    links_of = ", ".join(si(links[key], "B/s") for key in ("within", "between") if links[key])
    source = f"on paper: {document['ceilings']['source']}; links of {links_of}"
    figure.supxlabel(f"{source}; {settings['dtype']}, mode {settings['mode']}", fontsize=8, color="dimgrey")
    axes = figure.subplots()
    meshes = dict.fromkeys(Mesh(**prediction["mesh"]) for prediction in predictions)
    for index, mesh in enumerate(meshes):
        records = [prediction for prediction in predictions if Mesh(**prediction["mesh"]) == mesh]
        values = [int(value_on(axis, record)) for record in records]
        mfu = [100 * record["mfu"] for record in records]
        axes.plot(values, mfu, label=str(mesh), color=_HUES[index % 10], marker=_MARKERS[index % 10])
    ticks = sorted({int(value_on(axis, prediction)) for prediction in predictions})
    axes.set(xscale="log", xlabel=axis, ylabel="MFU, %", ylim=(0, 100))
    axes.set_title("Which mesh uses its devices best? One that does not split the batch has no point", fontsize=11)
    axes.minorticks_off()
    axes.set_xticks(ticks, [str(value) for value in ticks])
    axes.grid(alpha=0.3)
    axes.legend(**_BELOW, ncols=4)
    figure.savefig(path, dpi=144)


def _style(index: int, filled: bool = True) -> dict[str, Any]:
    """Return how the marker of a part looks."""
    colour = _HUES[index % 10]
    return {
        "linestyle": "",
        "marker": _MARKERS[index % 10],
        "markersize": 8,
        "markerfacecolor": colour if filled else "white",
        "markeredgecolor": colour,
        "markeredgewidth": 1.5,
    }


def _roofline(axes: Axes, point: dict[str, Any], ceilings: dict[str, Any]) -> None:
    shown = []
    for pass_ in [name for name in _PASSES[:2] if name in point["whole"]]:
        filled = pass_ == "forward"
        shown += [(part[pass_], _style(index, filled)) for index, part in enumerate(point["parts"])]
        star = {"marker": "*", "markersize": 13, "markeredgecolor": "black", "label": f"whole, {pass_}"}
        shown.append((point["whole"][pass_], _style(0) | star | {"markerfacecolor": "black" if filled else "white"}))
    shown = [(record, style) for record, style in shown if record["flops_per_second"] is not None]
    intensities = [record["intensity"] for record, _ in shown] + [ceilings["ridge"]]
    low, high = min(intensities) / 2, max(intensities) * 2
    roofs = [("", "-", ceilings["flops_per_second"]["median"], ceilings["bytes_per_second"]["median"])]
    sheet = ceilings["datasheet"]
    if sheet is not None and sheet["flops_per_second"] is not None:
        roofs.append(("datasheet: ", ":", sheet["flops_per_second"], sheet["bytes_per_second"]))
    for name, line, peak, bandwidth in roofs:
        corner = min(max(peak / bandwidth, low), high)
        roof = [min(peak, x * bandwidth) for x in (low, corner, high)]
        label = name + rates(peak, bandwidth)
        axes.plot([low, corner, high], roof, color="black", linewidth=1.2, linestyle=line, label=label)
    for record, style in shown:
        axes.plot(record["intensity"], record["flops_per_second"], **style)
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="FLOP/s")
    axes.set_title("How far from the roofline?", fontsize=11)
    axes.grid(alpha=0.3)
    axes.legend(**_BELOW, ncols=2)


def _times(axes: Axes, point: dict[str, Any], mode: str) -> None:
    """Draw a bar for each part, which ends where its last pass does, and the least time that it could take."""
    passes = [name for name in _PASSES[:2] if name in point["whole"]]
    unit, factor = time_unit(point["whole"]["forward"]["seconds"]["median"])
    total = point["whole"][mode]["seconds"]["median"]
    rows = [*point["parts"], *([{"name": "AdamW", "count": 1, "step": point["optimizer"]}] if mode == "step" else [])]
    names = []
    for row, part in enumerate(rows):
        records = [part[name] for name in _PASSES if name in part]
        times = [part["count"] * factor * record["seconds"]["median"] for record in records]
        least = part["count"] * factor * sum(record["roofline_seconds"] for record in records)
        axes.barh(row, times[0], 0.7, color=_HUES[row % 10])
        if len(times) == 2:
            axes.barh(row, times[1], 0.7, left=times[0], color=_HUES[row % 10], alpha=0.5)
        axes.plot([least, least], [row - 0.42, row + 0.42], color="black", linewidth=2)
        text = f"  {number(sum(times))} {unit}, {share(sum(times) / factor / total)}"
        axes.text(max(sum(times), least), row, text, va="center", fontsize=9)
        axes.plot(-0.035, row, transform=axes.get_yaxis_transform(), clip_on=False, **_style(row))
        names.append(part["name"] + (f" (x {part['count']})" if part["count"] > 1 else ""))
    axes.set_yticks(range(len(names)), names, fontsize=10)
    axes.tick_params(axis="y", length=0, pad=20)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.6 * axes.get_xlim()[1])
    axes.set_xlabel(unit)
    axes.set_title(f"Where do {number(total * factor)} {unit} go?", fontsize=11)
    axes.grid(axis="x", alpha=0.3)
    for name, alpha in zip(passes, (1.0, 0.5), strict=False):
        axes.barh(0, 0, color="grey", alpha=alpha, label=name)
    axes.plot([], [], color="black", linewidth=2, label="roofline")
    axes.legend(**_BELOW, ncols=3)


def _processes(figure: Figure, point: dict[str, Any]) -> None:
    """Draw what one process takes, its equal share, and what all take together."""
    whole, axes = point["whole"], figure.subplots()
    unit, factor = time_unit(whole["forward"]["seconds"]["median"])
    processes = len(whole["forward"]["of_ranks"])
    for column, record in enumerate(whole.values()):
        one, together = (factor * record[key]["median"] for key in ("one_process", "seconds"))
        bars = (one, "one process"), (one / processes, "an equal share of it"), (together, f"{processes} processes")
        for index, (height, label) in enumerate(bars):
            axes.bar(column + 0.27 * (index - 1), height, 0.25, color=_HUES[index], label=None if column else label)
        text = f"x {number(record['speed_up']['median'])}"
        axes.text(column + 0.27, together, text, ha="center", va="bottom", fontsize=9)
    axes.set_xticks(range(len(whole)), list(whole))
    axes.set_ylabel(unit)
    collectives = sum(record["share"] for record in point["collectives"])
    axes.set_title(f"Speed-up over one process; collectives, alone, would take {share(collectives)}", fontsize=11)
    axes.legend(**_BELOW, ncols=3)


def _sweep(figure: Figure, points: list[dict[str, Any]], axis: str) -> None:
    values = [int(value_on(axis, point)) for point in points]
    passes = [name for name in _PASSES if name in points[0]["whole"]]
    left, right = figure.subplots(1, 2)
    for index, name in enumerate(passes):
        colour = _HUES[index]
        spreads = [point["whole"][name]["seconds"] for point in points]
        median, p20, p80 = ([1e3 * spread[key] for spread in spreads] for key in ("median", "p20", "p80"))
        left.plot(values, median, label=name, color=colour, marker=_MARKERS[index])
        left.fill_between(values, p20, p80, alpha=0.2, color=colour)
        floors = [1e3 * point["whole"][name]["roofline_seconds"] for point in points]
        left.plot(values, floors, color=colour, linestyle=":", label=f"{name}: roofline")
    left.set_title("Time of the whole: median, p20 to p80", fontsize=11)
    passes = passes[:2]
    for index, part in enumerate(points[0]["parts"]):
        rows = [point["parts"][index] for point in points]
        times_of_part = [1e3 * row["count"] * sum(row[name]["seconds"]["median"] for name in passes) for row in rows]
        right.plot(values, times_of_part, label=part["name"], color=_HUES[index % 10], marker=_MARKERS[index % 10])
    right.set_title(f"Time of the parts: {' and '.join(passes)}", fontsize=11)
    for axes in (left, right):
        axes.set(xscale="log", yscale="log", xlabel=axis, ylabel="ms")
        axes.minorticks_off()
        axes.set_xticks(values, [str(value) for value in values])
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3)
        axes.legend(**_BELOW, ncols=3)
