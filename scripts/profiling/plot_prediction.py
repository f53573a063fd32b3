"""Predictions of a sweep as a picture: the MFU of each mesh."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from lab.plots import BELOW, COLORS, MARKERS, new_figure, save
from lab.tables import share
from matplotlib.axes import Axes

from .predict import Prediction
from .report_prediction import Basis

_LABELS = {
    "seq-len": "tokens per sequence",
    "batch-size": "sequences per batch",
    "d-model": "d_model",
}


def plot_predictions(
    basis: Basis, predictions: Sequence[Prediction], axis: str, title: str, path: Path
) -> None:
    """Draw the MFU of each mesh over a sweep, and name the best mesh at each point.

    Args:
        basis: what the predictions follow from, for the foot of the picture.
        predictions: of all sizes and meshes.
        axis: that of the sweep: seq-len, batch-size or d-model.
        title: describes the sizes.
        path: where to write; its suffix names the format.
    """
    figure = new_figure(title, "\n".join(basis.lines()))
    figure.suptitle(title, fontsize=8, fontweight="bold")
    axes = figure.subplots()
    _draw_meshes(axes, predictions, axis)
    _name_best(axes, predictions, axis)
    values = sorted({_value(prediction, axis) for prediction in predictions})
    axes.set(xscale="log", xlabel=_LABELS[axis])
    axes.set(ylabel="MFU, %", ylim=(0, 115), yticks=range(0, 101, 20))
    axes.set_xticks(values, [str(value) for value in values])
    axes.minorticks_off()
    axes.margins(x=0.08)
    axes.grid(alpha=0.3)
    axes.set_title("Upper bound on MFU, from a lower bound on time", fontsize=10)
    axes.legend(**BELOW, ncols=5)
    save(figure, path)


def _draw_meshes(axes: Axes, predictions: Sequence[Prediction], axis: str) -> None:
    meshes = dict.fromkeys(prediction.mesh for prediction in predictions)
    for index, mesh in enumerate(meshes):
        of_mesh = [each for each in predictions if each.mesh == mesh]
        axes.plot(
            [_value(prediction, axis) for prediction in of_mesh],
            [100 * prediction.mfu for prediction in of_mesh],
            label=str(mesh),
            color=COLORS[index % len(COLORS)],
            marker=MARKERS[index % len(MARKERS)],
        )


def _name_best(axes: Axes, predictions: Sequence[Prediction], axis: str) -> None:
    for _, group in groupby(predictions, key=lambda each: each.size):
        best = max(group, key=lambda each: each.mfu)
        axes.annotate(
            f"{best.mesh}\n{share(best.mfu)}",
            (_value(best, axis), 100 * best.mfu),
            (0, 9),
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )


def _value(prediction: Prediction, axis: str) -> int:
    """Return the prediction's value on the axis of the sweep."""
    values = {
        "seq-len": prediction.size.seq_len,
        "batch-size": prediction.size.batch_size,
        "d-model": prediction.size.d_model,
    }
    return values[axis]
