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
    """The calls take 6, 9, 3, 3 and 0.5 seconds, for 4 tokens, or for all weights."""
    seconds = iter([6.0, 9.0, 3.0, 3.0, 0.5])
    runs = []

    def sampler(run, least_seconds):
        runs.append(run)
        taken = next(seconds)
        return lambda: taken

    monkeypatch.setattr(compare_decoding, "wall_sampler", sampler)
    table = compare_decoding.measure(1, torch.float32, rounds=1)
    text = " ".join(table.split())
    for row in (
        "| growing cache | 0.667 | 2.00 (2.00-2.00) | 3.00 (3.00-3.00) |",
        "| static cache, compiled | 0.444 | 3.00 (3.00-3.00) | 4.50 (4.50-4.50) |",
        "| transformers, DynamicCache | 1.33 | 1.00 (1.00-1.00) | 1.50 (1.50-1.50) |",
        "| reading the weights | 2.00 | 0.67 (0.67-0.67) | 1.00 (1.00-1.00) |",
    ):
        assert row in text
    weights = 49152 * 576 + 2 * 576 * (576 + 192) + 3 * 576 * 1536 + 3 * 576
    assert runs[-1].__self__.shape == (weights,)


def test_candidates_that_differ_are_not_timed(monkeypatch):
    """Already roundings differ by more than 1e-12."""
    monkeypatch.setitem(compare_decoding.TOLERANCES, torch.float32, 1e-12)
    with pytest.raises(RuntimeError, match="for growing cache"):
        compare_decoding.measure(1, torch.float32, rounds=1)
