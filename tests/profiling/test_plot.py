"""The picture of a profile, read back from matplotlib's axes."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from profiling.roofline import Rates, Row

pytest.importorskip("matplotlib", reason="requires the extra dev")

from matplotlib.figure import Figure
from profiling.plot import plot

# Left of 10 and of 40 FLOPs per byte, copying takes longer than computing.
RATES = Rates({"float32": 100.0, "bfloat16": 400.0}, 10.0, 1.0)
UP = Row("up", forward_s=1.0, total_s=3.0, least_s=2.0, moved_bytes=20)
UP.flops, UP.flops_per_s = {"float32": 40, "bfloat16": 20}, 20.0
EXPERTS = Row("experts", forward_s=0.5, total_s=1.0, least_s=0.25, moved_bytes=10)
EXPERTS.flops, EXPERTS.flops_per_s, EXPERTS.unknown = {"float32": 10}, 10.0, ["x"]
NORM = Row("norm", forward_s=0.25, total_s=0.5, least_s=0.125, moved_bytes=10)
ADAMW = Row("AdamW", forward_s=0.0, total_s=0.25, least_s=0.125)
REST = Row("rest", total_s=0.25, varies=0.5, limit="noise")


def draw(*rows):
    """Draw rows of 5 s in total, and return the figure."""
    drawn = []
    profile: Any = SimpleNamespace(
        title="a model", machine="a machine", rates=RATES, rows=rows
    )
    profile.whole = Row("total", total_s=5.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda *each, dpi: drawn.append(each))
        plot(profile, Path("file.png"))
    [(figure, path)] = drawn
    assert path == Path("file.png")
    return figure


@pytest.fixture(scope="module")
def figure():
    """Return a figure. Tests do not change it."""
    return draw(NORM, EXPERTS, UP, ADAMW, REST)


def points(figure):
    """Return the markers of the parts."""
    lines = figure.axes[0].get_lines()
    return [line for line in lines if line.get_linestyle() == "None"]


def texts(legend):
    return [text.get_text() for text in legend.get_texts()]


def test_a_picture_of_many_parts_has_a_quarter_of_an_inch_for_each():
    parts = [replace(NORM, name=f"norm {number}") for number in range(40)]
    assert draw(*parts, REST).get_figheight() > 40 / 4


def test_picture_names_the_model_and_the_machine(figure):
    assert figure.get_suptitle() == "a model"
    assert figure.get_supxlabel() == "a machine"


def test_axes_have_units(figure):
    roofline, times = figure.axes
    assert (roofline.get_xlabel(), roofline.get_ylabel()) == (
        "FLOPs per byte",
        "FLOPs per second",
    )
    assert (roofline.get_xscale(), roofline.get_yscale()) == ("log", "log")
    assert times.get_xlabel() == "ms"
    assert times.get_title() == "Where do 5000 ms go?"


def test_part_stands_at_its_flops_per_byte_and_its_rate(figure):
    """From the slowest on. A part without FLOPs has no place there."""
    found = [(each.get_label(), *each.get_xydata()[0]) for each in points(figure)]
    assert found == [("up", 3.0, 20.0), ("experts (at least)", 1.0, 10.0)]
    assert texts(figure.axes[0].get_legend()) == ["up", "experts (at least)"]


def test_marker_is_hollow_if_flops_are_unknown(figure):
    assert [each.get_fillstyle() for each in points(figure)] == ["full", "none"]


def test_roof_is_the_lower_of_both_rates(figure):
    roofs = [line for line in figure.axes[0].get_lines() if line.get_color() == "black"]
    for roof, corner in zip(roofs, [(10, 100), (40, 400)], strict=True):
        assert corner in [tuple(point) for point in roof.get_xydata()]
        for x, y in roof.get_xydata():
            assert y == min(10 * x, corner[1])
        xs = roof.get_xdata()
        assert xs[0] < 1 < 3 < xs[-1], "all parts must be below a roof"


def test_lines_of_the_roof_have_names_at_their_left_ends(figure):
    [*matmuls, copy] = figure.axes[0].texts
    assert [(each.get_text(), each.xy) for each in matmuls] == [
        ("float32 matmul", (10, 100)),
        ("bfloat16 matmul", (40, 400)),
    ]
    x, y = copy.xy
    assert (copy.get_text(), y) == ("memory copy", 10 * x)
    assert x < 1


@pytest.mark.parametrize(("count", "title"), [(12, ""), (14, "12 slowest of 14")])
def test_twelve_parts_have_markers_of_their_own(count, title):
    rows = [Row(str(i), total_s=i, moved_bytes=1) for i in range(1, 1 + count)]
    for row in rows:
        row.flops, row.flops_per_s = {"float32": 1}, 1.0
    figure = draw(*rows)
    named, others = points(figure)[:12], points(figure)[12:]
    assert len({(each.get_marker(), each.get_color()) for each in named}) == 12
    assert {(each.get_marker(), each.get_color()) for each in others} <= {(".", "gray")}
    legend = figure.axes[0].get_legend()
    assert texts(legend) == [str(i) for i in range(count, count - 12, -1)]
    assert legend.get_title().get_text() == title


def test_bars_are_passes_in_ms_and_what_is_no_part(figure):
    bars = {
        group.get_label(): [(bar.get_x(), bar.get_width()) for bar in group]
        for group in figure.axes[1].containers
    }
    none = (0, 0)
    assert bars == {
        "forward": [(0, 250), (0, 500), (0, 1000), none, none],
        "backward": [(250, 250), (500, 500), (1000, 2000), none, none],
        "no part of the model": [none, none, none, (0, 250), (0, 250)],
        "least time, by the roof": [(0, 125), (0, 250), (0, 2000), (0, 125), none],
    }
    assert texts(figure.axes[1].get_legend()) == list(bars)


def test_forward_alone_has_no_bars_of_backward():
    row = Row("up", forward_s=1.0, total_s=1.0)
    legend = texts(draw(row, REST).axes[1].get_legend())
    assert "forward" in legend
    assert "backward" not in legend


def test_names_of_bars_have_times_shares_and_doubts(figure):
    axes = figure.axes[1]
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "norm: 500 ms, 10.0%",
        "experts: 1000 ms, 20.0%, least time unknown",
        "up: 3000 ms, 60.0%",
        "AdamW: 250 ms, 5.00%",
        "rest: 250 ms, 5.0%, noise",
    ]
    assert axes.yaxis_inverted(), "the first row must be on top"
