"""The picture of a profile, read back from matplotlib's axes."""

from types import SimpleNamespace
from typing import Any

import pytest
from profiling.calculate import Operation
from profiling.roofline import Rates
from profiling.rows import Row

pytest.importorskip("matplotlib", reason="requires the extra dev")

from profiling.plot import draw

# Left of 10 FLOPs per byte in float32, and of 40 in bfloat16, copying takes longer.
RATES = Rates({"float32": 100.0, "bfloat16": 400.0}, 10.0, 1.0)


def axes_of(*rows):
    """Draw rows of 5 s in total, and return the axes of the roofline and of the bars."""
    whole = Row("total", total_s=5.0)
    profile: Any = SimpleNamespace(title="a model", machine="a machine", rates=RATES)
    profile.rows, profile.whole, profile.others = rows, whole, 0.37
    figure = draw(profile)
    title = "a model (other programs took 37% of the time)"
    assert figure.get_suptitle() == title
    return figure.axes


def test_parts_stand_at_their_flops_per_byte_and_rate_below_the_roof():
    flops = {"float32": 40, "bfloat16": 20}  # 3 for each of 20 bytes
    up = Row("up", total_s=3.0, moved_bytes=20, flops=flops, flops_per_s=20.0)
    flops = {"float32": 10}  # and what is unknown
    experts = Row(
        "experts",
        total_s=1.0,
        moved_bytes=10,
        flops=flops,
        flops_per_s=10.0,
        unknown={"aten.x": 0.5},
    )
    norm = Row("norm", total_s=0.5, moved_bytes=10)  # without FLOPs, it has no place
    axes, _ = axes_of(norm, experts, up)
    assert axes.get_xlabel().startswith("FLOPs per byte")
    assert axes.get_ylabel() == "FLOPs per second"
    # The slowest is first. A marker is hollow if some FLOPs are unknown.
    assert [
        (each.get_label(), *each.get_xydata()[0], each.get_fillstyle())
        for each in axes.get_legend_handles_labels()[0]
    ] == [("up", 3.0, 20.0, "full"), ("experts (at least)", 1.0, 10.0, "none")]
    roofs = [line for line in axes.get_lines() if line.get_color() == "black"]
    # They begin left of all parts, rise by 10 bytes per second, and are flat from there on.
    assert [roof.get_xydata().tolist() for roof in roofs] == [
        [[0.5, 5], [10, 100], [200, 100]],
        [[0.5, 5], [40, 400], [800, 400]],
    ]


def test_bars_are_passes_in_ms_and_what_is_no_part():
    _, axes = axes_of(
        Row("norm", forward_s=0.125, total_s=0.5, least_s=0.25),
        Row(
            "experts", forward_s=0.25, total_s=1.0, least_s=0.5, unknown={"aten.x": 0.5}
        ),
        # Changed in place, it takes less than the least time.
        Row("AdamW", forward_s=0.0, total_s=0.25, least_s=0.5, is_optimizer=True),
        Row("rest", total_s=0.25, varies=0.5, limit="noise"),
    )
    forward, backward, *_ = axes.containers
    assert {bars.get_label(): list(bars.datavalues) for bars in axes.containers} == {
        "forward": [125, 250, 0, 0],
        "backward": [375, 750, 0, 0],
        "no part of the model": [0, 0, 250, 250],
        "least time, by the roof": [250, 250],
    }
    # Backward begins where forward ends.
    assert [bar.get_x() for bar in backward] == list(forward.datavalues)
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "norm: 500 ms, 10.0%",
        "experts: 1000 ms, 20.0%, least time unknown",
        "AdamW: 250 ms, 5.00%",
        "rest: 250 ms, 5.0%, noise",
    ]


def test_there_are_twenty_bars_at_most():
    work: dict[str, Any] = {"operations": (Operation("add", 1),), "forward_s": 0.5}
    parts = [Row(f"part {n}", total_s=0.1 + n, least_s=0.1, **work) for n in range(40)]
    _, axes = axes_of(*parts, Row("rest", total_s=0.25))
    labels = [label.get_text() for label in axes.get_yticklabels()]
    # 0.1 to 21.1 s: 22 * 10.6. With the 18 slowest parts and the rest, these are 20.
    slowest = [f"part {n}" for n in range(22, 40)]
    names = [label.partition(":")[0] for label in labels]
    assert names == [*slowest, "22 other parts", "rest"]
    assert "22 other parts: 233000 ms" in labels[18]
    forward, backward, _, least = axes.containers
    assert [list(bars.datavalues)[18] for bars in (forward, backward, least)] == [
        pytest.approx(1e3 * 22 * 0.5),
        pytest.approx(1e3 * 22 * 10.1),
        pytest.approx(1e3 * 22 * 0.1),
    ]
