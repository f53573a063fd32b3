"""Initial weights, and new ones by a walk over the modules.

Matrices are normal of variance 2 / (d_in + d_out), cut at 3 sigma; norm weights are 1,
biases 0.
"""

import math
from typing import Any

import pytest
import torch
from torch import nn

from tinyblock import (
    Block,
    CausalMultiHeadSelfAttention,
    FeedForward,
    RotaryPositionalEmbedding,
    SwiGLU,
    Transformer,
    attention,
    ffn,
)

OPTIONS: Any = {"num_heads": 4, "num_kv_heads": 2, "qk_norm": True}
BUILD: dict[str, Any] = {
    "SwiGLU": lambda: SwiGLU(64),
    "FeedForward": lambda: FeedForward(64),
    "attention": lambda: CausalMultiHeadSelfAttention(64, **OPTIONS),
    "Block": lambda: Block(64, **OPTIONS),
    "Transformer": lambda: Transformer(2, 64, max_seq_len=9, **OPTIONS),
}
every_layer = pytest.mark.parametrize("name", BUILD)


def initialize(model):
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def require_initial_weights(model):
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            assert (weight == 1).all(), name
            continue
        units = weight.detach() / math.sqrt(2 / sum(weight.shape))
        # The cut is on both sides. A uniform draw would end at 1.7 sigma.
        assert 2.5 < units.max() <= 3.001, name
        assert 2.5 < -units.min() <= 3.001, name
        # Of a normal that is cut at 3 sigma, within 6 standard errors.
        size = units.square().mean().sqrt()
        assert abs(size - 0.987) < 6 / math.sqrt(2 * weight.numel()), name


@every_layer
def test_a_walk_over_modules_gives_a_layer_from_meta_its_initial_weights(name):
    """As FSDP2's documentation does. Both ends of the normal are cut."""
    with torch.device("meta"):
        layer = BUILD[name]()
    layer.to_empty(device="cpu")
    for tensor in (*layer.parameters(), *layer.buffers()):
        tensor.data.fill_(math.nan)
    initialize(layer)
    require_initial_weights(layer)
    for buffer_name, buffer in layer.named_buffers():
        assert buffer.isfinite().all(), buffer_name


@every_layer
@pytest.mark.parametrize("draw", ["constructor", "walk"])
def test_each_weight_is_drawn_once(draw, name):
    """To draw 135 million weights takes 18 seconds."""
    layer = BUILD[name]()
    torch.manual_seed(0)
    layer = BUILD[name]() if draw == "constructor" else layer
    if draw == "walk":
        initialize(layer)
    next_number = torch.rand(1)
    torch.manual_seed(0)
    for weight in layer.parameters():
        if weight.ndim == 2:
            nn.init.trunc_normal_(torch.empty_like(weight), a=-3, b=3)
    torch.testing.assert_close(next_number, torch.rand(1))


@pytest.mark.parametrize("file", [ffn, attention], ids=["ffn", "attention"])
def test_a_projection_with_a_bias_starts_without_an_offset(file):
    projection = file.Linear(64, 32)
    projection.bias.data.fill_(math.nan)
    projection.reset_parameters()
    torch.testing.assert_close(projection.bias, torch.zeros(32))


class CountingRope(RotaryPositionalEmbedding):
    computed = 0

    def frequencies(self):
        self.computed += 1
        return super().frequencies()


def test_a_shared_table_is_computed_once():
    model = Transformer(3, 64, 4, max_seq_len=9, rope=CountingRope(100.0, 16, 9))
    model.rope.computed = 0
    initialize(model)
    assert model.rope.computed == 1


def test_reset_parameters_computes_the_table_of_a_new_theta():
    rope = RotaryPositionalEmbedding(100.0, 16, 9)
    rope.theta = 500.0
    rope.reset_parameters()
    expected = RotaryPositionalEmbedding(500.0, 16, 9)
    torch.testing.assert_close(rope.cos_sin, expected.cos_sin, rtol=0, atol=0)
