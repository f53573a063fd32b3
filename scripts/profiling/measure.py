"""Measure a model: what its parts do, how long they take, and what the machine allows."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from lab.machine import environment
from lab.timing import Clock, Spread
from torch._dynamo.utils import counters

from .parts import GPU_IDLE, NO_PART, REST, TOTAL
from .roofline import Rates, Row, name_of
from .runs import (
    EAGER_PARTS,
    Batch,
    Build,
    Memory,
    RateSamplers,
    Recording,
    Settings,
    Subject,
    Times,
    compile_whole,
    compiles_itself,
    prepare,
    record,
)
from .work import ledgers_of, rows_of, runs_that_differ

LEDGERS = 3  # runs in which each operation is timed
SHOWN = 0.01  # of the total: parts without operations that take less are not shown


@dataclass
class Profile:
    """All that was measured.

    parts_are_eager: the total is compiled, at least partly, and the parts are not.
    samples_per_s: tokens per second, or samples, as the batch has.
    took_s: the total time.
    rest_varies: the range from p20 to p80 of the row `rest`, divided by the total time.
    mfu: the time of the FLOPs at the measured matmul rates, divided by the total time.
    """

    title: str
    machine: str
    settings: Settings
    parts_are_eager: bool
    batch: Batch
    samples_per_s: float
    took_s: Spread
    mfu: float
    rates: Rates
    rows: list[Row]
    whole: Row
    rest_varies: float
    memory: Memory
    recording: Recording
    notes: list[str]


def measure(
    build: Build,
    shape: tuple[int, int, int],
    title: str,
    settings: Settings,
    clock: Clock,
    rates_of: RateSamplers,
    trace: Path | None = None,
    progress: Callable[[str], None] = lambda doing: None,
) -> Profile:
    """Measure a model by a clock, beside the machine's rates. With a path, write a trace.

    progress: is told what is being done.
    Gradients must be enabled in the modes that train.
    """
    progress("building the model, and running it twice")
    torch.manual_seed(0)
    counters.clear()
    subject = prepare(build, shape, settings, clock)
    parts_are_eager = compiles_itself(subject)
    notes = shape_checks()
    if parts_are_eager:
        notes.append(f"The model compiles some of its parts. {EAGER_PARTS}")
    if settings.compile:
        progress("compiling")
        notes.append(compile_whole(subject))
        parts_are_eager |= subject.is_compiled

    # What the parts do.
    progress("noting each operation")
    ledgers = ledgers_of(
        subject.model,
        subject.inputs,
        settings.device,
        subject.run_parts,
        clock,
        LEDGERS,
    )
    if not ledgers[0].sees_kept:
        notes.append("Kept bytes are unknown, because torch.func.grad hides them.")
    rows = rows_of(ledgers)
    differ = runs_that_differ(ledgers)
    if differ:
        notes.append(
            f"Runs differ in {', '.join(differ)}: the figures are those of one run."
        )

    # How long they take, and what the machine allows.
    dtypes = {getattr(torch, name) for row in rows for name in row.flops}
    of_rates = rates_of(settings.device, dtypes | {settings.dtype}, clock)
    times = Times.take(subject, of_rates, progress)
    rates = Rates.of(times.rates)
    took = Spread.of(times.whole)
    for row in rows:
        times.set_on(row)
        row.compare(rates, settings.on_gpu)
    whole = total(rows, took, rates, subject, parts_are_eager)

    # What they leave. A profiler makes launches slower, so it comes last.
    rows = [row for row in rows if is_shown(row, whole.total_s)]
    rows += weights_of_no_part(rows, whole)
    rest_varies = Spread.of(times.rest(rows)).range / whole.total_s
    notes += times.noise(rows, whole, rest_varies)
    progress("recording the memory and the kernels of a run")
    recording, memory = record(
        subject, ledgers[0].read, trace, label_parts=not parts_are_eager
    )
    rows += left_over(rows, whole, recording, rest_varies)

    built_mode = "training" if subject.model.training else "eval"
    return Profile(
        title=f"{title}: {subject.batch.sizes}; {name_of(settings.dtype)}, "
        f"{settings.mode}, {'compiled' if subject.is_compiled else 'eager'}, "
        f"{built_mode} mode",
        machine=environment(settings.device),
        settings=settings,
        parts_are_eager=parts_are_eager,
        batch=subject.batch,
        samples_per_s=subject.batch.count / took.median,
        took_s=took,
        mfu=whole.compute_s / whole.total_s,
        rates=rates,
        rows=rows,
        whole=whole,
        rest_varies=rest_varies,
        memory=memory,
        recording=recording,
        notes=notes,
    )


def shape_checks() -> list[str]:
    """Say whether jaxtyping's checks ran, if something has imported it."""
    jaxtyping = sys.modules.get("jaxtyping")
    if jaxtyping is None:
        return []
    state = "off" if jaxtyping.config.jaxtyping_disable else "on"
    return [f"Shape checks: {state} (JAXTYPING_DISABLE=1 turns them off)"]


