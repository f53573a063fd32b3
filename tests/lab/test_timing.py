"""Timings and their spread."""

import itertools
import time

import pytest
import torch
from lab.timing import Spread, interleave


class Clock:
    """A clock that a run moves on by its own time, so that nothing depends on how busy the machine is."""

    now = 0.0

    def __call__(self):
        return self.now

    def run(self, seconds):
        self.now += seconds


def test_spread_is_the_median_and_the_quintiles():
    assert Spread.of([5.0, 1.0, 4.0, 2.0, 3.0, 6.0]) == Spread(3.5, 2.0, 5.0, 6)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0, 1)
    assert Spread.of([1.0, 100.0, 2.0]).median == 2.0  # one slow sample moves it little


@pytest.mark.parametrize("seconds", [0.4049341374504143, 0.9666063677707588])
def test_spread_of_equal_samples_is_in_order(seconds):
    # Interpolation rounds both percentiles up, or down.
    for count in range(2, 16):
        spread = Spread.of([seconds] * count)
        assert spread.p20 <= spread.median <= spread.p80


def test_interleave_takes_one_sample_a_round_in_turn():
    clock, order = Clock(), []
    durations = itertools.count(1)

    def run(name):
        order.append(name)
        clock.run(next(durations))

    runs = {key: (lambda key=key: run(key)) for key in ("a", ("b", "forward"))}
    samples = interleave(runs, rounds=3, sample_seconds=0, warmup_calls=1, clock=clock)
    a, b = runs
    assert order == [
        a,
        a,
        b,
        b,
        a,
        b,
        b,
        a,
        a,
        b,
    ]  # each twice for warming up; every other round in reverse
    assert samples == {a: [5, 8, 9], b: [6, 7, 10]}


@pytest.mark.parametrize(("seconds", "calls"), [(0.125, 8), (2.0, 1)])
def test_interleave_repeats_a_short_call_and_no_long_one(seconds, calls):
    clock, advanced, starts, asked = Clock(), [], [], []

    def run():
        starts.append(clock.now)
        clock.run(seconds)

    def agree(calls):  # with a process that needs no more than 5
        asked.append(calls)
        return min(calls, 5)

    samples = interleave({"": run}, 2, 1, 3, lambda: advanced.append(1), agree, clock)
    agreed, unmeasured = (
        min(calls, 5),
        2 * (calls > 1),
    )  # after another run, the caches are cold
    assert len(starts) == 3 + 3 + 2 * (agreed + unmeasured)
    assert samples == {"": [seconds, seconds]}
    assert len(advanced) == 2
    assert asked == [calls, agreed, agreed]


def test_clock_runs_and_leaves_cuda_alone(monkeypatch):
    monkeypatch.setattr(
        torch.cuda, "is_available", lambda: True
    )  # which starting CUDA would show to be wrong
    samples = interleave(
        {"": lambda: time.sleep(0.002)}, rounds=1, sample_seconds=0, warmup_calls=1
    )
    assert samples[""][0] >= 0.002
    assert not torch.cuda.is_initialized()
