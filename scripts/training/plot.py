"""Pictures, to be read 700 pixels wide: the losses of a run, comparisons, and activations with their derivatives."""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from lab.files import atomic
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tinyblock import gelu, silu

from .compare import groups
from .progress import bits

HUES = ("#0072B2", "#E69F00", "#009E73", "#D55E00")  # Okabe and Ito's, for any kind of colour blindness
LINES = ("-", "--", "-.", ":")


def plot_losses(path: Path, history: Sequence[dict[str, Any]], floor: float, title: str) -> None:
    """Draw the loss of every step, those of validation, and the loss of an order-2 model."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    steps, losses = [r["step"] for r in history], [r["loss"] for r in history]
    axes.plot(steps, losses, color=HUES[0], linewidth=0.7, label="training")
    points = [(r["step"], r["validation"]) for r in history if "validation" in r]
    if points:
        axes.plot(*zip(*points, strict=True), color=HUES[3], marker="o", markersize=4, label="validation")
    axes.axhline(floor, color="black", linestyle="--", linewidth=1, label="order-2 model, validation")
    axes.set(xlabel="step", ylabel="nats per byte", title=title)
    there_and_back: Any = (bits, lambda bits: bits * math.log(2))
    axes.secondary_yaxis("right", functions=there_and_back).set_ylabel("bits per byte")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    _save(figure, path)


def plot_activations(path: Path) -> None:
    """Draw SiLU, GELU and ReLU, and their derivatives by autograd."""
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    x = torch.linspace(-5, 5, 1001, requires_grad=True)
    for index, (name, function) in enumerate({"SiLU": silu, "GELU": gelu, "ReLU": torch.relu}.items()):
        y = function(x)
        (slope,) = torch.autograd.grad(y.sum(), x)
        for axes, values in ((left, y), (right, slope)):
            axes.plot(x.detach(), values.detach(), color=HUES[index], linestyle=LINES[index], label=name)
    left.set(title="activation", xlabel="x", ylim=(-0.6, 3), xlim=(-5, 3))
    right.set(title="derivative", xlabel="x")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    left.legend(frameon=False)
    _save(figure, path)


def plot_comparison(path: Path, document: dict[str, Any]) -> None:
    """Draw the training losses of each variant, mean and range over the seeds, and the validation after training."""
    kind, settings = document["compare"], document["settings"]
    figure = Figure(figsize=(8, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    trained = {key: [run for run in runs if run["diverged"] is None] for key, runs in groups(document).items()}
    for index, name in enumerate(dict.fromkeys(name for name, _ in trained)):
        look: dict[str, Any] = {"color": HUES[index], "linestyle": LINES[index], "label": name}
        rates = {lr: runs for (variant, lr), runs in trained.items() if variant == name and runs}
        if not rates:
            continue
        best = min(rates, key=lambda lr: mean(run["validation"] for run in rates[lr]))
        _band(left, settings["steps"], [run["curve"] for run in rates[best]], look)
        if kind == "norm":
            losses = [[run["validation"] for run in runs] for runs in rates.values()]
            right.plot(list(rates), list(map(mean, losses)), marker="o", **look)
            low, high = list(map(min, losses)), list(map(max, losses))
            right.fill_between(list(rates), low, high, color=HUES[index], alpha=0.2)
        elif kind == "positions":
            _band(right, settings["max_seq_len"], [run["by_position"] for run in rates[best]], look)
        else:
            right.plot([name] * len(rates[best]), [run["validation"] for run in rates[best]], "o", color=HUES[index])
    left.set(xlabel="step", ylabel="nats per byte", title="training")
    right.set(title="validation after training", ylabel="nats per byte")
    if kind == "norm":
        left.set(title="training, at its best learning rate")
        right.set(xscale="log", xlabel="highest learning rate")
    elif kind == "positions":
        right.axvline(settings["seq_len"], color="black", linewidth=1, label="length trained on")
        right.set(xlabel="position in the sequence")
        right.legend(frameon=False)
    for axes in (left, right):
        low, high = axes.dataLim.intervaly
        axes.set_ylim(low - 0.03 * (min(high, 3.5) - low), min(high, 3.5) + 0.03)  # failures may be at millions
        axes.grid(alpha=0.3)
    left.legend(frameon=False)
    _save(figure, path)


def _band(axes: Axes, length: int, curves: Sequence[Sequence[float]], look: dict[str, Any]) -> None:
    """Draw the mean of curves, whose points are spread over a length, and their range."""
    columns = list(zip(*curves, strict=True))
    x = [length * (index + 0.5) / len(columns) for index in range(len(columns))]
    axes.plot(x, list(map(mean, columns)), linewidth=1.2, **look)
    axes.fill_between(x, list(map(min, columns)), list(map(max, columns)), color=look["color"], alpha=0.2, linewidth=0)


def _save(figure: Figure, path: Path) -> None:
    with atomic(path) as temporary:
        figure.savefig(temporary, dpi=110)
