"""Measure a model: what its parts do, how long they take, and what the machine allows."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from lab.machine import environment
from lab.timing import Clock, Spread
from torch._dynamo.utils import counters

from .calculate import DIFFERENT, THREADS, Work, bounded, read_before_made, works_of
from .events import record
from .operations import name_of
from .parts import OUTSIDE, Part, known_parts
from .roofline import Rates
from .rows import Row, left_over, row_of, total, weights_of_no_part
from .runs import (
    EAGER_PARTS,
    NOISE,
    Batch,
    Build,
    Memory,
    RateSamplers,
    Recording,
    Settings,
    Times,
    compile_whole,
    compiles_itself,
    prepare,
    record_whole,
)

RECORDS = 3  # runs in which each operation is timed
SHOWN = 0.01  # of the total: parts without operations that take less are not shown


@dataclass(frozen=True)
class Profile:
    """All that was measured.

    parts_are_eager: the total is compiled, at least partly, and the parts are not.
    samples_per_s: tokens per second, or samples, as the batch has.
    took_s: the total time.
    rest_varies: the range from p20 to p80 of the row `rest`, divided by the total time.
    others: the share of the time of all rounds in which other programs had the processor.
    """

    title: str
    machine: str
    settings: Settings
    parts_are_eager: bool
    batch: Batch
    samples_per_s: float
    took_s: Spread
    rates: Rates
    rows: list[Row]
    whole: Row
    rest_varies: float
    others: float
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
        progress(f"compiling the passes of mode {settings.mode}")
        notes.append(compile_whole(subject))
        parts_are_eager |= subject.is_compiled

    # What the parts do.
    progress(f"recording each operation, in {RECORDS} runs")
    records = [
        record(
            subject.parts,
            subject.inputs,
            settings.device,
            subject.run_parts,
            clock,
        )
        for _ in range(RECORDS)
    ]
    if records[0].held is None:
        notes.append("Kept bytes are unknown, because torch.func.grad hides them.")
    works = works_of(records)
    if OUTSIDE in works and is_copying(works[OUTSIDE]):
        works.pop(OUTSIDE)
    if subject.threads:
        works = {part: bounded(work, THREADS) for part, work in works.items()}
        notes.append(
            f"Python threads work in the model ({', '.join(subject.threads[:3])}), and what "
            "they do is not seen. So the model is one part, and its figures and the peak "
            "are bounds."
        )

    # How long they take, and what the machine allows.
    dtypes = {getattr(torch, name) for work in works.values() for name in work.flops}
    progress("measuring the rates of the machine")
    of_rates = rates_of(settings.device, dtypes | {settings.dtype}, clock)
    times = Times.take(subject, of_rates, progress)
    rates = Rates.of(times.rates)
    took = Spread.of(times.whole)
    for part in times.differing({part: work.calls for part, work in works.items()}):
        works[part] = bounded(works.get(part, Work()), DIFFERENT)
    differ = [part for part, work in works.items() if DIFFERENT in work.unseen]
    if differ:
        names = differ[:3]
        if differ[3:]:
            names.append(f"{len(differ) - 3} other parts")
        notes.append(
            f"Runs differ in {', '.join(names)}, so their figures are bounds. The peak is "
            "that of one run."
        )
    optimizers = set().union(*[each.optimizers for each in records])
    parts = known_parts(subject.parts, optimizers)
    rows = [
        row_of(
            parts.get(name, Part(name)),
            work,
            times.of(name),
            rates,
            settings.on_gpu,
        )
        for name, work in works.items()
    ]
    if times.others > NOISE:
        rows = [replace(row, limit="") for row in rows]
    whole = total(
        rows,
        sum(weight.numel() for weight in subject.weights),
        took,
        rates,
        on_gpu=settings.on_gpu,
        parts_are_eager=parts_are_eager,
        trains=settings.train,
    )

    # What they leave. A profiler makes launches slower, so it comes last.
    rows = [row for row in rows if is_shown(row, whole.total_s)]
    rows += weights_of_no_part(rows, whole)
    rest_varies = Spread.of(times.rest(rows)).range / whole.total_s
    notes += times.noise(rows, whole, rest_varies)
    progress("recording the memory and the kernels of a run")
    recording, memory = record_whole(
        subject, read_before_made(records[0]), trace, label_parts=not parts_are_eager
    )
    busy_s = recording.busy_s if recording.kernels else None
    rows += left_over(rows, whole.total_s, busy_s, rest_varies)

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
        rates=rates,
        rows=rows,
        whole=whole,
        rest_varies=rest_varies,
        others=times.others,
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


def is_copying(outside: Work) -> bool:
    """Say if the work outside of the model is nothing but copies of its inputs."""
    working = {each.name for each in outside.operations if each.moved_bytes}
    return working <= {"clone"} and not outside.unknown


def is_shown(row: Row, total_s: float) -> bool:
    """Say if a part does more than to call others."""
    is_seen = bool(row.operations) or row.total_s > SHOWN * total_s
    return is_seen or bool(row.unseen)
