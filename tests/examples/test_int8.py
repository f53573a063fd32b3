"""Weights in int8 against those they are rounded from."""

import re

import pytest
import torch

from tinyblock import Transformer

pytest.importorskip("torchao")
pytestmark = pytest.mark.filterwarnings("default")  # torchao's import has many


@pytest.fixture
def int8():
    """Import in a test, where the filter above applies."""
    import int8

    return int8


def test_int8_rounds_by_half_a_step_at_most(int8):
    model = Transformer(2, d_model=64, num_heads=4, max_seq_len=128)
    before = [weight.clone() for weight in model.parameters()]
    quantized = int8.in_int8(model)
    pairs = zip(quantized.named_parameters(), model.parameters(), strict=True)
    for (name, rounded), weight in pairs:
        if weight.ndim == 1:
            assert torch.equal(rounded, weight)
            continue
        assert rounded.qdata.dtype == torch.int8
        step = weight.abs().amax(dim=1, keepdim=True) / 127
        error = (rounded.dequantize() - weight).abs()
        assert (error <= 0.51 * step).all(), name
    assert all(map(torch.equal, before, model.parameters()))
    x = torch.randn(2, 7, 64)
    expected = model(x)
    assert (quantized(x) - expected).norm() < 0.02 * expected.norm()


def test_int8_counts_a_byte_for_each_weight_and_a_scale_for_each_row(int8):
    linear = torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False))
    assert int8.bytes_of(linear) == 4 * 64 * 32
    assert int8.bytes_of(int8.in_int8(linear)) == 64 * 32 + 4 * 32


def test_int8_main(int8, capsys):
    int8.main()
    out = capsys.readouterr().out
    before, after = map(int, re.findall(r"(\d+) bytes in float32, (\d+) in", out)[0])
    assert 0.25 < after / before < 0.26
    assert 0 < float(re.findall(r"output: (\S+)", out)[0]) < 0.02
