"""The profile of one process as text: the conclusions first, then the tables behind them."""

from itertools import chain
from typing import Any

from lab.presets import PRESETS
from lab.tables import (
    Section,
    Table,
    number,
    plural,
    share,
    si,
    spread_cells,
    time_unit,
)

from .collectives import Mesh

_MODES = {
    "forward": "Forward",
    "train": "Forward and backward",
    "step": "Forward, backward and AdamW",
}

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
    axis, lines = document["settings"]["sweep"], []
    for point in document["points"]:
        if "trust" in point and point["trust"]["doubts"]:
            at = f"{axis} {value_on(axis, point)}: " if axis else ""
            lines.append(f"  {at}{'; '.join(point['trust']['doubts'])}")
    advice = (
        "Close other programs, use fewer threads (OMP_NUM_THREADS) or raise --rounds."
    )
    return ["\n".join(["Do not trust these figures:", *lines, advice])] if lines else []


def describe(*sizes: dict[str, Any]) -> str:
    """Return sizes in one line, with a range for what changes from the first to the last."""
    first, last = sizes[0], sizes[-1]
    size = {
        key: first[key] if first[key] == last[key] else f"{first[key]} to {last[key]}"
        for key in first
    }
    stack = (
        "Block"
        if size["num_layers"] is None
        else f"Transformer of {size['num_layers']}"
    )
    grouped = (
        ""
        if size["num_kv_heads"] == size["num_heads"]
        else f" ({size['num_kv_heads']} for keys and values)"
    )
    norm = ", q/k norm" if size["qk_norm"] else ""
    vocabulary = f", vocabulary {size['vocab']}" if size.get("vocab") else ""
    return (
        f"{stack}: batch {size['batch_size']}, {size['seq_len']} tokens, d_model {size['d_model']}, "
        f"{size['num_heads']} heads of {size['d_head']}{grouped}{norm}, d_ff {size['d_ff']}{vocabulary}"
    )


def origin(document: dict[str, Any]) -> str:
    """Return in one line where, how and when was measured."""
    settings, environment = document["settings"], document["environment"]
    threads = (
        f", {plural(environment['threads'], 'thread')}"
        if settings["device"] == "cpu"
        else ""
    )
    how = f"{settings['dtype']}, mode {settings['mode']}, {'compiled' if settings['compile'] else 'eager'}"
    date = environment["date"].partition("T")[0]
    return (
        f"{environment['device']}{threads}; {how}; torch {environment['torch']}; {date}"
    )


def header(document: dict[str, Any]) -> str:
    """Return the origin, what else was chosen, and the ceilings."""
    settings, ceilings = document["settings"], document["ceilings"]
    facts = [str(Mesh(**settings["mesh"]))]
    facts += dict.fromkeys(
        f"{p['attention_kernel']} attention"
        for p in document["points"]
        if "attention_kernel" in p
    )
    if preset := settings["preset"]:
        facts.append(
            f"preset {preset} ({PRESETS[preset].num_layers} blocks in the model)"
        )
    sheet = ceilings["datasheet"]
    known = (
        rates(sheet["flops_per_second"], sheet["bytes_per_second"]) if sheet else "n/a"
    )
    return (
        f"{origin(document)}\n{', '.join(facts)}\n"
        f"Ceilings: measured {rates(ceilings['flops_per_second']['median'], ceilings['bytes_per_second']['median'])} "
        f"(a product of {ceilings['product_size']}, {si(ceilings['sustained_flops_per_second'], 'FLOP/s')} when it "
        f"runs for half a second; a copy of {si(ceilings['copy_bytes'], 'B')}); datasheet {known}"
    )


def rates(flops_per_second: float | None, bytes_per_second: float) -> str:
    return f"{si(flops_per_second, 'FLOP/s')}, {si(bytes_per_second, 'B/s')}"


def held(memory: dict[str, Any]) -> str:
    """Return the memory of a whole in one line."""
    sizes = {
        key.removesuffix("_bytes"): si(size, "B")
        for key, size in memory.items()
        if key != "parts"
    }
    sizes["peak above the start"] = sizes.pop("peak_added")
    return f"Memory: {', '.join(f'{key} {size}' for key, size in sizes.items()).replace('_', ' ')}"


