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
from .trainer import Settings

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
