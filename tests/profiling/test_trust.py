"""Whether the profiler notices that its figures cannot be trusted."""

import os
import time

import pytest
from lab.machine import Ceilings
from lab.timing import Spread
from profiling.trust import (
    BusyShares,
    Clocks,
    busy_shares,
    reasons_to_doubt,
    system_clocks,
    trust,
)

IDLE = BusyShares(waited=0.01, others=0.02)
STEADY = [1.00, 1.01, 0.99, 1.02, 1.00, 1.01, 1.00]
RATE = Spread(1e11, 0.98e11, 1.02e11, 7)
UNSTEADY = Spread(1e11, 0.8e11, 1.1e11, 7)


def ceilings(flops=RATE, memory=RATE):
    return Ceilings(flops, memory, 1e11, 1024, 2**20)


def reasons(seconds=STEADY, shares=IDLE, limits=None):
    figures = trust(seconds, shares)
    return reasons_to_doubt(figures, limits or ceilings(), samples=len(seconds))


def test_trust_has_the_variation_of_the_samples():
    figures = trust(STEADY, IDLE)
    assert (figures.waited_share, figures.others_share) == (0.01, 0.02)
    assert figures.spread == pytest.approx(0.01, abs=0.005)
    assert figures.median_above_fastest == pytest.approx(1 / 0.99 - 1)


def test_steady_run_on_an_idle_machine_gives_no_reason_to_doubt():
    assert reasons() == []
    assert reasons(shares=BusyShares(None, None)) == []


def test_samples_of_a_busy_machine_give_a_reason_to_doubt():
    # A block of 17 ms beside other work on both of two cores.
    seconds = [0.435, 0.017, 0.402, 0.221, 0.460, 0.018, 0.444]
    assert "the samples vary by 95% (p20 to p80)" in reasons(seconds)


def test_steady_samples_above_a_fast_one_give_a_reason_to_doubt():
    # One sample of its own, and then always another program's turn.
    seconds = [0.5, *[1.0] * 9]
    assert reasons(seconds) == ["the median is 100% above the fastest sample"]


def test_fewer_than_5_samples_give_a_reason_to_doubt():
    assert reasons([1.0]) == ["each time has 1 sample, fewer than 5"]
    assert reasons([1.0] * 4) == ["each time has 4 samples, fewer than 5"]
    assert reasons([1.0] * 5) == []


def test_waiting_for_a_core_gives_a_reason_to_doubt():
    (reason,) = reasons(shares=BusyShares(waited=1.39, others=0.0))
    assert reason == (
        "threads waited for a core for 139% of the run time (sum over all threads)"
    )


def test_other_programs_give_a_reason_to_doubt():
    (reason,) = reasons(shares=BusyShares(waited=0.0, others=0.5))
    assert reason == "other programs kept 50% of all cores busy"


def test_ceilings_that_vary_give_a_reason_to_doubt():
    expected = ["the ceilings vary by 30% (p20 to p80)"]
    assert reasons(limits=ceilings(flops=UNSTEADY)) == expected
    assert reasons(limits=ceilings(memory=UNSTEADY)) == expected


def test_clocks_read_what_linux_counts(tmp_path):
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
    assert clocks.waited == 2.5
    busy = 1400 / os.sysconf("SC_CLK_TCK")
    assert clocks.others == pytest.approx(busy - time.process_time(), abs=0.5)


def test_shares_are_those_of_the_time_between():
    start = Clocks(wall=100.0, waited=5.0, others=50.0)
    end = Clocks(wall=110.0, waited=7.0, others=55.0)
    assert busy_shares(start, end) == BusyShares(0.2, 0.5 / (os.cpu_count() or 1))
    assert busy_shares(None, None) == BusyShares(None, None)