def _point(point: dict[str, Any], document: dict[str, Any]) -> list[Section]:
    title, layers = describe(point["size"]), point["size"]["num_layers"]
    if "parts" not in point:
        return [f"{title}\n{point['status']}: {point['error']}"]
    if layers is not None and layers > 1:
        title += f"; parts of one block, which the sum counts {layers} times"
    passes = [name for name in ("forward", "backward") if name in point["whole"]]
    memory = Table("Memory", ["part", "saved for backward", "peak above the start"])
    for part in (*point["memory"]["parts"], {"name": "whole"} | point["memory"]):
        memory.rows.append(
            [
                part["name"],
                *(si(part[key], "B") for key in ("saved_bytes", "peak_added_bytes")),
            ]
        )
    tables = [
        _times(point, passes, title),
        *(_work(point, name) for name in passes),
        memory,
    ]
    return [_summary(point, document), *_losses(point), *tables, _LEGEND]


def _summary(point: dict[str, Any], document: dict[str, Any]) -> str:
    mode, on_cpu = document["settings"]["mode"], document["settings"]["device"] == "cpu"
    kernels, compiled, mfu = (point[key] for key in ("kernels", "compile", "mfu"))
    seconds = point["whole"][mode]["seconds"]
    unit, factor = time_unit(seconds["median"])

    def timed(spread: dict[str, float]) -> str:
        median, low_to_high = spread_cells(spread, factor)
        return f"{median} {unit} ({low_to_high})"

    rate, fraction = (
        si(point["tokens_per_second"]),
        share(point["whole"][mode]["roofline_fraction"]),
    )
    lines = [
        f"{_MODES[mode]}: {timed(seconds)}, {rate} tokens/s, {fraction} of the roofline"
    ]
    if point["optimizer"] is not None:
        update = point["optimizer"]["seconds"]
        lines.append(
            f"AdamW: {timed(update)}, {share(update['median'] / seconds['median'])} of the step"
        )
    for source, name in (("measured", "measured ceiling"), ("datasheet", "datasheet")):
        lines.append(
            f"MFU of the {name}: causal {share(mfu['causal'][source])}, dense {share(mfu['dense'][source])}"
        )
    if (
        on_cpu or kernels is None or kernels["launch_bound"]
    ):  # else the GPU does not wait for the host
        overhead = point["overhead"]
        part = (
            f", {share(overhead['share'])} of the whole"
            if on_cpu and overhead["share"] <= 1
            else ""
        )
        smallest = f"Same calls on one token of width 8: {number(overhead['seconds']['median'] * factor)} {unit}{part}"
        lines.append(f"{smallest}, all of it overhead: Python, dispatch and launches")
    if kernels is not None:
        bound = "launch-bound" if kernels["launch_bound"] else "not launch-bound"
        lines.append(
            f"Kernels: {kernels['count']}, which run {share(kernels['busy_fraction'])} of the time: {bound}"
        )
    if compiled is not None:
        cache = ", from inductor's cache" if compiled["from_cache"] else ""
        graphs = f"{plural(compiled['graphs'], 'graph')}, {plural(compiled['graph_breaks'], 'break')}"
        lines.append(
            f"Compilation of the whole: {number(compiled['seconds'])} s{cache}; {graphs}"
        )
        lines += [
            f"  break: {' '.join(reason.split())}"
            for reason in compiled["break_reasons"]
        ]
    return "\n".join([*lines, held(point["memory"])])


def _losses(point: dict[str, Any]) -> list[str]:
    """Return the parts that lose most, and why: but no reasons where the figures cannot be trusted."""
    lines = ["Most time lost against the roofline:"]
    for loss in point["losses"]:
        unit, factor = time_unit(loss["seconds"])
        line = f"  {loss['name']}: {number(loss['seconds'] * factor)} {unit}, {share(loss['share'])} of the whole"
        if not point["trust"]["doubts"]:
            line += (
                f"; {_CAUSES[loss['cause']].format(share(loss['roofline_fraction']))}"
            )
        lines.append(line)
    return ["\n".join(lines)] if point["losses"] else []


