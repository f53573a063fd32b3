"""The tables and the picture of docs/exactness.md."""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lab.environment import Environment
from lab.tables import markdown, number

from .errors import (
    COMPILED,
    DIRECTIONS,
    DTYPES,
    FORWARD,
    LAYERS,
    OURS,
    PROJECTS,
    ROUNDED,
    SIZE,
    STARTS,
    Error,
    Errors,
    Key,
    rope_at,
)

PEERS = [project for project in PROJECTS if project != OURS]
COLUMNS = (ROUNDED, OURS, COMPILED, *PEERS)


def rms(errors: Sequence[Error]) -> float:
    """Return the median over the seeds."""
    return statistics.median(error.rms for error in errors)


def tables(errors: Errors) -> str:
    """Return a table of ratios, and one of errors for each dtype and direction."""
    parts = [ratios_table(errors)]
    for dtype in DTYPES:
        for direction in DIRECTIONS:
            parts += [
                f"### {dtype}, {direction}",
                table(errors, dtype, direction),
                variation(errors, dtype, direction),
            ]
    return "\n\n".join(parts)


def measured_layers(errors: Errors, dtype: str, direction: str) -> list[str]:
    return [layer for layer in LAYERS if Key(dtype, direction, layer, OURS) in errors]


def table(errors: Errors, dtype: str, direction: str) -> str:
    """Return the errors in one dtype and direction: a row for each layer, and a column for each project."""
    rows = []
    for layer in measured_layers(errors, dtype, direction):
        of_layer = {}
        for project in COLUMNS:
            of_layer[project] = errors.get(Key(dtype, direction, layer, project), [])
        cells = [cell(project, of_layer) for project in COLUMNS]
        rows.append([layer, *cells])
    return without_empty_columns(["layer", *COLUMNS], rows)


def without_empty_columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    filled: set[str] = set()
    for row in rows:
        filled.update(
            heading for heading, text in zip(header, row, strict=True) if text
        )
    kept = [index for index, heading in enumerate(header) if heading in filled]
    kept_rows = []
    for row in rows:
        kept_rows.append([row[index] for index in kept])
    return markdown([header[index] for index in kept], kept_rows)


def cell(project: str, of_layer: Mapping[str, Sequence[Error]]) -> str:
    """Return the median root mean square error and the largest error of all seeds.

    A cell is in bold if the project is 1% closer than tinyblock with every seed.
    """
    errors = of_layer[project]
    if not errors:
        return ""
    if any(math.isinf(error.rms) for error in errors):
        return "not finite"
    largest = max(error.largest for error in errors)
    text = f"{number(rms(errors))}, {number(largest)}"
    if project in PEERS and is_closer(errors, of_layer[OURS]):
        return f"**{text}**"
    return text


def is_closer(theirs: Sequence[Error], ours: Sequence[Error]) -> bool:
    """Return whether errors are smaller than tinyblock's by more than 1% with every seed."""
    pairs = zip(theirs, ours, strict=True)
    return all(their.rms < 0.99 * our.rms for their, our in pairs)


def variation(errors: Errors, dtype: str, direction: str) -> str:
    """Return how far the seeds are from the medians of a table."""
    distances = []
    for key, found in errors.items():
        shown = key.layer in LAYERS and (key.dtype, key.direction) == (dtype, direction)
        middle = rms(found)
        if shown and len(found) > 1 and math.isfinite(middle) and middle > 0:
            distances.append(max(abs(error.rms / middle - 1) for error in found))
    if not distances:
        return "One seed."
    return (
        f"Seeds differ from these medians by at most {statistics.median(distances):.1%} in half of the cells, "
        f"and by at most {max(distances):.0%} in all."
    )


def ratios_table(errors: Errors) -> str:
    """Return tinyblock's errors divided by those of each project, over all dtypes and directions."""
    header = ["tinyblock / project", *PEERS]
    layers = measured_layers(errors, "float32", FORWARD)
    rows = []
    for layer in layers:
        cells = [ratios(errors, layer, peer) for peer in PEERS]
        rows.append([layer, *cells])
    return without_empty_columns(header, rows)


def ratios(errors: Errors, layer: str, peer: str) -> str:
    """Return the smallest and the largest ratio, if the project has this layer."""
    found = []
    for key, theirs in errors.items():
        if (key.layer, key.project) == (layer, peer):
            ours = errors[Key(key.dtype, key.direction, layer, OURS)]
            found.append(rms(ours) / rms(theirs))
    if not found:
        return ""
    return f"{number(min(found))} to {number(max(found))}"


def draw(errors: Errors, found: Environment, path: Path) -> None:
    """Draw RoPE's relative error versus the position, one line for each project."""
    from lab.plots import new_figure, save

    figure = new_figure(
        "RoPE: relative error versus position",
        f"{found.device}, torch {found.torch}",
    )
    left, right = figure.subplots(1, 2, sharey=True)
    draw_dtype(left, errors, "float32")
    draw_dtype(right, errors, "bfloat16")
    left.legend(loc="upper left", frameon=False)
    save(figure, path)


def rope_lines(errors: Errors, dtype: str) -> dict[str, dict[float, float]]:
    """Return RoPE's relative error at the middle of each window, by project."""
    eps = torch.finfo(DTYPES[dtype]).eps
    lines: dict[str, dict[float, float]] = {}
    for project in PROJECTS:
        for start in STARTS:
            key = Key(dtype, FORWARD, rope_at(start), project)
            if key in errors:
                middle = start + SIZE.seq_len / 2
                lines.setdefault(project, {})[middle] = eps * rms(errors[key])
    return lines


def draw_dtype(axes: Any, errors: Errors, dtype: str) -> None:
    """Draw the lines of one dtype. Lines that coincide get thinner, so that each remains visible."""
    from lab.plots import COLORS, MARKERS

    lines = rope_lines(errors, dtype)
    for index, (project, line) in enumerate(lines.items()):
        axes.loglog(
            list(line),
            list(line.values()),
            label=project,
            color=COLORS[index],
            marker=MARKERS[index],
            markersize=12 - 1.2 * index,
            linewidth=5 - 0.5 * index,
        )
    axes.set(
        title=dtype,
        xlabel="position in tokens",
        ylabel="relative error, root mean square",
    )
    axes.grid(alpha=0.3)
