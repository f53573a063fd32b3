"""Padded and packed sequences against each sequence alone, in float64."""

import itertools
import re

import packing
import pytest
import torch
from attention_variants import BidirectionalAttention
from packing import packed, padded_left, padded_right

from tinyblock import CausalMultiHeadSelfAttention, Transformer


@pytest.fixture(params=[CausalMultiHeadSelfAttention, BidirectionalAttention])
def model(request):
    model = Transformer(
        2, 64, 4, max_seq_len=8, attention=request.param, dtype=torch.float64
    )
    return model.requires_grad_(False)


def assert_equal_alone(model, x, out, starts):
    """Compare the outputs with those of each sequence alone; `starts` bounds the sequences of each row."""
    for row, bounds in enumerate(starts):
        for start, end in itertools.pairwise(bounds):
            alone = model(x[row, start:end])
            torch.testing.assert_close(out[row, start:end], alone, rtol=0, atol=1e-12)


def test_padding_on_the_right_equals_each_sequence_alone(model):
    x = torch.randn(3, 7, 64, dtype=torch.float64)
    positions, mask = padded_right(torch.tensor([5, 7, 1]), seq=7)
    assert positions.tolist() == [[0, 1, 2, 3, 4, 5, 6]] * 3
    assert mask.shape == (3, 1, 7)
    out = model(x, positions, mask)
    assert_equal_alone(model, x, out, [(0, 5), (0, 7), (0, 1)])
    others = torch.where(mask.mT, x, 0)  # the padding has no effect on the tokens
    assert torch.equal(out[0, :5], model(others, positions, mask)[0, :5])


def test_padding_on_the_left_equals_each_sequence_alone(model):
    x = torch.randn(3, 7, 64, dtype=torch.float64)
    positions, mask = padded_left(torch.tensor([5, 7, 1]), seq=7)
    assert positions.tolist() == [
        [0, 0, 0, 1, 2, 3, 4],
        [0, 1, 2, 3, 4, 5, 6],
        [0, 0, 0, 0, 0, 0, 0],
    ]
    out = model(x, positions, mask)
    assert out.isfinite().all()
    assert_equal_alone(model, x, out, [(2, 7), (0, 7), (6, 7)])


def test_packed_documents_equal_each_document_alone(model):
    x = torch.randn(3, 7, 64, dtype=torch.float64)
    document = torch.tensor(
        [
            [0, 0, 0, 1, 1, 1, 1],
            [5, 5, 2, 9, 9, 9, 9],
            [1, 1, 0, 0, 0, 1, 1],
        ]
    )
    positions, mask = packed(document)
    assert positions.tolist() == [
        [0, 1, 2, 0, 1, 2, 3],
        [0, 1, 0, 0, 1, 2, 3],
        [0, 1, 0, 1, 2, 0, 1],
    ]
    out = model(x, positions, mask)
    starts = [
        (0, 3, 7),
        (0, 2, 3, 7),
        (0, 2, 5, 7),
    ]
    assert_equal_alone(model, x, out, starts)


def test_packed_documents_may_be_longer_than_max_seq_len_together(model):
    x = torch.randn(1, 30, 64, dtype=torch.float64)
    document = torch.arange(30)[None] // 6
    out = model(x, *packed(document))
    assert_equal_alone(model, x, out, [range(0, 31, 6)])


def test_packing_main(capsys):
    packing.main()
    out = capsys.readouterr().out
    assert re.findall(r"^(.*): ", out, re.MULTILINE) == [
        "padded on the right",
        "padded on the left",
        "packed",
    ]
    differences = re.findall(r": (.*) from each", out)
    assert all(float(difference) < 1e-5 for difference in differences)