def is_shown(row: Row, total_s: float) -> bool:
    """Say if a part does more than to call others."""
    return bool(row.operations or row.unknown) or row.total_s > SHOWN * total_s


def weights_of_no_part(rows: list[Row], whole: Row) -> list[Row]:
    """Return a row for the weights of modules that are not called, if there are any.

    A module may use the weights of its children, as nn.MultiheadAttention does.
    """
    others = whole.parameters - sum(row.parameters for row in rows)
    return [Row(NO_PART, parameters=others)] if others else []


def total(
    rows: list[Row],
    took: Spread,
    rates: Rates,
    subject: Subject,
    parts_are_eager: bool,
) -> Row:
    """Return the total: the time of the whole, and the work of all parts."""
    whole = Row(TOTAL, total_s=took.median, p20_s=took.p20, varies=took.width)
    whole.parameters = sum(weight.numel() for weight in subject.weights)
    for row in rows:
        add_work(whole, row)
    whole.operations.sort(key=lambda each: -each.total_s)
    whole.compare(rates, subject.settings.on_gpu)
    whole.limit = ""
    # Nothing is fused over parts. A part that is faster than its least time, because its
    # data came from a cache, does not make up for another one.
    whole.least_s = sum(min(row.least_s, row.total_s) for row in rows)
    if parts_are_eager:  # compiling fuses parts, and removes operations
        whole.forward_s = whole.of_roofline = whole.overhead_s = None
        return whole
    whole.of_roofline = whole.least_s / whole.total_s
    whole.overhead_s = whole.computations / rates.small_operations_per_s
    whole.forward_s = took.median
    if subject.settings.train:  # the parts and the whole are measured in separate runs
        forward = sum(row.forward_s or 0.0 for row in rows)
        whole.forward_s = min(forward, took.median)
    return whole


def add_work(whole: Row, row: Row) -> None:
    """Add the work of a part to that of all parts."""
    for each in row.operations:
        whole.operation(each.name).add(each)
    for dtype, count in row.flops.items():
        whole.flops[dtype] = whole.flops.get(dtype, 0) + count
    whole.unknown += [name for name in row.unknown if name not in whole.unknown]
    whole.moved_bytes += row.moved_bytes
    if row.kept_bytes is None or whole.kept_bytes is None:
        whole.kept_bytes = None
    else:
        whole.kept_bytes += row.kept_bytes


def left_over(
    rows: list[Row], whole: Row, recording: Recording, rest_varies: float
) -> list[Row]:
    """Return the rest of the total time and, on a GPU, the time without a kernel."""
    left = whole.total_s - sum(row.total_s for row in rows)
    idle = []
    if recording.kernels:
        idle = [Row(GPU_IDLE, total_s=whole.total_s - recording.busy_s)]
        left -= idle[0].total_s
    rest = Row(REST, total_s=left)
    if left:
        rest.varies = rest_varies * whole.total_s / abs(left)
    if abs(left) < rest_varies * whole.total_s:
        rest.limit = "noise"
    return [rest, *idle]
