"""The feed-forward layers beyond their contract: what they say when they refuse, and pickling."""

import pickle

import pytest
import torch

from tinyblock import FeedForward, SwiGLU, gelu


@pytest.mark.parametrize("layer", [SwiGLU, FeedForward])
@pytest.mark.parametrize("sizes", [(0, 4), (-1, 4), (4, 0), (4, -2)])
def test_ffn_rejects_sizes_below_one(layer, sizes):
    with pytest.raises(ValueError, match=rf"d_model={sizes[0]}, d_ff={sizes[1]}"):
        layer(*sizes)


def test_feed_forward_can_be_pickled_with_its_default_activation():
    layer = FeedForward(4)
    assert layer.activation is gelu
    x = torch.linspace(-2, 2, 8).view(2, 4)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), layer(x))
