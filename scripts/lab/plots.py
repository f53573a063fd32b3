"""What the pictures share: colors, markers, a figure with its title and origin, and how one is saved."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from .files import atomic

# Okabe and Ito's palette, which people with any kind of color blindness can tell apart; the markers say it again.
COLORS = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#56B4E9",
    "#CC79A7",
    "#8A8A00",
    "#999999",
    "#661100",
    "#332288",
)
MARKERS = "osD^vPXphd"
LINES = ("-", "--", "-.", ":")
# A legend below the axes.
BELOW: dict[str, Any] = {
    "fontsize": 9,
    "loc": "upper center",
    "bbox_to_anchor": (0.5, -0.13),
    "frameon": False,
    "columnspacing": 1.0,
    "handlelength": 1.5,
}


def new_figure(title: str, origin: str, width: float = 10, height: float = 5) -> Figure:
    """Return a figure with a title, and a line at its foot that says where its data come from."""
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title, fontsize=12, fontweight="bold")
    figure.supxlabel(origin, fontsize=8, color="dimgrey")
    return figure


def save(figure: Figure, path: Path, dpi: int = 144) -> None:
    """Write a figure in the format of the path's suffix, whole or not at all."""
    with atomic(path) as temporary:
        figure.savefig(temporary, dpi=dpi)
