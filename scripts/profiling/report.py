"""The result as text: rich tables on a terminal, plain aligned columns elsewhere or without rich."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

from lab.presets import PRESETS
from lab.tables import Section, Table, number, plural, share, si, spread_cells, time_unit


def report(document: dict[str, Any]) -> list[Section]:
    """Return the sections of a whole profile: of one size in full, of a sweep one line for each point."""
    points, axis = document["points"], document["settings"]["sweep"]
    sections: list[Section] = [header(document)]
    if axis is None:
        for point in points:
            sections += _point(point, document)
    else:
        sections += _sweep(points, axis, document["settings"]["mode"])
    if document["status"] == "interrupted":
        sections.append("Interrupted: these are the figures until then.")
    return [*sections, *doubts(document)]


def doubts(document: dict[str, Any]) -> list[Section]:
    """Return why not to trust the figures of a profile, if so."""
    axis = document["settings"]["sweep"]
    doubted = [point for point in document["points"] if "trust" in point and point["trust"]["doubts"]]
    if not doubted:
        return []
    where = (f"{axis} {value_on(axis, point)}: " if axis else "" for point in doubted)
    lines = [f"  {at}{'; '.join(point['trust']['doubts'])}" for at, point in zip(where, doubted, strict=True)]
    advice = "Close other programs, use fewer threads (OMP_NUM_THREADS) or raise --rounds."
    return ["\n".join(["Do not trust these figures:", *lines, advice])]


def describe(size: dict[str, Any]) -> str:
    """Return a size in one line."""
    stack = "Block" if size["num_layers"] is None else f"Transformer of {size['num_layers']}"
    grouped = "" if size["num_kv_heads"] == size["num_heads"] else f" ({size['num_kv_heads']} for keys and values)"
    norm = ", q/k norm" if size["qk_norm"] else ""
    return (
        f"{stack}: batch {size['batch_size']}, {size['seq_len']} tokens, d_model {size['d_model']}, "
        f"{size['num_heads']} heads of {size['d_head']}{grouped}{norm}, d_ff {size['d_ff']}"
    )


def describe_all(sizes: Sequence[dict[str, Any]]) -> str:
    """Return several sizes in one line, a range for what changes from the first to the last."""
    first, last = sizes[0], sizes[-1]
    return describe({key: first[key] if first[key] == last[key] else f"{first[key]} to {last[key]}" for key in first})


def header(document: dict[str, Any]) -> str:
    settings, environment, ceilings = document["settings"], document["environment"], document["ceilings"]
    preset = settings["preset"]
    model = f", preset {preset} ({PRESETS[preset].num_layers} blocks in the model)" if preset else ""
    compiled = "compiled (and each part on its own)" if settings["compile"] else "eager"
    backend = settings["attention_backend"] or "torch's choice of"
    measured = rates(ceilings["flops_per_second"]["median"], ceilings["bytes_per_second"]["median"])
    sheet = ceilings["datasheet"]
    known = rates(sheet["flops_per_second"], sheet["bytes_per_second"]) if sheet else "n/a"
    return "\n".join(
        [
            f"{device_and_threads(document)}, torch {environment['torch']}",
            f"{settings['dtype']}, mode {settings['mode']}, {compiled}, {backend} attention backend{model}",
            f"Ceilings: measured {measured} (a product of {ceilings['product_size']}, a copy of "
            f"{si(ceilings['copy_bytes'], 'B')}); datasheet {known}",
        ]
    )


def device_and_threads(document: dict[str, Any]) -> str:
    threads, on_cpu = document["environment"]["threads"], document["settings"]["device"] == "cpu"
    return document["environment"]["device"] + (f", {plural(threads, 'thread')}" if on_cpu else "")


def rates(flops_per_second: float | None, bytes_per_second: float) -> str:
    return f"{si(flops_per_second, 'FLOP/s')}, {si(bytes_per_second, 'B/s')}"


def _point(point: dict[str, Any], document: dict[str, Any]) -> list[Section]:
    title, layers = describe(point["size"]), point["size"]["num_layers"]
    if layers is not None and layers > 1:
        title += f"; parts of one block, which the sum counts {layers} times"
    if "parts" not in point:
        return [f"{title}\n{point['status']}: {point['error']}"]
    passes = [name for name in ("forward", "backward") if name in point["whole"]]
    sections: list[Section] = [_times(point, passes, title)]
    sections += [_work(point, name) for name in passes]
    if point["memory"] is not None:
        sections.append(_memory(point))
    sections.append(_summary(point, document))
    return sections


def _times(point: dict[str, Any], passes: list[str], title: str) -> Table:
    unit, factor = time_unit(point["whole"]["forward"]["seconds"]["median"])
    table = Table(title, ["part", *(column for name in passes for column in (f"{name} {unit}", "p20-p80", "share"))])
    sums, whole = point["sum_of_parts"], point["whole"]
    for part in point["parts"]:
        cells = [[*spread_cells(part[name]["seconds"], factor), share(part[name]["share"])] for name in passes]
        table.rows.append([part["name"], *chain(*cells)])
    for title, cells in (
        ("sum of the parts", [[*spread_cells(sums[name]["seconds"], factor), share(1.0)] for name in passes]),
        ("whole", [[*spread_cells(whole[name]["seconds"], factor), ""] for name in passes]),
        ("sum / whole", [[*spread_cells(sums[name]["of_whole"], 1), ""] for name in passes]),
    ):
        table.rows.append([title, *chain(*cells)])
    return table


def _work(point: dict[str, Any], name: str) -> Table:
    table = Table(
        f"{name.capitalize()}: work, and the roofline",
        ["part", "FLOP", "bytes", "FLOP/byte", "bound by", "FLOP/s", "of roofline"],
    )

    def row(title: str, record: dict[str, Any]) -> list[str]:
        return [
            title,
            si(record["matmul_flops"] + record["elementwise_flops"]),
            si(record["bytes"], "B"),
            number(record["intensity"]),
            record["bound"],
            si(record["flops_per_second"]),
            share(record["roofline_fraction"]),
        ]

    table.rows = [row(part["name"], part[name]) for part in point["parts"]]
    table.rows += [row("whole", point["whole"][name])]
    if point["optimizer"] is not None and name == "backward":
        table.rows.append(row("AdamW", point["optimizer"]))
    return table


def _memory(point: dict[str, Any]) -> Table:
    memory = point["memory"]
    table = Table("Memory", ["part", "saved for backward", "peak above the start"])
    for part in memory["parts"]:
        table.rows.append([part["name"], si(part["saved_bytes"], "B"), si(part["peak_added_bytes"], "B")])
    table.rows += [["whole", si(memory["saved_bytes"], "B"), si(memory["peak_added_bytes"], "B")]]
    return table


def _summary(point: dict[str, Any], document: dict[str, Any]) -> str:
    mode = document["settings"]["mode"]
    whole, memory, kernels, compiled = (point[key] for key in ("whole", "memory", "kernels", "compile"))
    seconds = whole[mode]["seconds"]
    unit, factor = time_unit(seconds["median"])

    def timed(spread: dict[str, float]) -> str:
        median, low_to_high = spread_cells(spread, factor)
        return f"{median} {unit} ({low_to_high})"

    lines = [
        f"{_MODES[mode]}: {timed(seconds)}, {si(point['tokens_per_second'])} tokens/s, "
        f"{share(whole[mode]['roofline_fraction'])} of the roofline"
    ]
    if point["optimizer"] is not None:
        update = point["optimizer"]["seconds"]
        lines.append(f"AdamW: {timed(update)}, {share(update['median'] / seconds['median'])} of the step")
    mfu = point["mfu"]
    for source, name in (("measured", "measured ceiling"), ("datasheet", "datasheet")):
        lines.append(f"MFU of the {name}: causal {share(mfu['causal'][source])}, dense {share(mfu['dense'][source])}")
    overhead = point["overhead"]
    if overhead is None:
        lines.append("Same calls on one token of width 8: n/a, this attention backend cannot run them")
    else:
        # On CUDA the host runs ahead of the GPU, so that its time is no share of the whole's.
        shown = document["settings"]["device"] == "cpu" and overhead["share"] <= 1
        part = f", {share(overhead['share'])} of this" if shown else ""
        lines.append(
            f"Same calls on one token of width 8: {number(overhead['seconds']['median'] * factor)} {unit}{part}, "
            "all of it overhead: Python, dispatch and launches"
        )
    if kernels is None:
        lines.append("Kernels: n/a")
    else:
        bound = "launch-bound" if kernels["launch_bound"] else "not launch-bound"
        lines.append(f"Kernels: {kernels['count']}, which run {share(kernels['busy_fraction'])} of the time: {bound}")
    if compiled is not None:
        cache = ", from inductor's cache" if compiled["from_cache"] else ""
        lines.append(
            f"Compilation: {number(compiled['seconds'])} s{cache}; {plural(compiled['graphs'], 'graph')}, "
            f"{plural(compiled['graph_breaks'], 'break')}"
        )
        lines += [f"  break: {' '.join(reason.split())}" for reason in compiled["break_reasons"]]
    if memory is not None:
        lines.append(
            f"Memory: peak {si(memory['peak_bytes'], 'B')}; parameters {si(memory['parameters_bytes'], 'B')}, "
            f"gradients {si(memory['gradients_bytes'], 'B')}, optimizer state "
            f"{si(memory['optimizer_state_bytes'], 'B')}, saved for backward {si(memory['saved_bytes'], 'B')}"
        )
    lines += [f"Not measured: {note}" for note in point["notes"]]
    if point["status"] == "interrupted":
        lines.append(f"Interrupted after {plural(seconds['samples'], 'round')}.")
    lines.append(_LEGEND)
    if point["losses"]:
        lines += ["", "Most time lost against the roofline, and what that usually means:"]
    for loss in point["losses"]:
        lost = f"{number(loss['seconds'] * factor)} {unit}, {share(loss['share'])} of the whole"
        lines.append(f"  {loss['name']}: {lost}; {_CAUSES[loss['cause']].format(share(loss['roofline_fraction']))}")
    return "\n".join(lines)


# Of the causes that the figures point to; {} is the share of the roofline.
_CAUSES = {
    "overhead": "little but its calls: Python, dispatch and launches, for which more tokens or a compiler help",
    "products": "matrix products at {} of the measured ceiling: their sizes, layout or threads",
    "weights": "weights that few tokens share, moved at {} of the measured bandwidth: a larger batch helps",
    "elementwise": "elementwise work at {} of the roofline: it waits for memory, and a compiler would fuse it",
}

_MODES = {"forward": "Forward", "train": "Forward and backward", "step": "Forward, backward and AdamW"}
_LEGEND = (
    "Times are medians; backward is what a run of both takes longer than forward, round by round.\n"
    "Bytes are the fewest possible; above 100% of the roofline, they come from a cache."
)


def _sweep(points: list[dict[str, Any]], axis: str, mode: str) -> list[Section]:
    measured = [point for point in points if "parts" in point]
    unit, factor = time_unit(min((point["whole"][mode]["seconds"]["median"] for point in measured), default=1.0))
    columns = [axis, f"{mode} {unit}", "p20-p80", f"one token {unit}", "tokens/s", "MFU causal", "sum/whole"]
    columns += ["saved", "peak"]
    table = Table(f"Sweep: {_MODES[mode][0].lower() + _MODES[mode][1:]}, MFU of the measured ceiling", columns)
    for point in points:
        value = value_on(axis, point)
        if "parts" not in point:
            table.rows.append([value, point["status"], *[""] * (len(columns) - 2)])
            continue
        overhead, memory = point["overhead"], point["memory"] or {}
        table.rows.append(
            [
                value + (" (interrupted)" if point["status"] == "interrupted" else ""),
                *spread_cells(point["whole"][mode]["seconds"], factor),
                number(overhead and overhead["seconds"]["median"] * factor),
                si(point["tokens_per_second"]),
                share(point["mfu"]["causal"]["measured"]),
                number(point["sum_of_parts"]["forward" if mode == "forward" else "train"]["of_whole"]["median"]),
                si(memory.get("saved_bytes"), "B"),
                si(memory.get("peak_bytes"), "B"),
            ]
        )
    sections: list[Section] = [describe_all([point["size"] for point in points])] if points else []
    sections.append(table)
    if measured:
        sections.append(_sweep_parts(measured, axis, mode))
        sections.append("One token: the same calls at width 8, which is overhead alone.")
        losses = Table("Most time lost against the roofline", [axis, "first", "second", "third"])
        for point in measured:
            shown = [f"{loss['name']} {share(loss['share'])}" for loss in point["losses"]]
            losses.rows.append([value_on(axis, point), *shown, *[""] * (3 - len(shown))])
        sections.append(losses)
    notes = [(value_on(axis, point), note) for point in measured for note in point["notes"]]
    if notes:
        sections.append("\n".join(f"{axis} {value}: not measured: {note}" for value, note in notes))
    return sections


def _sweep_parts(points: list[dict[str, Any]], axis: str, mode: str) -> Table:
    passes = ["forward"] if mode == "forward" else ["forward", "backward"]
    unit, factor = time_unit(min(point["whole"]["forward"]["seconds"]["median"] for point in points))
    title = f"Parts: {' and '.join(passes)}, {unit}, by {axis}"
    table = Table(title, ["part", *(value_on(axis, point) for point in points)])
    for rows in zip(*(point["parts"] for point in points), strict=True):
        times = [sum(row[name]["seconds"]["median"] for name in passes) for row in rows]
        table.rows.append([rows[0]["name"], *(number(seconds * factor) for seconds in times)])
    return table


def value_on(axis: str, point: dict[str, Any]) -> str:
    """Return the point's value on the axis of the sweep."""
    return str(point["size"][axis.replace("-", "_")])
