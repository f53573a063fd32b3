"""Pictures of training: the losses of a run, those of variants that are compared, and activations."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from lab.plots import COLORS, LINES, new_figure, save
from lab.tables import plural
from matplotlib.axes import Axes
from matplotlib.figure import SubFigure

from tinyblock import gelu, silu

from .comparison import Comparison, VariantRun
from .trainer import Settings, StepRecord

TITLES = {
    "ffn": "Feed-forward layers: loss minus SwiGLU's, paired by seed",
    "norm": "Pre-norm, post-norm, and no norm",
    "positions": "RoPE versus no positional encoding",
}
ACTIVATIONS = {"SiLU": silu, "GELU": gelu, "ReLU": torch.relu}
HIGHEST = 3.5  # nats per byte that a picture of variants shows; the losses start at 5.5


def sizes_of(settings: Settings, taken: int) -> str:
    """Return the size of a model and of its training, and how many steps it took, for the foot of a picture."""
    layers = plural(settings.num_layers, "layer")
    steps = plural(settings.steps, "step")
    if taken < settings.steps:
        steps = f"{taken} of {steps}"
    return (
        f"{layers}, d_model {settings.d_model}; "
        f"{steps} of {settings.batch_size} x {settings.seq_len} bytes"
    )


def plot_losses(
    path: Path,
    history: Sequence[StepRecord],
    trigram: float,
    title: str,
    origin: str,
) -> None:
    """Draw the training loss of every step, the validation losses, and the loss of a trigram model."""
    figure = new_figure(title, origin, 8, 4.4)
    axes = figure.subplots()
    steps = [record.step for record in history]
    losses = [record.loss for record in history]
    axes.plot(steps, losses, color=COLORS[0], linewidth=0.7, label="training")
    validated = {}
    for record in history:
        if record.validation is not None:
            validated[record.step] = record.validation
    if validated:
        axes.plot(
            list(validated),
            list(validated.values()),
            color=COLORS[3],
            marker="o",
            markersize=4,
            label="validation",
        )
    axes.axhline(
        trigram,
        color="black",
        linestyle="--",
        linewidth=1,
        label="trigram model, validation",
    )
    axes.set(xlabel="step", ylabel="nats per byte")
    _add_axis_of_bits(axes)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    save(figure, path, dpi=110)


def _add_axis_of_bits(axes: Axes) -> None:
    def bits(nats: Any) -> Any:
        return nats / math.log(2)

    def nats(bits: Any) -> Any:
        return bits * math.log(2)

    axes.secondary_yaxis("right", functions=(bits, nats)).set_ylabel("bits per byte")


def plot_activations(path: Path) -> None:
    """Draw SiLU, GELU and ReLU, and their derivatives by autograd."""
    figure = new_figure("Activations of the feed-forward layers", "", 8, 3.6)
    left, right = figure.subplots(1, 2)
    x = torch.linspace(-5, 5, 1001, requires_grad=True)
    for index, (name, function) in enumerate(ACTIVATIONS.items()):
        y = function(x)
        (slope,) = torch.autograd.grad(y.sum(), x)
        look = Look(COLORS[index], LINES[index])
        _draw_line(left, x.tolist(), y.tolist(), look, name)
        _draw_line(right, x.tolist(), slope.tolist(), look, name)
    left.set(title="activation")
    right.set(title="derivative")
    for axes in (left, right):
        axes.set(xlabel="x", xlim=(-5, 5))
        axes.grid(alpha=0.3)
    left.legend(frameon=False)
    save(figure, path, dpi=110)


@dataclass(frozen=True)
class Look:
    """The color and the line style of a variant."""

    color: str
    line: str


def plot_comparison(path: Path, comparison: Comparison) -> None:
    """Draw the losses of each variant in training and after it, with the mean and range over the seeds.

    A variant has a line at the learning rates with which no seed diverged, and crosses at the others.
    """
    settings = comparison.settings
    seeds = plural(comparison.seeds, "seed")
    origin = (
        f"{sizes_of(settings, settings.steps)}, {settings.warmup} of them warm-up; "
        f"mean and range over {seeds}; {comparison.device}"
    )
    figure = new_figure(_title(comparison), origin, 9, 4.2)
    # A part of the figure: a legend of the whole figure would cover its foot.
    [panels] = figure.subfigures(1, 1, squeeze=False).flat
    left, right = panels.subplots(1, 2)
    _label_axes(left, right, comparison)
    variants = dict.fromkeys(run.variant for run in comparison.runs)
    for index, name in enumerate(variants):
        runs = [run for run in comparison.runs if run.variant == name]
        _draw_variant(left, right, comparison, runs, Look(COLORS[index], LINES[index]))
    for axes in (left, right):
        _fit(axes)
    _add_legend(panels)
    save(figure, path, dpi=110)


def _add_legend(panels: SubFigure) -> None:
    """Add a legend below the axes, where it covers no cross."""
    entries = 0
    for axes in panels.axes:
        _, labels = axes.get_legend_handles_labels()
        entries += len(labels)
    # The names of crosses are long.
    columns = 4 if entries <= 4 else 3
    panels.legend(loc="outside lower center", ncols=columns, frameon=False)


def _title(comparison: Comparison) -> str:
    """Return the title of a picture, with what tells comparisons of norms apart."""
    title = TITLES[comparison.kind]
    if comparison.kind != "norm":
        return title
    layers = plural(comparison.settings.num_layers, "layer")
    warmup = comparison.settings.warmup
    if warmup == 0:
        return f"{title}: {layers}, no warm-up"
    return f"{title}: {layers}, {plural(warmup, 'step')} of warm-up"


def _label_axes(left: Axes, right: Axes, comparison: Comparison) -> None:
    left.set(xlabel="step", ylabel="nats per byte", title="training")
    right.set(title="validation after training")
    if comparison.kind == "norm":
        left.set(title="training, each model at its best learning rate")
        right.set(xscale="log", xlabel="peak learning rate")
    elif comparison.kind == "positions":
        length = comparison.settings.seq_len
        right.axvline(length, color="black", linewidth=1, label="training length")
        right.set(xlabel="position in the sequence")


def _draw_variant(
    left: Axes,
    right: Axes,
    comparison: Comparison,
    runs: Sequence[VariantRun],
    look: Look,
) -> None:
    """Draw one variant: on the left in training, on the right after it."""
    name = runs[0].variant
    diverged = {run.lr for run in runs if run.diverged is not None}
    trained = _by_rate([run for run in runs if run.lr not in diverged])
    some_diverged = f"{name}: at least one seed diverged"
    if comparison.kind == "norm":
        _draw_crosses(right, sorted(diverged), look, some_diverged)
    elif not trained:
        left.plot([], color=look.color, linestyle=look.line, label=some_diverged)
    if not trained:
        return
    best = min(trained.values(), key=lambda own: mean(_validation(own)))
    curves = [run.curve for run in best]
    settings = comparison.settings
    steps = _middles(settings.steps, len(curves[0]))
    _draw_band(left, steps, curves, look, name)
    if comparison.kind == "ffn":
        _draw_by_seed(right, best, look, name)
    elif comparison.kind == "norm":
        _draw_by_rate(right, trained, look)
    else:
        _draw_by_position(right, best, settings.max_seq_len, look)


def _by_rate(runs: Sequence[VariantRun]) -> dict[float, list[VariantRun]]:
    groups: dict[float, list[VariantRun]] = {}
    for run in runs:
        groups.setdefault(run.lr, []).append(run)
    return groups


def _draw_crosses(axes: Axes, rates: Sequence[float], look: Look, label: str) -> None:
    """Mark the learning rates with which a seed diverged, at the upper edge."""
    if rates:
        axes.plot(
            rates,
            [0.96] * len(rates),
            transform=axes.get_xaxis_transform(),
            color=look.color,
            marker="x",
            linestyle="",
            label=label,
        )


def _draw_by_seed(
    axes: Axes, runs: Sequence[VariantRun], look: Look, name: str
) -> None:
    """Draw the validation loss of each seed as a point above the name of the variant."""
    losses = _validation(runs)
    names = [name] * len(losses)
    axes.plot(names, losses, "o", color=look.color, alpha=0.7)


def _draw_by_position(
    axes: Axes, runs: Sequence[VariantRun], length: int, look: Look
) -> None:
    """Draw the validation loss by position in sequences of this length."""
    curves = [run.by_position for run in runs if run.by_position is not None]
    positions = _middles(length, len(curves[0]))
    _draw_band(axes, positions, curves, look, None)


def _draw_by_rate(
    axes: Axes, trained: dict[float, list[VariantRun]], look: Look
) -> None:
    """Draw the validation loss by learning rate."""
    by_rate = [_validation(own) for own in trained.values()]
    by_seed = list(zip(*by_rate, strict=True))
    rates = list(trained)
    _draw_band(axes, rates, by_seed, look, None)
    means = [mean(losses) for losses in by_rate]
    axes.plot(rates, means, "o", color=look.color)


def _validation(runs: Sequence[VariantRun]) -> list[float]:
    return [run.validation for run in runs if run.validation is not None]


def _middles(length: int, parts: int) -> list[float]:
    """Return the middles of equal parts of a length."""
    return [length * (index + 0.5) / parts for index in range(parts)]


def _draw_line(
    axes: Axes,
    x: Sequence[float],
    y: Sequence[float],
    look: Look,
    label: str | None,
) -> None:
    axes.plot(x, y, color=look.color, linestyle=look.line, linewidth=1.2, label=label)


def _draw_band(
    axes: Axes,
    x: Sequence[float],
    curves: Sequence[Sequence[float]],
    look: Look,
    label: str | None,
) -> None:
    """Draw the mean of curves as a line, and their range as a band."""
    columns = list(zip(*curves, strict=True))
    means = [mean(column) for column in columns]
    _draw_line(axes, x, means, look, label)
    low = [min(column) for column in columns]
    high = [max(column) for column in columns]
    axes.fill_between(x, low, high, color=look.color, alpha=0.2, linewidth=0)


def _fit(axes: Axes) -> None:
    """Show the data with a margin, but not the high losses at the start of training."""
    low, high = axes.dataLim.intervaly
    # After a few steps, all losses may be higher.
    top = HIGHEST if low < HIGHEST < high else high
    margin = top - low
    axes.set_ylim(low - 0.05 * margin, top + 0.1 * margin)
    axes.grid(alpha=0.3)
