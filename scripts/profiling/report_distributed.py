"""Show a profile of several processes as text."""

from lab.tables import (
    Section,
    Table,
    number,
    share,
    si,
    spread_cells,
    time_unit,
)

from .records import (
    DistributedPass,
    DistributedPoint,
    HeldMemory,
    OutOfMemory,
    Profile,
)
from .report import MFU, describe, doubts, header, held

_LEGEND = (
    "Times are medians over the rounds, of the slowest process in each round. Speedup is relative to a single\n"
    "process on the whole batch, timed in alternation. Efficiency is the speedup divided by the number of processes.\n"
    "Each collective is timed alone at these sizes, so it does not wait for a slower process."
)


def distributed_report(profile: Profile) -> list[Section]:
    """Return the sections of a profile of several processes."""
    sections: list[Section] = [header(profile), *doubts(profile)]
    for point in profile.points:
        if isinstance(point, OutOfMemory):
            sections.append(f"{describe(point.size)}\n{point.kind}: {point.error}")
        if isinstance(point, DistributedPoint):
            sections.append(_summary(point, profile))
            sections.append(_times(point))
            sections.append(_collectives(point, profile.settings.mode))
    return [*sections, _LEGEND]


def _summary(point: DistributedPoint, profile: Profile) -> str:
    mode = profile.settings.mode
    seconds = point.whole[mode].seconds.median
    unit, factor = time_unit(seconds)
    tokens = si(point.size.tokens / seconds)
    peak = profile.settings.mesh.processes * profile.ceilings.flops_per_second.median
    mfu = point.size.costs(mode).matmul_flops / seconds / peak
    utilization = f"{share(mfu)}, counting only the causal attention scores"
    if mfu > 1:
        utilization = "n/a: the measured ceilings are too low"
    links = []
    for axis, rate in point.links.items():
        links.append(f"{axis} {si(rate.median, 'B/s')}")
    return (
        f"{mode}: {number(factor * seconds)} {unit}, {tokens} tokens/s\n"
        f"MFU ({MFU} / measured ceilings): {utilization}\n"
        f"Communication overlapped with computation: {_overlap(point, profile)}\n"
        f"Measured link bandwidth (bytes/s per process in a large all-gather): {', '.join(links)}\n"
        f"{_memory_line(point.memory)}"
    )


def _overlap(point: DistributedPoint, profile: Profile) -> str:
    overlap = point.overlap
    if overlap is not None:
        fraction = share(overlap.hidden_seconds / overlap.collective_seconds)
        milliseconds = number(1e3 * overlap.collective_seconds)
        return f"{fraction} of {milliseconds} ms of NCCL's kernels"
    if profile.settings.device.type == "cpu":
        return "not measured on a CPU, where both run on the same cores"
    return "not measured (torch.profiler saw no kernel of NCCL)"


def _memory_line(memory: HeldMemory) -> str:
    peak = si(memory.peak_added_bytes, "B")
    return f"{held(memory)}, allocated by the run at its peak {peak}"


def _times(point: DistributedPoint) -> Table:
    unit, factor = time_unit(point.whole["forward"].seconds.median)
    columns = [
        "pass",
        f"slowest {unit}",
        "p20 to p80",
        "processes differ by",
        f"one process {unit}",
        "p20 to p80",
        "speedup",
        "p20 to p80",
        "efficiency",
    ]
    table = Table(describe(point.size), columns)
    for name, each in point.whole.items():
        table.rows.append([name, *_time_cells(each, factor)])
    return table


def _time_cells(each: DistributedPass, factor: float) -> list[str]:
    """Return the cells of a pass: all processes, a single process, and the first compared with the second."""
    difference = max(each.of_ranks) / min(each.of_ranks) - 1
    efficiency = each.speed_up.median / len(each.of_ranks)
    return [
        *spread_cells(each.seconds, factor),
        share(difference),
        *spread_cells(each.one_process, factor),
        *spread_cells(each.speed_up, 1),
        share(efficiency),
    ]


def _collectives(point: DistributedPoint, mode: str) -> Table:
    whole = point.whole[mode].seconds.median
    unit, factor = time_unit(point.whole["forward"].seconds.median)
    columns = [
        "pass, axis, kind",
        "number",
        "bytes",
        "B/s received",
        f"alone {unit}",
        "share of the time",
    ]
    table = Table("Collectives", columns)
    total = 0.0
    for record in point.collectives:
        total += record.seconds
        cells = [
            f"{record.pass_name}, {record.axis}, {record.kind}",
            str(record.count),
            si(record.bytes, "B"),
            si(record.moved_bytes / record.seconds),
            number(factor * record.seconds),
            share(record.seconds / whole),
        ]
        table.rows.append(cells)
    last = [number(factor * total), share(total / whole)]
    table.rows.append(["all", "", "", "", *last])
    return table
