"""Comparisons that the papers make, on one text: equal parameters, data, steps and seeds for all variants."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Literal

import torch
from lab.environment import Environment, device_name, environment
from lab.files import read_json, write_json
from lab.progress import Progress
from lab.records import from_plain, to_plain
from lab.tables import Section, Table, show
from torch import Tensor, nn

from tinyblock import FeedForward, SwiGLU, gelu, silu

from .model import LanguageModel, d_ff_of, with_post_norm
from .text import Text, even_windows, trigram_loss
from .trainer import Diverged, Settings, Trainer

SCHEMA = "tinyblock.training/2"
VALIDATION_BATCHES = 64
LONG_WINDOWS = 128
POINTS = 50  # of a curve: each is the mean of as many steps
BINS = 32  # of positions
Kind = Literal["ffn", "norm", "positions"]
Build = Callable[[Settings], LanguageModel]


def _ungated(
    activation: Callable[[Tensor], Tensor], settings: Settings
) -> LanguageModel:
    """Build a model whose two feed-forward matrices have as many weights as the three of SwiGLU."""
    d_ff = SwiGLU(settings.d_model, device="meta").d_ff * 3 // 2
    return settings.build(ffn=partial(FeedForward, activation=activation), d_ff=d_ff)


def _post_norm(settings: Settings) -> LanguageModel:
    return with_post_norm(settings.build())


# The variants of a comparison have as many parameters, except for the gains of norms.
VARIANTS: dict[Kind, dict[str, Build]] = {
    "ffn": {
        "SwiGLU": Settings.build,
        "GELU": partial(_ungated, gelu),
        "SiLU": partial(_ungated, silu),
        "ReLU": partial(_ungated, torch.relu),
    },
    "norm": {
        "pre-norm": Settings.build,
        "post-norm": _post_norm,
        "no norm": partial(Settings.build, norm=nn.Identity),
    },
    "positions": {
        "RoPE": Settings.build,
        "no positions": partial(Settings.build, theta=None),
    },
}


@dataclass(frozen=True)
class VariantRun:
    """One training of one variant.

    variant: its name.
    seed: of weights and batches.
    lr: peak learning rate.
    parameters: number of weights.
    d_ff: inner width of the feed-forward layers.
    diverged: the step at which the loss or the gradient was no longer finite; None if all steps were taken.
    validation: mean loss after training, in nats per byte; None if it diverged.
    curve: training loss, each the mean of a fiftieth of the steps.
    by_position: validation loss in 32 equal parts of long sequences; None except in the comparison of positions.
    """

    variant: str
    seed: int
    lr: float
    parameters: int
    d_ff: int
    diverged: int | None
    validation: float | None
    curve: tuple[float, ...]
    by_position: tuple[float, ...] | None


@dataclass(frozen=True)
class Comparison:
    """The runs of all variants, with what they share.

    kind: what is compared.
    device: name of the machine's device.
    settings: those of the first seed and learning rate.
    rates: the peak learning rates.
    seeds: number of seeds, from that of the settings on.
    files, bytes, sha256: of the text.
    trigram_validation: loss of a trigram model on the same windows, in nats per byte.
    runs: in the order in which they were trained.
    """

    kind: Kind
    device: str
    settings: Settings
    rates: tuple[float, ...]
    seeds: int
    files: int
    bytes: int
    sha256: str
    trigram_validation: float
    runs: tuple[VariantRun, ...] = ()

    @classmethod
    def of(
        cls,
        kind: Kind,
        device: torch.device,
        settings: Settings,
        rates: Sequence[float],
        seeds: int,
        text: Text,
    ) -> "Comparison":
        """Return a comparison without runs."""
        return cls(
            kind=kind,
            device=device_name(device),
            settings=settings,
            rates=tuple(rates),
            seeds=seeds,
            files=text.files,
            bytes=len(text.training) + len(text.validation),
            sha256=text.sha256,
            trigram_validation=trigram_loss(
                text.training, validation_windows(text, settings)
            ),
        )

    def planned(self) -> list[tuple[str, Settings]]:
        """Return the variant and the settings of each run, in their order."""
        runs = []
        seeds = range(self.settings.seed, self.settings.seed + self.seeds)
        for seed, lr, variant in product(seeds, self.rates, VARIANTS[self.kind]):
            runs.append((variant, replace(self.settings, seed=seed, lr=lr)))
        return runs


def validation_windows(text: Text, settings: Settings) -> Tensor:
    count = VALIDATION_BATCHES * settings.batch_size
    return even_windows(text.validation, count, settings.seq_len + 1)


def write_comparison(
    path: Path, comparison: Comparison, environment: Environment
) -> None:
    """Write a comparison as JSON, with the environment, which is not read back."""
    document = {
        "schema": SCHEMA,
        **to_plain(comparison),
        "environment": asdict(environment),
    }
    write_json(path, document)


def read_comparison(path: Path) -> Comparison:
    """Read what `write_comparison` wrote.

    Raises:
        ValueError: the file cannot be read, or something is missing, has another type, or does not fit the rest.
    """
    document = read_json(path, SCHEMA, "--report")
    try:
        comparison = from_plain(Comparison, document)
        _require_consistent(comparison)
    except ValueError as error:
        raise ValueError(f"--report: {path}: {error}") from None
    return comparison


def _require_consistent(comparison: Comparison) -> None:
    """Raise a ValueError unless all planned runs are there, with losses that can be compared."""
    planned = [(name, each.seed, each.lr) for name, each in comparison.planned()]
    found = [(run.variant, run.seed, run.lr) for run in comparison.runs]
    if sorted(found) != sorted(planned):
        raise ValueError(
            f"it must have the {len(planned)} runs of its variants, rates and seeds, got {len(found)} runs; "
            "was it interrupted?"
        )
    points = {len(run.curve) for run in comparison.runs if run.diverged is None}
    if len(points) > 1:
        raise ValueError(f"all curves must have as many points, got {sorted(points)}")
    for index, run in enumerate(comparison.runs):
        if (run.diverged is None) != (run.validation is not None):
            raise ValueError(f"runs[{index}] must have a validation loss or diverge")
        has_positions = comparison.kind == "positions" and run.diverged is None
        if has_positions and len(run.by_position or ()) != BINS:
            raise ValueError(f"runs[{index}] must have {BINS} positions")


def compare(
    comparison: Comparison,
    text: Text,
    device: torch.device,
    json: Path | None,
    plot: Path | None,
) -> int:
    """Train every variant with every learning rate and seed, show and write the results, and return the exit code."""
    begun_in = environment(device, comparison.settings.seed)
    with Progress() as progress:
        for variant, settings in comparison.planned():
            progress.start(
                f"{variant}, lr {settings.lr:g}, seed {settings.seed}", settings.steps
            )
            run = _train(comparison.kind, variant, settings, text, device, progress)
            comparison = replace(comparison, runs=(*comparison.runs, run))
            if json is not None:
                write_comparison(json, comparison, begun_in)
    return show_comparison(comparison, plot)


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
    each = max(1, trainer.settings.steps // POINTS)
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
        own = [run for run in runs if (run.variant, run.lr) == (variant, lr)]
        paired = [run for run in differences if (run.variant, run.lr) == (variant, lr)]
        table.rows.append(_row(own, paired))
    settings = comparison.settings
    return [
        table,
        f"{settings.steps} steps of {settings.batch_size} x {settings.seq_len} bytes, "
        f"{settings.warmup} of them warm-up; trigram model: {comparison.trigram_validation:.4f} nats/byte",
    ]


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
