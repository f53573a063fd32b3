"""Adapters that are trained, and merged into the weights."""

import re

import pytest
import torch

from tinyblock import Transformer

pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("default")  # peft's imports have many


@pytest.fixture
def lora():
    """Import in a test, where the filter above applies."""
    import lora

    return lora


def test_lora_trains_adapters_only_and_merges_them(lora):
    torch.manual_seed(0)
    plain = Transformer(2, d_model=64, num_heads=4, max_seq_len=128)
    torch.manual_seed(0)
    model = lora.add_adapters(Transformer(2, d_model=64, num_heads=4, max_seq_len=128))
    trained = lora.trained_parameters(model)
    assert len(trained) == 2 * 2 * 7  # two matrices for each projection of two layers
    optimizer = torch.optim.AdamW(trained)
    for _ in range(2):
        lora.train_step(model, optimizer, torch.randn(4, 16, 64))
    x = torch.randn(2, 7, 64)
    adapted = model(x)
    merged = model.merge_and_unload()
    assert type(merged) is Transformer
    torch.testing.assert_close(merged(x), adapted, rtol=1e-4, atol=1e-5)
    assert (adapted - plain(x)).abs().max() > 1e-3
    pairs = zip(merged.named_parameters(), plain.parameters(), strict=True)
    for (name, weight), before in pairs:
        assert torch.equal(weight, before) == ("ln" in name), name


def test_lora_main(lora, capsys):
    lora.main()
    out = capsys.readouterr().out
    assert "trains 16% of 127296 parameters" in out
    assert float(re.findall(r"Transformer, (\S+) from", out)[0]) < 1e-5
