"""What of the feed-forward layers is no part of the contract in tinyblock/contract.py."""

import pickle

import pytest
import torch

from tinyblock import FeedForward, SwiGLU, gelu


def test_ffn_weights_are_truncated_normal():
    torch.manual_seed(0)
    for layer in (SwiGLU(256, 512), FeedForward(256, 512)):
        for weight in layer.parameters():
            std = (2 / (256 + 512)) ** 0.5
            assert weight.abs().max() <= 3 * std
            assert weight.abs().max() > 2.9 * std
            # Cut at three sigma, a normal keeps 0.98658 of its standard deviation.
            assert weight.std().item() == pytest.approx(0.98658 * std, rel=0.01)
            assert weight.mean().abs() < 0.01 * std


@pytest.mark.parametrize("layer", [SwiGLU, FeedForward])
@pytest.mark.parametrize("sizes", [(0, 4), (-1, 4), (4, 0), (4, -2)])
def test_ffn_rejects_sizes_below_one(layer, sizes):
    with pytest.raises(ValueError, match=rf"d_model={sizes[0]}, d_ff={sizes[1]}"):
        layer(*sizes)


@pytest.mark.parametrize("layer", [SwiGLU, FeedForward])
def test_ffn_reset_parameters_after_meta(layer):
    module = layer(8, 16, device="meta").to_empty(device="cpu")
    for weight in module.parameters():
        torch.nn.init.constant_(weight, torch.nan)
    module.reset_parameters()
    assert module(torch.ones(2, 8)).isfinite().all()


def test_feed_forward_can_be_pickled_with_its_default_activation():
    layer = FeedForward(4)
    assert layer.activation is gelu
    copy = pickle.loads(pickle.dumps(layer))
    x = torch.linspace(-2, 2, 8).view(2, 4)
    assert torch.equal(copy(x), layer(x))
