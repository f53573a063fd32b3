"""Whether the profiler notices that its figures cannot be trusted."""

import os
import time

import pytest
from lab.machine import Ceilings
from lab.timing import Spread
from profiling.trust import busy_shares, system_clocks, trust

IDLE = {"waited_share": 0.01, "others_share": 0.02}
STEADY = [1.00, 1.01, 0.99, 1.02, 1.00, 1.01, 1.00]
RATE = Spread(1e11, 0.98e11, 1.02e11, 7)
UNSTEADY = Spread(1e11, 0.8e11, 1.1e11, 7)


def ceilings(flops=RATE, memory=RATE):
    return Ceilings(flops, memory, 1e11, 1024, 2**20)


def test_trust_of_a_steady_run_on_an_idle_machine_has_no_doubts():
    figures = trust(STEADY, IDLE, ceilings())
    assert figures["doubts"] == []
    assert figures["spread"] == pytest.approx(0.01, abs=0.005)
    assert figures["median_above_fastest"] == pytest.approx(1 / 0.99 - 1)
    assert figures["ceilings_spread"] == pytest.approx(0.04)
    assert trust(STEADY, IDLE | {"others_share": None}, ceilings())["doubts"] == []


def test_trust_names_what_shows_a_busy_machine():
    for seconds, shares, limits, doubt in (
        # A block of 17 ms beside other work on both of two cores.
        (
            [0.435, 0.017, 0.402, 0.221, 0.460, 0.018, 0.444],
            IDLE,
            ceilings(),
            "the samples vary by 95% (p20 to p80)",
        ),
        # A fast sample, and then always another program's turn: steady, and wrong.
        (
            [0.5, *[1.0] * 9],
            IDLE,
            ceilings(),
            "the median is 100% above the fastest sample",
        ),
        (
            STEADY,
            IDLE | {"waited_share": 0.45},
            ceilings(),
            "threads waited for a core, together 45% of the time",
        ),
        (
            STEADY,
            IDLE | {"others_share": 0.5},
            ceilings(),
            "other programs kept 50% of all cores busy",
        ),
        (
            STEADY,
            IDLE,
            ceilings(flops=UNSTEADY),
            "the ceilings vary by 30% (p20 to p80)",
        ),
        (
            STEADY,
            IDLE,
            ceilings(memory=UNSTEADY),
            "the ceilings vary by 30% (p20 to p80)",
        ),
    ):
        assert doubt in trust(seconds, shares, limits)["doubts"]


def test_clocks_read_what_linux_tells(tmp_path):
    assert system_clocks(tmp_path) is None
    for thread, waited in (("11", 2_000_000_000), ("12", 500_000_000)):
        path = tmp_path / "self" / "task" / thread / "schedstat"
        path.parent.mkdir(parents=True)
        path.write_text(f"4000000000 {waited} 77\n")
    # In ticks: user 1000, nice 100, system 200, idle 90000, iowait 5000, irq 10, softirq 20, steal 70.
    (tmp_path / "stat").write_text(
        "cpu  1000 100 200 90000 5000 10 20 70 0 0\ncpu0 1 2 3 4 5 6 7 8 0 0\n"
    )
    clocks = system_clocks(tmp_path)
    assert clocks is not None
    assert clocks[1] == 2.5
    assert clocks[2] == pytest.approx(
        1400 / os.sysconf("SC_CLK_TCK") - time.process_time(), abs=0.5
    )


def test_shares_are_those_of_the_time_between():
    shares = busy_shares((100.0, 5.0, 50.0), (110.0, 7.0, 55.0))
    assert shares == {"waited_share": 0.2, "others_share": 0.5 / (os.cpu_count() or 1)}
    assert busy_shares(None, None) == {"waited_share": None, "others_share": None}
