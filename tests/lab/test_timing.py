"""Timings and their spread."""

import time

import pytest
from lab import timing
from lab.timing import Spread, interleave, paired_ratio


def test_spread_is_the_median_and_the_quintiles():
    assert Spread.of([5.0, 1.0, 4.0, 2.0, 3.0, 6.0]) == Spread(3.5, 2.0, 5.0, 6)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0, 1)
    assert Spread.of([1.0, 100.0, 2.0]).median == 2.0  # one slow sample moves it little


def test_paired_ratio_cancels_what_both_have_in_a_round():
    drift = [1.0, 2.0, 4.0, 8.0]
    assert paired_ratio([3 * d for d in drift], [2 * d for d in drift]) == Spread(1.5, 1.5, 1.5, 4)
    with pytest.raises(ValueError, match="zip"):
        paired_ratio([1.0], [1.0, 2.0])


def test_interleave_takes_one_sample_a_round_in_turn():
    order, collected = [], {}
    runs = {"a": lambda: time.sleep(0.002), "b": lambda: None}

    def stop(name):
        order.append(name)
        if len(order) == 6:
            raise KeyboardInterrupt  # what was measured is there all the same

    with pytest.raises(KeyboardInterrupt):
        interleave(runs, rounds=9, sample_seconds=0, on_sample=stop, samples=collected)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert {name: len(times) for name, times in collected.items()} == {"a": 3, "b": 3}
    assert all(seconds >= 0.002 for seconds in collected["a"])


@pytest.mark.parametrize(("seconds", "counts"), [(1e-6, [2, 1000, 2, 1000]), (2e-3, [1, 1])])
def test_interleave_repeats_a_short_call_and_no_long_one(monkeypatch, seconds, counts):
    """By the clock of a machine on which each call takes so long, however busy this one is."""
    seen = []

    class Timer:
        def __init__(self, *arguments, **options):
            pass

        def timeit(self, number):
            seen.append(number)
            return number * seconds

    monkeypatch.setattr(timing, "Timer", Timer)
    samples = interleave({"": int}, rounds=2, sample_seconds=0.001, warmup_calls=3)
    assert seen[:2] == [3, 3]
    assert seen[2:] == pytest.approx(counts, abs=1)  # 0.001 / 1e-6 need not be an integer
    assert samples == {"": pytest.approx([seconds, seconds])}