def _times(point: dict[str, Any], passes: list[str], title: str) -> Table:
    whole, sums = point["whole"], point["sum_of_parts"]
    unit, factor = time_unit(whole["forward"]["seconds"]["median"])
    on_gpu = [f"GPU {unit}"] if whole["forward"]["gpu_seconds"] is not None else []

    def cells(record: dict[str, Any]) -> list[str]:
        gpu = [
            number(factor * record["gpu_seconds"]) if "gpu_seconds" in record else ""
            for _ in on_gpu
        ]
        return [
            *spread_cells(record["seconds"], factor),
            *gpu,
            share(record["share"]) if "share" in record else "",
        ]

    columns = [
        column
        for name in passes
        for column in (f"{name} {unit}", "p20-p80", *on_gpu, "share")
    ]
    table = Table(title, ["part", *columns])
    for row in (
        *point["parts"],
        {"name": "sum of the parts"} | sums,
        {"name": "whole"} | whole,
    ):
        table.rows.append(
            [row["name"], *chain(*(cells(row[pass_]) for pass_ in passes))]
        )
    ratios = (
        [*spread_cells(sums[pass_]["of_whole"], 1), *("" for _ in on_gpu), ""]
        for pass_ in passes
    )
    table.rows.append(["sum / whole", *chain(*ratios)])
    return table


def _work(point: dict[str, Any], name: str) -> Table:
    columns = [
        "part",
        "FLOP",
        "bytes",
        "FLOP/byte",
        "bound by",
        "FLOP/s",
        "of roofline",
    ]
    table = Table(f"{name.capitalize()}: work, and the roofline", columns)
    adamw = {"name": "AdamW", "backward": point["optimizer"]}
    for part in (*point["parts"], {"name": "whole"} | point["whole"], adamw):
        if record := part.get(name):
            flops = si(record["matmul_flops"] + record["elementwise_flops"])
            cells = [
                part["name"],
                flops,
                si(record["bytes"], "B"),
                number(record["intensity"]),
                record["bound"],
            ]
            table.rows.append(
                [
                    *cells,
                    si(record["flops_per_second"]),
                    share(record["roofline_fraction"]),
                ]
            )
    return table


def _sweep(document: dict[str, Any]) -> list[Section]:
    """Return a line for each point, what loses most, and the times of the parts."""
    points, axis, mode = (
        document["points"],
        document["settings"]["sweep"],
        document["settings"]["mode"],
    )
    measured = [point for point in points if "parts" in point]
    unit, factor = time_unit(
        min(
            (point["whole"][mode]["seconds"]["median"] for point in measured),
            default=1.0,
        )
    )
    columns = [
        axis,
        f"{mode} {unit}",
        "p20-p80",
        f"one token {unit}",
        "tokens/s",
        "MFU causal",
        "sum/whole",
    ]
    title = (
        f"{_MODES[mode]}, MFU of the measured ceiling; "
        "one token: the same calls at width 8, which are overhead alone"
    )
    table = Table(title, [*columns, "saved", "peak"])
    losses = Table(
        "Most time lost against the roofline", [axis, "first", "second", "third"]
    )
    for point in points:
        cells = [point["status"], *[""] * 7]
        if point in measured:
            cells = [
                *spread_cells(point["whole"][mode]["seconds"], factor),
                number(point["overhead"]["seconds"]["median"] * factor),
                si(point["tokens_per_second"]),
                share(point["mfu"]["causal"]["measured"]),
                number(
                    point["sum_of_parts"]["forward" if mode == "forward" else "train"][
                        "of_whole"
                    ]["median"]
                ),
                *(
                    si(point["memory"][key], "B")
                    for key in ("saved_bytes", "peak_bytes")
                ),
            ]
            lost = [
                f"{loss['name']} {share(loss['share'])}" for loss in point["losses"]
            ]
            losses.rows.append([value_on(axis, point), *lost, *[""] * (3 - len(lost))])
        table.rows.append([value_on(axis, point), *cells])
    passes = ["forward"] if mode == "forward" else ["forward", "backward"]
    columns = ["part", *(value_on(axis, point) for point in measured)]
    parts = Table(f"{' and '.join(passes).capitalize()}, {unit}, by {axis}", columns)
    for row in zip(*(point["parts"] for point in measured), strict=True):
        times = (
            sum(part[name]["seconds"]["median"] for name in passes) for part in row
        )
        parts.rows.append(
            [row[0]["name"], *(number(factor * seconds) for seconds in times)]
        )
    return [
        describe(*(point["size"] for point in points)),
        table,
        *([losses, parts] if measured else []),
    ]


def value_on(axis: str, point: dict[str, Any]) -> str:
    """Return the point's value on the axis of the sweep."""
    return str(point["size"][axis.replace("-", "_")])
