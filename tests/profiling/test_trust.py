"""Whether the profiler notices that its figures cannot be trusted."""

import subprocess
import sys
import time

import pytest
from profiling.timing import Spread
from profiling.trust import Watch, trust

IDLE = {"waited_share": 0.01, "others_share": 0.02}
STEADY = [1.00, 1.01, 0.99, 1.02, 1.00, 1.01, 1.00]
CEILING = Spread(1e11, 0.98e11, 1.02e11, 7)


def test_trust_of_a_steady_run_on_an_idle_machine_has_no_doubts():
    figures = trust(STEADY, IDLE, [CEILING])
    assert figures["doubts"] == []
    assert figures["waited_share"] == 0.01
    assert figures["spread"] == pytest.approx(0.01, abs=0.005)
    assert figures["median_above_fastest"] == pytest.approx(1 / 0.99 - 1)
    assert figures["ceilings_spread"] == pytest.approx(0.04)
    assert trust(STEADY, IDLE | {"others_share": None}, [CEILING])["doubts"] == []


@pytest.mark.parametrize(
    ("seconds", "shares", "ceiling", "doubt"),
    [
        # A block of 17 ms beside other work on both of two cores.
        ([0.435, 0.017, 0.402, 0.221, 0.460, 0.018, 0.444], IDLE, CEILING, "the samples vary by 95% (p20 to p80)"),
        # A fast sample, and then always another program's turn: steady, and wrong.
        ([0.5, *[1.0] * 9], IDLE, CEILING, "the median is 100% above the fastest sample"),
        (STEADY, IDLE | {"waited_share": 0.45}, CEILING, "threads waited for a core, together 45% of the time"),
        (STEADY, IDLE | {"others_share": 0.5}, CEILING, "other programs kept 50% of all cores busy"),
        (STEADY, IDLE, Spread(1e11, 0.8e11, 1.1e11, 7), "the ceilings vary by 30% (p20 to p80)"),
    ],
)
def test_trust_names_what_shows_a_busy_machine(seconds, shares, ceiling, doubt):
    assert doubt in trust(seconds, shares, [CEILING, ceiling])["doubts"]


def test_watch_sees_what_other_programs_use():
    busy = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
    try:
        watch = Watch()
        time.sleep(0.5)
        shares = watch.shares()
    finally:
        busy.kill()
        busy.wait()
    if shares["others_share"] is None:
        pytest.skip("this system does not tell")
    assert 0 < shares["others_share"] <= 1.05  # ticks are counted in hundredths of a second


def test_watch_counts_by_the_clocks(monkeypatch):
    clocks = iter([(100.0, 5.0, 50.0), (110.0, 7.0, 55.0), (200.0, 0.0, None), (210.0, -3.0, None)])
    monkeypatch.setattr("profiling.trust._clocks", lambda: next(clocks))
    monkeypatch.setattr("profiling.trust.os.cpu_count", lambda: 2)
    assert Watch().shares() == {"waited_share": 0.2, "others_share": 0.25}
    assert Watch().shares() == {"waited_share": 0.0, "others_share": None}  # several threads, which all ran
