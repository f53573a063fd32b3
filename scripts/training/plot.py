"""Pictures of training: the losses of a run, those of variants that are compared, and activations."""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from lab.plots import COLORS, LINES, new_figure, save
from matplotlib.axes import Axes

from tinyblock import gelu, silu

TITLES = {
    "ffn": "Feed-forward layers: loss minus SwiGLU's, paired by seed",
    "norm": "Pre-norm, post-norm and no norm",
    "positions": "RoPE and no positions",
}
SIZES = "{num_layers} layers, d_model {d_model}; {steps} steps of {batch_size} x {seq_len} bytes"


def plot_losses(
    path: Path,
    history: Sequence[dict[str, Any]],
    order_two: float,
    title: str,
    origin: str,
) -> None:
    """Draw the training loss of every step, the validation losses, and the loss of an order-2 model."""
    figure = new_figure(title, origin, 8, 4.4)
    axes = figure.subplots()
    steps, losses = [r["step"] for r in history], [r["loss"] for r in history]
    axes.plot(steps, losses, color=COLORS[0], linewidth=0.7, label="training")
    points = [(r["step"], r["validation"]) for r in history if "validation" in r]
    if points:
        axes.plot(
            *zip(*points, strict=True),
            color=COLORS[3],
            marker="o",
            markersize=4,
            label="validation",
        )
    axes.axhline(
        order_two,
        color="black",
        linestyle="--",
        linewidth=1,
        label="order-2 model, validation",
    )
    axes.set(xlabel="step", ylabel="nats per byte")
    there_and_back: Any = (
        lambda nats: nats / math.log(2),
        lambda bits: bits * math.log(2),
    )
    axes.secondary_yaxis("right", functions=there_and_back).set_ylabel("bits per byte")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    save(figure, path, dpi=110)


def plot_activations(path: Path) -> None:
    """Draw SiLU, GELU and ReLU, and their derivatives by autograd."""
    figure = new_figure("Activations of the feed-forward layers", "", 8, 3.6)
    left, right = figure.subplots(1, 2)
    x = torch.linspace(-5, 5, 1001, requires_grad=True)
    for index, (name, function) in enumerate(
        {"SiLU": silu, "GELU": gelu, "ReLU": torch.relu}.items()
    ):
        y = function(x)
        (slope,) = torch.autograd.grad(y.sum(), x)
        for axes, values in ((left, y), (right, slope)):
            axes.plot(
                x.detach(),
                values.detach(),
                color=COLORS[index],
                linestyle=LINES[index],
                label=name,
            )
    left.set(title="activation", xlabel="x", ylim=(-0.6, 3), xlim=(-5, 3))
    right.set(title="derivative", xlabel="x")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    left.legend(frameon=False)
    save(figure, path, dpi=110)


def plot_comparison(
    path: Path, document: dict[str, Any], runs: Sequence[dict[str, Any]]
) -> None:
    """Draw the losses of each variant in training and after it, with the mean and range over the seeds.

    A variant has a line at the learning rates with which no seed diverged, and crosses at the others.
    """
    kind, settings = document["compare"], document["settings"]
    origin = (
        SIZES + ", {warmup} of warm-up; mean and range over {seeds} seeds; "
    ).format(**settings)
    figure = new_figure(
        TITLES[kind], origin + document["environment"]["device"], 9, 4.2
    )
    left, right = figure.subplots(1, 2)
    left.set(xlabel="step", ylabel="nats per byte", title="training")
    right.set(title="validation after training")
    if kind == "norm":
        left.set(title="training, at the best learning rate of each")
        right.set(xscale="log", xlabel="highest learning rate")
    elif kind == "positions":
        right.axvline(
            settings["seq_len"], color="black", linewidth=1, label="length trained on"
        )
        right.set(xlabel="position in the sequence")
    for index, name in enumerate(dict.fromkeys(run["variant"] for run in runs)):
        look: dict[str, Any] = {"color": COLORS[index], "linestyle": LINES[index]}
        by_rate = {
            lr: [run for run in runs if (run["variant"], run["lr"]) == (name, lr)]
            for lr in settings["lr"]
        }
        trained = {
            lr: own
            for lr, own in by_rate.items()
            if all(run["diverged"] is None for run in own)
        }
        losses = {lr: [run["validation"] for run in own] for lr, own in trained.items()}
        if kind == "norm" and (diverged := sorted(by_rate.keys() - trained)):
            crosses: dict[str, Any] = {
                "transform": right.get_xaxis_transform(),
                "color": COLORS[index],
                "marker": "x",
            }
            right.plot(
                diverged,
                [0.96] * len(diverged),
                linestyle="",
                label=f"{name}: diverged",
                **crosses,
            )
        if not trained:
            left.plot([], label=f"{name}: diverged", **look)
            continue
        best = min(trained, key=lambda lr: mean(losses[lr]))
        _band(
            left,
            settings["steps"],
            [run["curve"] for run in trained[best]],
            look | {"label": name},
        )
        if kind == "ffn":
            right.plot(
                [name] * len(losses[best]),
                losses[best],
                "o",
                color=COLORS[index],
                alpha=0.7,
            )
        elif kind == "norm":
            _band(
                right,
                list(trained),
                list(zip(*losses.values(), strict=True)),
                look | {"marker": "o"},
            )
        else:
            _band(
                right,
                settings["max_seq_len"],
                [run["by_position"] for run in trained[best]],
                look,
            )
    for axes in (left, right):
        low, high = axes.dataLim.intervaly
        top = min(high, 3.5)  # the losses start at 5.5
        axes.set_ylim(low - 0.05 * (top - low), top + 0.1 * (top - low))
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False)
    save(figure, path, dpi=110)


def _band(
    axes: Axes,
    x: int | Sequence[float],
    curves: Sequence[Sequence[float]],
    look: dict[str, Any],
) -> None:
    """Draw the mean of curves and their range, at each x, or at the middles of equal parts of a length x."""
    columns = list(zip(*curves, strict=True))
    places = (
        [x * (index + 0.5) / len(columns) for index in range(len(columns))]
        if isinstance(x, int)
        else x
    )
    axes.plot(places, list(map(mean, columns)), linewidth=1.2, **look)
    low, high = list(map(min, columns)), list(map(max, columns))
    axes.fill_between(places, low, high, color=look["color"], alpha=0.2, linewidth=0)
