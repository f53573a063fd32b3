"""The feed-forward layers beyond their contract: pickling."""

import pickle

import torch

from tinyblock import FeedForward, gelu


def test_feed_forward_can_be_pickled_with_its_default_activation():
    layer = FeedForward(4)
    assert layer.activation is gelu
    x = torch.linspace(-2, 2, 8).view(2, 4)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), layer(x))
