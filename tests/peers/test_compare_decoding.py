"""Both caches decode what transformers decodes, and what differs is not timed."""

import pytest
import torch

compare_decoding = pytest.importorskip("compare_decoding")
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(compare_decoding, "TOKENS", 4)
    monkeypatch.setattr(compare_decoding, "SAMPLE_SECONDS", 1e-3)


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
    cells = [row.split("|")[2:5] for row in table.splitlines()[2:]]
    assert [[float(cell.split()[0]) for cell in row] for row in cells] == [
        [0.667, 2.0, 3.0],
        [0.444, 3.0, 4.5],
        [1.33, 1.0, 1.5],
        [1.33, 1.0, 1.5],
        [2.0, 0.67, 1.0],
    ]
    weights = 49152 * 576 + 2 * 576 * (576 + 192) + 3 * 576 * 1536 + 3 * 576
    assert runs[-1].__self__.shape == (weights,)


def test_candidate_with_other_weights_is_not_timed(monkeypatch):
    build = compare_decoding.build_models

    def wrong(layers, dtype):
        model, peer = build(layers, dtype)
        model.lm_head.weight.data *= 2
        return model, peer

    monkeypatch.setattr(compare_decoding, "build_models", wrong)
    with pytest.raises(RuntimeError, match="for growing cache"):
        compare_decoding.measure(1, torch.float32, rounds=1)
