"""The picture of a profile, read back from matplotlib's axes."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from profiling.roofline import Rates, Row

pytest.importorskip("matplotlib", reason="requires the extra dev")

from profiling.plot import draw

# Left of 10 and of 40 FLOPs per byte, copying takes longer than computing.
RATES = Rates({"float32": 100.0, "bfloat16": 400.0}, 10.0, 1.0)
UP = Row("up", forward_s=1.0, total_s=3.0, least_s=2.0, moved_bytes=20)
UP.flops, UP.flops_per_s = {"float32": 40, "bfloat16": 20}, 20.0
EXPERTS = Row("experts", forward_s=0.5, total_s=1.0, least_s=0.25, moved_bytes=10)
EXPERTS.flops, EXPERTS.flops_per_s, EXPERTS.unknown = {"float32": 10}, 10.0, ["x"]
NORM = Row("norm", forward_s=0.25, total_s=0.5, least_s=0.125, moved_bytes=10)
ADAMW = Row("AdamW", forward_s=0.0, total_s=0.25, least_s=0.125, is_optimizer=True)
REST = Row("rest", total_s=0.25, varies=0.5, limit="noise")


def axes_of(*rows):
    """Draw rows of 5 s in total, and return the axes of the roofline and of the bars."""
    whole = Row("total", total_s=5.0)
    profile: Any = SimpleNamespace(title="a model", machine="a machine", rates=RATES)
    profile.rows, profile.whole = rows, whole
    return draw(profile).axes


def points(axes):
    """Return the markers of the parts."""
    return [line for line in axes.get_lines() if line.get_linestyle() == "None"]


def test_parts_stand_at_their_flops_per_byte_and_rate_below_the_roof():
    axes, _ = axes_of(NORM, EXPERTS, UP, ADAMW, REST)
    units = (axes.get_xlabel(), axes.get_ylabel())
    assert units == ("FLOPs per byte", "FLOPs per second")
    # From the slowest on. A part without FLOPs has no place, one with unknown a hollow one.
    assert [
        (each.get_label(), *each.get_xydata()[0], each.get_fillstyle())
        for each in points(axes)
    ] == [("up", 3.0, 20.0, "full"), ("experts (at least)", 1.0, 10.0, "none")]
    roofs = [line for line in axes.get_lines() if line.get_color() == "black"]
    # From the left of all parts, at 10 bytes per second.
    assert [roof.get_xydata().tolist() for roof in roofs] == [
        [[0.5, 5], [10, 100], [200, 100]],
        [[0.5, 5], [40, 400], [800, 400]],
    ]


def test_bars_are_passes_in_ms_and_what_is_no_part():
    _, axes = axes_of(NORM, EXPERTS, UP, ADAMW, REST)
    none = (0, 0)
    assert {
        group.get_label(): [(bar.get_x(), bar.get_width()) for bar in group]
        for group in axes.containers
    } == {
        "forward": [(0, 250), (0, 500), (0, 1000), none, none],
        "backward": [(250, 250), (500, 500), (1000, 2000), none, none],
        "no part of the model": [none, none, none, (0, 250), (0, 250)],
        "least time, by the roof": [(0, 125), (0, 250), (0, 2000), (0, 125), none],
    }
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "norm: 500 ms, 10.0%",
        "experts: 1000 ms, 20.0%, least time unknown",
        "up: 3000 ms, 60.0%",
        "AdamW: 250 ms, 5.00%",
        "rest: 250 ms, 5.0%, noise",
    ]


def test_the_twelve_slowest_parts_are_named():
    parts = [replace(UP, name=f"part {i}", total_s=i) for i in range(1, 15)]
    axes, _ = axes_of(*parts)
    legend = axes.get_legend()
    names = [text.get_text() for text in legend.get_texts()]
    assert names == [f"part {i}" for i in range(14, 2, -1)]
    assert legend.get_title().get_text() == "12 slowest of 14"
    axes, _ = axes_of(*parts[:12])
    assert axes.get_legend().get_title().get_text() == ""
