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


def test_table_has_tokens_per_second_of_each_candidate():
    table = compare_decoding.measure(1, torch.float32, rounds=2)
    speeds = {}
    for row in table.splitlines()[2:]:
        name, speed, *ratios = (cell.strip() for cell in row.split("|")[1:-1])
        speeds[name] = float(speed)
        assert len(ratios) == 2
    assert len(speeds) == 5
    assert all(speed > 0 for speed in speeds.values())


def test_candidate_with_other_weights_is_not_timed(monkeypatch):
    build = compare_decoding.build_models

    def wrong(layers, dtype):
        model, peer = build(layers, dtype)
        model.lm_head.weight.data *= 2
        return model, peer

    monkeypatch.setattr(compare_decoding, "build_models", wrong)
    with pytest.raises(RuntimeError, match="for growing cache"):
        compare_decoding.measure(1, torch.float32, rounds=1)
