"""Comparisons that the papers make, on one text: equal parameters, data, steps and seeds for all variants."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean

import torch
from lab.environment import environment
from lab.progress import Progress
from lab.tables import Section, Table, show

from .comparison import (
    BINS,
    LONG_WINDOWS,
    VARIANTS,
    Comparison,
    Kind,
    VariantRun,
    steps_per_point,
    validation_windows,
    write_comparison,
)
from .model import d_ff_of
from .text import Text, even_windows
from .trainer import Diverged, Settings, Trainer


def compare(
    comparison: Comparison,
    text: Text,
    device: torch.device,
    json: Path | None,
    plot: Path | None,
) -> int:
    """Train every variant with every learning rate and seed, show and write the results, and return the exit code."""
    environment_at_start = environment(device, comparison.settings.seed)
    trained = comparison
    with Progress() as progress:
        for variant, settings in comparison.planned():
            progress.start(
                f"{variant}, lr {settings.lr:g}, seed {settings.seed}", settings.steps
            )
            run = _train(comparison.kind, variant, settings, text, device, progress)
            trained = replace(trained, runs=(*trained.runs, run))
            if json is not None:
                write_comparison(json, trained, environment_at_start)
    return show_comparison(trained, plot)


def _train(
    kind: Kind,
    variant: str,
    settings: Settings,
    text: Text,
    device: torch.device,
    progress: Progress,
) -> VariantRun:
    """Train one variant and validate it, unless it diverges."""
    torch.manual_seed(settings.seed)
    model = VARIANTS[kind][variant](settings).to(device)
    trainer = Trainer(model, text.training, settings)
    diverged = None
    validation = None
    by_position = None
    try:
        while trainer.step < settings.steps:
            trainer.advance()
            progress.advance()
    except Diverged:
        diverged = trainer.step + 1
    else:
        windows = validation_windows(text, settings)
        validation = round(float(trainer.validate(windows).mean()), 5)
        if kind == "positions":
            by_position = _losses_by_position(trainer, text)
    return VariantRun(
        variant=variant,
        seed=settings.seed,
        lr=settings.lr,
        parameters=sum(map(torch.numel, model.parameters())),
        d_ff=d_ff_of(model),
        diverged=diverged,
        validation=validation,
        curve=_curve(trainer),
        by_position=by_position,
    )


def _losses_by_position(trainer: Trainer, text: Text) -> tuple[float, ...]:
    """Return the mean loss in equal parts of sequences that are longer than those in training."""
    length = trainer.settings.max_seq_len + 1
    windows = even_windows(text.validation, LONG_WINDOWS, length)
    parts = trainer.validate(windows).chunk(BINS)
    return tuple(round(float(part.mean()), 4) for part in parts)


def _curve(trainer: Trainer) -> tuple[float, ...]:
    """Return the training loss as means over equal numbers of steps."""
    losses = [record.loss for record in trainer.history]
    each = steps_per_point(trainer.settings)
    starts = range(0, len(losses), each)
    return tuple(round(mean(losses[at : at + each]), 4) for at in starts)


def show_comparison(comparison: Comparison, plot: Path | None) -> int:
    """Print the table of a comparison, draw it, and return the exit code."""
    differences = minus_first(comparison.runs)
    show(_sections(comparison, differences))
    drawn = comparison.runs
    if comparison.kind == "ffn":
        drawn = tuple(differences)
    if plot is not None and any(run.diverged is None for run in drawn):
        from .plot import plot_comparison

        plot_comparison(plot, replace(comparison, runs=drawn))
    return 0


def minus_first(runs: Sequence[VariantRun]) -> list[VariantRun]:
    """Return the runs with their losses minus those of the first variant with the same seed and learning rate.

    Runs that diverged, and runs whose counterpart did, are left out.
    """
    firsts = {}
    for run in runs:
        if run.variant == runs[0].variant and run.diverged is None:
            firsts[run.seed, run.lr] = run
    differences = []
    for run in runs:
        first = firsts.get((run.seed, run.lr))
        if first is None or run.validation is None or first.validation is None:
            continue
        curve = tuple(a - b for a, b in zip(run.curve, first.curve, strict=True))
        loss = run.validation - first.validation
        differences.append(replace(run, curve=curve, validation=loss))
    return differences


def _sections(
    comparison: Comparison, differences: Sequence[VariantRun]
) -> list[Section]:
    runs = comparison.runs
    columns = ["variant", "peak lr", "parameters", "d_ff", "seeds"]
    columns += ["validation, nats/byte", "range", f"minus {runs[0].variant}", "range"]
    table = Table(f"{comparison.kind}: mean and range over the seeds", columns)
    for variant, lr in dict.fromkeys((run.variant, run.lr) for run in runs):
        own = _runs_of(variant, lr, runs)
        paired = _runs_of(variant, lr, differences)
        table.rows.append(_row(own, paired))
    settings = comparison.settings
    return [
        table,
        f"{settings.steps} steps of {settings.batch_size} x {settings.seq_len} bytes, "
        f"{settings.warmup} of them warm-up; trigram model: {comparison.trigram_validation:.4f} nats/byte",
    ]


def _runs_of(variant: str, lr: float, runs: Sequence[VariantRun]) -> list[VariantRun]:
    return [run for run in runs if run.variant == variant and run.lr == lr]


def _row(own: Sequence[VariantRun], paired: Sequence[VariantRun]) -> list[str]:
    """Return the cells of one variant at one learning rate."""
    trained = sum(run.diverged is None for run in own)
    seeds = str(trained) if trained == len(own) else f"{trained} of {len(own)}"
    first = own[0]
    cells = [first.variant, f"{first.lr:g}", f"{first.parameters:,}"]
    cells += [str(first.d_ff), seeds]
    return [*cells, *_mean_and_range(own), *_mean_and_range(paired)]


def _mean_and_range(runs: Sequence[VariantRun]) -> list[str]:
    losses = [run.validation for run in runs if run.validation is not None]
    if not losses:
        return ["diverged", ""]
    return [f"{mean(losses):.4f}", f"{min(losses):.4f} to {max(losses):.4f}"]
