"""Whether the profiler notices that its figures cannot be trusted."""

import pytest
from lab.timing import Spread
from profiling import trust
from profiling.trust import Watch

IDLE = {"waited_share": 0.01, "others_share": 0.02}
STEADY = [1.00, 1.01, 0.99, 1.02, 1.00, 1.01, 1.00]
CEILING = Spread(1e11, 0.98e11, 1.02e11, 7)


def test_trust_of_a_steady_run_on_an_idle_machine_has_no_doubts():
    figures = trust.trust(STEADY, IDLE, [CEILING])
    assert figures["doubts"] == []
    assert figures["waited_share"] == 0.01
    assert figures["spread"] == pytest.approx(0.01, abs=0.005)
    assert figures["median_above_fastest"] == pytest.approx(1 / 0.99 - 1)
    assert figures["ceilings_spread"] == pytest.approx(0.04)
    assert trust.trust(STEADY, IDLE | {"others_share": None}, [CEILING])["doubts"] == []


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
    assert doubt in trust.trust(seconds, shares, [CEILING, ceiling])["doubts"]


def test_clocks_read_what_the_system_tells(tmp_path, monkeypatch):
    monkeypatch.setattr(trust, "_PROC", tmp_path)
    monkeypatch.setattr(trust.time, "perf_counter", lambda: 100.0)
    monkeypatch.setattr(trust.time, "process_time", lambda: 4.0)
    monkeypatch.setattr(trust.os, "sysconf", lambda name: 100)
    assert trust._clocks() == (100.0, 96.0, None)  # a system that tells nothing
    for thread, waited in (("11", 2_000_000_000), ("12", 500_000_000)):
        path = tmp_path / "self" / "task" / thread / "schedstat"
        path.parent.mkdir(parents=True)
        path.write_text(f"4000000000 {waited} 77\n")
    # In hundredths of a second: user 1000, nice 100, system 200, idle 90000, iowait 5000, irq 10, softirq 20, steal 70.
    (tmp_path / "stat").write_text("cpu  1000 100 200 90000 5000 10 20 70 0 0\ncpu0 1 2 3 4 5 6 7 8 0 0\n")
    assert trust._clocks() == (100.0, 2.5, 10.0)


def test_watch_counts_by_the_clocks(monkeypatch):
    clocks = iter([(100.0, 5.0, 50.0), (110.0, 7.0, 55.0), (200.0, 0.0, None), (210.0, -3.0, None)])
    monkeypatch.setattr("profiling.trust._clocks", lambda: next(clocks))
    monkeypatch.setattr("profiling.trust.os.cpu_count", lambda: 2)
    assert Watch().shares() == {"waited_share": 0.2, "others_share": 0.25}
    assert Watch().shares() == {"waited_share": 0.0, "others_share": None}  # several threads, which all ran
