"""Both caches decode what transformers decodes, and what differs is not timed."""

import pytest
import torch

compare_decoding = pytest.importorskip("compare_decoding")
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(compare_decoding, "TOKENS", 4)


def test_table_has_tokens_per_second_of_each_candidate(monkeypatch):
    """Calls take 6, 9, 3, 3 and 0.5 seconds, and 3 more, then 1 more, in later rounds."""
    seconds = iter([6.0, 9.0, 3.0, 3.0, 0.5])
    runs = []

    def sampler(run, least_seconds):
        runs.append(run)
        taken = next(seconds)
        return iter([taken, taken + 3, taken + 1]).__next__

    monkeypatch.setattr(compare_decoding, "wall_sampler", sampler)
    table = compare_decoding.measure(1, torch.float32, rounds=3)
    text = " ".join(table.split())
    for row in (
        "| growing cache | 0.571 | 1.75 (1.60-1.90) | 1.17 (0.85-2.27) |",
        "| static cache, compiled | 0.400 | 2.50 (2.20-2.80) | 1.67 (1.18-3.37) |",
        "| transformers, DynamicCache | 1.00 | 1.00 (1.00-1.00) | 0.67 (0.52-1.17) |",
        "| transformers, StaticCache, compiled | 1.00 | 1.00 (1.00-1.00) | 0.67 (0.52-1.17) |",
        "| reading the weights | 0.667 | 1.50 (1.00-2.00) | 1.00 (1.00-1.00) |",
    ):
        assert row in text
    weights = 49152 * 576 + 2 * 576 * (576 + 192) + 3 * 576 * 1536 + 3 * 576
    assert runs[-1].__self__.shape == (weights,)


def test_candidates_that_differ_are_not_timed(monkeypatch):
    """Already roundings differ by more than 1e-12."""
    monkeypatch.setitem(compare_decoding.TOLERANCES, torch.float32, 1e-12)
    with pytest.raises(RuntimeError, match="for growing cache"):
        compare_decoding.measure(1, torch.float32, rounds=1)
