"""The profile of several processes as text."""

from typing import Any

from lab.tables import Section, Table, number, share, si, spread_cells, time_unit

from .report import describe, doubts, header, held

_LEGEND = (
    "Times are medians over the rounds, of the slowest process in each. Speed-up: over one process with the whole\n"
    "batch, in turns with the others. Collectives: timed alone at these sizes, without waiting for a slower process."
)


def distributed_report(document: dict[str, Any]) -> list[Section]:
    """Return the sections of a profile of several processes."""
    sections: list[Section] = [header(document), *doubts(document)]
    for point in document["points"]:
        sections += [_summary(point), _times(point), _collectives(point)]
    return [*sections, _LEGEND]


def _times(point: dict[str, Any]) -> Table:
    unit, factor = time_unit(point["whole"]["forward"]["seconds"]["median"])
    columns = [
        "whole",
        f"slowest {unit}",
        "p20-p80",
        "ranks differ",
        f"one process {unit}",
        "p20-p80",
    ]
    table = Table(
        describe(point["size"]), [*columns, "speed-up", "p20-p80", "efficiency"]
    )
    for name, record in point["whole"].items():
        differ = share(max(record["of_ranks"]) / min(record["of_ranks"]) - 1)
        cells = [
            name,
            *spread_cells(record["seconds"], factor),
            differ,
            *spread_cells(record["one_process"], factor),
        ]
        table.rows.append(
            [*cells, *spread_cells(record["speed_up"], 1), share(record["efficiency"])]
        )
    return table


def _collectives(point: dict[str, Any]) -> Table:
    unit, factor = time_unit(point["whole"]["forward"]["seconds"]["median"])
    table = Table(
        "Collectives",
        [
            "pass, axis, kind",
            "number",
            "bytes",
            "B/s received",
            f"alone {unit}",
            "share",
        ],
    )
    for record in point["collectives"]:
        calls = [
            ", ".join(record[key] for key in ("pass", "axis", "kind")),
            str(record["count"]),
        ]
        moved = [
            si(record["bytes"], "B"),
            si(record["moved_bytes"] / record["seconds"]),
        ]
        table.rows.append(
            [*calls, *moved, number(factor * record["seconds"]), share(record["share"])]
        )
    seconds, shares = (
        sum(record[key] for record in point["collectives"])
        for key in ("seconds", "share")
    )
    table.rows.append(["all", "", "", "", number(factor * seconds), share(shares)])
    return table


def _summary(point: dict[str, Any]) -> str:
    links = ", ".join(
        f"{axis} {si(rate['median'], 'B/s')}" for axis, rate in point["links"].items()
    )
    hidden = "nothing, as torch.profiler saw no kernel of NCCL"  # gloo works on the cores that compute
    if (overlap := point["overlap"]) is not None:
        fraction = overlap["hidden_seconds"] / overlap["collective_seconds"]
        hidden = f"{share(fraction)} of {number(1e3 * overlap['collective_seconds'])} ms of NCCL's kernels"
    return (
        f"{si(point['tokens_per_second'])} tokens/s; MFU of the measured ceiling, causal: {share(point['mfu'])}\n"
        f"Hidden behind computing: {hidden}\n"
        f"Links, each process receives in a large all-gather: {links}\n"
        f"{held(point['memory'])}"
    )
