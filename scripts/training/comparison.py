"""A comparison of variants that are trained: the variants, the record of their runs, and its JSON file."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Literal

import torch
from lab.environment import Environment, device_name
from lab.files import read_json, write_json
from lab.records import from_plain, to_plain
from torch import Tensor, nn

from tinyblock import FeedForward, SwiGLU, gelu, silu

from .model import LanguageModel, with_post_norm
from .text import Text, even_windows, trigram_loss
from .trainer import Settings, require_at_least_one

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

    def __post_init__(self) -> None:
        require_at_least_one(self, "parameters", "d_ff")


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

    def __post_init__(self) -> None:
        require_at_least_one(self, "seeds", "files", "bytes")
        if self.rates[:1] != (self.settings.lr,):
            raise ValueError(
                f"rates must begin with settings.lr {self.settings.lr}, got {list(self.rates)}"
            )
        if min(self.rates) <= 0:
            raise ValueError(f"rates must be positive, got {list(self.rates)}")
        if len(set(self.rates)) < len(self.rates):
            raise ValueError(f"rates must differ, got {list(self.rates)}")
        if self.trigram_validation <= 0:
            raise ValueError(
                f"trigram_validation must be positive, got {self.trigram_validation}"
            )

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
        windows = validation_windows(text, settings)
        return cls(
            kind=kind,
            device=device_name(device),
            settings=settings,
            rates=tuple(rates),
            seeds=seeds,
            files=text.files,
            bytes=len(text.training) + len(text.validation),
            sha256=text.sha256,
            trigram_validation=trigram_loss(text.training, windows),
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


def steps_per_point(settings: Settings) -> int:
    """Return the number of steps whose mean loss is a point of a curve; the last point may have fewer."""
    return max(1, settings.steps // POINTS)


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
    document = read_json(path, SCHEMA, "--report", "train_lm.py --compare ... --json")
    try:
        comparison = from_plain(Comparison, document)
        _require_consistent(comparison)
    except ValueError as error:
        raise ValueError(f"--report: {path}: {error}") from None
    return comparison


def _require_consistent(comparison: Comparison) -> None:
    """Raise a ValueError unless all planned runs are there, with losses that can be compared."""
    variants = len(VARIANTS[comparison.kind])
    number = variants * len(comparison.rates) * comparison.seeds
    # Compared before the runs are planned: a damaged file may have more seeds than memory can hold.
    if len(comparison.runs) != number:
        raise ValueError(
            f"it must have the {number} runs of its variants, rates and seeds, "
            f"got {len(comparison.runs)} runs; was it interrupted?"
        )
    for index, planned in enumerate(comparison.planned()):
        where = f"runs[{index}]"
        run = comparison.runs[index]
        _require_planned(run, *planned, where)
        _require_curve(run, comparison.settings, where)
        _require_validation(run, comparison.kind, where)


def _require_planned(
    run: VariantRun, variant: str, settings: Settings, where: str
) -> None:
    expected = f"{variant} with seed {settings.seed} and lr {settings.lr}"
    got = f"{run.variant} with seed {run.seed} and lr {run.lr}"
    if got != expected:
        raise ValueError(f"{where} must be {expected}, got {got}")


def _require_curve(run: VariantRun, settings: Settings, where: str) -> None:
    """Raise a ValueError unless a run has the training losses of the steps that it took."""
    taken = settings.steps
    if run.diverged is not None:
        taken = run.diverged - 1
    if not 0 <= taken <= settings.steps:
        raise ValueError(
            f"{where}.diverged must be from 1 to settings.steps {settings.steps}, got {run.diverged}"
        )
    each = steps_per_point(settings)
    points = (taken + each - 1) // each
    if len(run.curve) != points:
        raise ValueError(
            f"{where}.curve must have {points} points for {taken} steps, got {len(run.curve)}"
        )
    _require_no_negative(run.curve, f"{where}.curve")


def _require_validation(run: VariantRun, kind: Kind, where: str) -> None:
    """Raise a ValueError unless a run has the losses of its validation, and none if it diverged."""
    if (run.diverged is None) != (run.validation is not None):
        raise ValueError(f"{where} must have a validation loss or diverge")
    by_position = run.by_position or ()
    has_positions = kind == "positions" and run.diverged is None
    if has_positions and len(by_position) != BINS:
        raise ValueError(f"{where} must have {BINS} positions, got {len(by_position)}")
    _require_no_negative(by_position, f"{where}.by_position")
    if run.validation is not None:
        _require_no_negative([run.validation], f"{where}.validation")


def _require_no_negative(losses: Sequence[float], where: str) -> None:
    for loss in losses:
        if loss < 0:
            raise ValueError(f"{where} must have no negative loss, got {loss}")
