"""Times of short runs, of which a sample has several."""

import pytest
from torch import nn


def test_times_are_those_of_one_run(profile_of, clock):
    """A product in forward and two in backward take 3 ms, and a sample at least 10 ms.

    The median round has twice the pace.
    """
    clock.takes = {"mm": 0.001}
    profile = profile_of(nn.Sequential(nn.Linear(4, 4, bias=False)), paces=(1, 2, 4))
    part, rest = profile.rows
    assert (part.name, rest.name) == ("*", "rest")
    assert part.forward_s == pytest.approx(0.002)
    assert part.total_s == pytest.approx(0.006)
    assert profile.whole.total_s == pytest.approx(0.006)
    assert rest.total_s == pytest.approx(0)
