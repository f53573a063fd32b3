"""The profile of one process as text: what was found first, then the tables that it rests on."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

from lab.presets import PRESETS
from lab.tables import Section, Table, number, plural, share, si, spread_cells, time_unit

_MODES = {"forward": "Forward", "train": "Forward and backward", "step": "Forward, backward and AdamW"}

# Of the causes that the figures point to; {} is the share of the roofline.
_CAUSES = {
    "overhead": "mostly its calls (Python, dispatch and launches); more tokens or a compiler help",
    "products": "matrix products at {} of the measured ceiling: their sizes, layout or threads",
    "weights": "weights that few tokens share, moved at {} of the measured bandwidth; a larger batch helps",
    "elementwise": "elementwise work at {} of the roofline: it waits for memory, and a compiler would fuse it",
}
_LEGEND = (
    "Times are medians; backward is the time of forward and backward minus that of forward, round by round.\n"
    "Bytes are the fewest possible; above 100% of the roofline, they come from a cache."
)


def report(document: dict[str, Any]) -> list[Section]:
    """Return the sections of a whole profile: of one size in full, of a sweep one line for each point."""
    sections: list[Section] = [header(document), *doubts(document)]
    if document["settings"]["sweep"] is not None:
        sections += _sweep(document)
    else:
        sections += chain(*(_point(point, document) for point in document["points"]))
    if document["status"] == "interrupted":
        sections.append(f"Interrupted after {plural(len(document['points']), 'size')}.")
    return sections


def doubts(document: dict[str, Any]) -> list[Section]:
    """Return why the figures of a profile cannot be trusted, if so."""
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
    vocabulary = f", vocabulary {size['vocab']}" if size.get("vocab") else ""
    return (
        f"{stack}: batch {size['batch_size']}, {size['seq_len']} tokens, d_model {size['d_model']}, "
        f"{size['num_heads']} heads of {size['d_head']}{grouped}{norm}, d_ff {size['d_ff']}{vocabulary}"
    )


def describe_all(sizes: Sequence[dict[str, Any]]) -> str:
    """Return several sizes in one line, a range for what changes from the first to the last."""
    first, last = sizes[0], sizes[-1]
    return describe({key: first[key] if first[key] == last[key] else f"{first[key]} to {last[key]}" for key in first})


def header(document: dict[str, Any]) -> str:
    """Return where and how was measured."""
    settings, environment, ceilings = document["settings"], document["environment"], document["ceilings"]
    preset = settings["preset"]
    model = f", preset {preset} ({PRESETS[preset].num_layers} blocks in the model)" if preset else ""
    compiled = "compiled (and each part on its own)" if settings["compile"] else "eager"
    kernels = dict.fromkeys(point["attention_kernel"] for point in document["points"] if "attention_kernel" in point)
    attention = f", {' and '.join(kernels)} attention" if kernels else ""
    measured = rates(ceilings["flops_per_second"]["median"], ceilings["bytes_per_second"]["median"])
    sheet = ceilings["datasheet"]
    known = rates(sheet["flops_per_second"], sheet["bytes_per_second"]) if sheet else "n/a"
    return "\n".join(
        [
            f"{device_and_threads(document)}, torch {environment['torch']}",
            f"{settings['dtype']}, mode {settings['mode']}, {compiled}{attention}{model}",
            f"Ceilings: measured {measured} (a product of {ceilings['product_size']}, "
            f"{si(ceilings['sustained_flops_per_second'], 'FLOP/s')} when it runs for half a second; a copy of "
            f"{si(ceilings['copy_bytes'], 'B')}); datasheet {known}",
        ]
    )


def origin(document: dict[str, Any]) -> str:
    """Return in short where, how and when was measured."""
    settings, environment = document["settings"], document["environment"]
    how = f"{settings['dtype']}, {'compiled' if settings['compile'] else 'eager'}"
    date = environment["date"].partition("T")[0]
    return f"{device_and_threads(document)}; {how}; torch {environment['torch']}; {date}"


def device_and_threads(document: dict[str, Any]) -> str:
    threads, on_cpu = document["environment"]["threads"], document["settings"]["device"] == "cpu"
    return document["environment"]["device"] + (f", {plural(threads, 'thread')}" if on_cpu else "")


def rates(flops_per_second: float | None, bytes_per_second: float) -> str:
    return f"{si(flops_per_second, 'FLOP/s')}, {si(bytes_per_second, 'B/s')}"


def _point(point: dict[str, Any], document: dict[str, Any]) -> list[Section]:
    title, layers = describe(point["size"]), point["size"]["num_layers"]
    if "parts" not in point:
        return [f"{title}\n{point['status']}: {point['error']}"]
    if layers is not None and layers > 1:
        title += f"; parts of one block, which the sum counts {layers} times"
    passes = [name for name in ("forward", "backward") if name in point["whole"]]
    tables = [_times(point, passes, title), *(_work(point, name) for name in passes), _memory(point)]
    return ["\n".join(_summary(point, document)), *_losses(point), *tables, _LEGEND]


def _summary(point: dict[str, Any], document: dict[str, Any]) -> list[str]:
    mode, on_cpu = document["settings"]["mode"], document["settings"]["device"] == "cpu"
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
    if on_cpu or kernels is None or kernels["launch_bound"]:  # else the GPU does not wait for the host
        overhead = point["overhead"]
        part = f", {share(overhead['share'])} of this" if on_cpu and overhead["share"] <= 1 else ""
        lines.append(
            f"Same calls on one token of width 8: {number(overhead['seconds']['median'] * factor)} {unit}{part}, "
            "all of it overhead: Python, dispatch and launches"
        )
    if kernels is not None:
        bound = "launch-bound" if kernels["launch_bound"] else "not launch-bound"
        lines.append(f"Kernels: {kernels['count']}, which run {share(kernels['busy_fraction'])} of the time: {bound}")
    if compiled is not None:
        cache = ", from inductor's cache" if compiled["from_cache"] else ""
        graphs = f"{plural(compiled['graphs'], 'graph')}, {plural(compiled['graph_breaks'], 'break')}"
        lines.append(f"Compilation: {number(compiled['seconds'])} s{cache}; {graphs}")
        lines += [f"  break: {' '.join(reason.split())}" for reason in compiled["break_reasons"]]
    parameters, gradients, state, saved = (
        si(memory[f"{name}_bytes"], "B") for name in ("parameters", "gradients", "optimizer_state", "saved")
    )
    held = f"parameters {parameters}, gradients {gradients}, optimizer state {state}, saved for backward {saved}"
    return [*lines, f"Memory: peak {si(memory['peak_bytes'], 'B')}; {held}"]


def _losses(point: dict[str, Any]) -> list[str]:
    """Return the parts that lose most, and why: but no reasons where the figures cannot be trusted."""
    if not point["losses"]:
        return []
    unit, factor = time_unit(point["losses"][0]["seconds"])
    lines = ["Most time lost against the roofline:"]
    for loss in point["losses"]:
        line = f"  {loss['name']}: {number(loss['seconds'] * factor)} {unit}, {share(loss['share'])} of the whole"
        if not point["trust"]["doubts"]:
            line += f"; {_CAUSES[loss['cause']].format(share(loss['roofline_fraction']))}"
        lines.append(line)
    return ["\n".join(lines)]


def _times(point: dict[str, Any], passes: list[str], title: str) -> Table:
    whole, sums = point["whole"], point["sum_of_parts"]
    unit, factor = time_unit(whole["forward"]["seconds"]["median"])
    on_gpu = [f"GPU {unit}"] if whole["forward"]["gpu_seconds"] is not None else []
    columns = [column for name in passes for column in (f"{name} {unit}", "p20-p80", *on_gpu, "share")]
    table = Table(title, ["part", *columns])

    def add(name: str, records: dict[str, Any], key: str = "seconds", factor: float = factor) -> None:
        row = [name]
        for record in (records[pass_] for pass_ in passes):
            row += spread_cells(record[key], factor)
            row += [number(factor * record["gpu_seconds"]) if "gpu_seconds" in record else "" for _ in on_gpu]
            row.append(share(record["share"]) if "share" in record else "")
        table.rows.append(row)

    for part in point["parts"]:
        add(part["name"], part)
    add("sum of the parts", sums)
    add("whole", whole)
    add("sum / whole", sums, "of_whole", 1.0)
    return table


def _work(point: dict[str, Any], name: str) -> Table:
    columns = ["part", "FLOP", "bytes", "FLOP/byte", "bound by", "FLOP/s", "of roofline"]
    rows = [(part["name"], part[name]) for part in point["parts"]] + [("whole", point["whole"][name])]
    if point["optimizer"] is not None and name == "backward":
        rows.append(("AdamW", point["optimizer"]))
    table = Table(f"{name.capitalize()}: work, and the roofline", columns)
    for title, record in rows:
        flops = si(record["matmul_flops"] + record["elementwise_flops"])
        cells = [title, flops, si(record["bytes"], "B"), number(record["intensity"]), record["bound"]]
        table.rows.append([*cells, si(record["flops_per_second"]), share(record["roofline_fraction"])])
    return table


def _memory(point: dict[str, Any]) -> Table:
    memory = point["memory"]
    rows = [
        [part["name"], si(part["saved_bytes"], "B"), si(part["peak_added_bytes"], "B")]
        for part in (*memory["parts"], {"name": "whole"} | memory)
    ]
    return Table("Memory", ["part", "saved for backward", "peak above the start"], rows)


def _sweep(document: dict[str, Any]) -> list[Section]:
    """Return a line for each point, the times of the parts, and what loses most."""
    points, axis, mode = document["points"], document["settings"]["sweep"], document["settings"]["mode"]
    measured = [point for point in points if "parts" in point]
    unit, factor = time_unit(min((point["whole"][mode]["seconds"]["median"] for point in measured), default=1.0))
    columns = [axis, f"{mode} {unit}", "p20-p80", f"one token {unit}", "tokens/s", "MFU causal", "sum/whole"]
    table = Table(f"{_MODES[mode]}, MFU of the measured ceiling", [*columns, "saved", "peak"])
    losses = Table("Most time lost against the roofline", [axis, "first", "second", "third"])
    for point in points:
        value = value_on(axis, point)
        if point not in measured:
            table.rows.append([value, point["status"], *[""] * 7])
            continue
        table.rows.append(
            [
                value,
                *spread_cells(point["whole"][mode]["seconds"], factor),
                number(point["overhead"]["seconds"]["median"] * factor),
                si(point["tokens_per_second"]),
                share(point["mfu"]["causal"]["measured"]),
                number(point["sum_of_parts"]["forward" if mode == "forward" else "train"]["of_whole"]["median"]),
                si(point["memory"]["saved_bytes"], "B"),
                si(point["memory"]["peak_bytes"], "B"),
            ]
        )
        lost = [f"{loss['name']} {share(loss['share'])}" for loss in point["losses"]]
        losses.rows.append([value, *lost, *[""] * (3 - len(lost))])
    sections: list[Section] = [describe_all([point["size"] for point in points])] if points else []
    if not measured:
        return [*sections, table]
    passes = ["forward"] if mode == "forward" else ["forward", "backward"]
    unit, factor = time_unit(min(point["whole"]["forward"]["seconds"]["median"] for point in measured))
    parts = Table(f"{' and '.join(passes).capitalize()}, {unit}, by {axis}", ["part", *(row[0] for row in losses.rows)])
    for rows in zip(*(point["parts"] for point in measured), strict=True):
        times = [factor * sum(row[name]["seconds"]["median"] for name in passes) for row in rows]
        parts.rows.append([rows[0]["name"], *map(number, times)])
    return [*sections, table, "One token: the same calls at width 8, which is overhead alone.", losses, parts]


def value_on(axis: str, point: dict[str, Any]) -> str:
    """Return the point's value on the axis of the sweep."""
    return str(point["size"][axis.replace("-", "_")])
