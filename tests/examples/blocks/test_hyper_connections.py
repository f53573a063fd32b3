"""Several residual streams."""

from typing import Any

import pytest
import torch
from hyper_connections import (
    HyperBlock,
    HyperTransformer,
    StreamWeights,
    doubly_stochastic,
)
from kimi_delta_attention import KimiDeltaAttention
from their_models import (
    KIMI_DELTA_NAMES,
    CallableAsTheirs,
    our_model,
    require_same_model,
    their_model,
)
from torch import nn

STREAMS = {
    "attn_hc": "attn_streams",
    "ffn_hc": "ffn_streams",
    "fn": "weight",
    "base": "bias",
}


def test_equals_deepseek_v4():
    """Their layers call our attention and feed-forward: only the streams are compared."""
    theirs = their_model("deepseek_v4", 3)
    for name, weight in theirs.named_parameters():
        if "hc" in name:  # large, so that streams differ
            nn.init.normal_(weight)
    ours = our_model(3, HyperTransformer)
    for layer, block in zip(theirs.layers, ours.layers, strict=True):
        layer.self_attn = CallableAsTheirs(block.attn)
        layer.mlp = CallableAsTheirs(block.ffn)
    names = {
        **STREAMS,
        "hc_head.hc_": "final_streams.",
        "mlp.layer": "ffn",
        "self_attn.layer": "attn",
    }
    require_same_model(ours, theirs, names)


class EqualWeights(nn.Module):
    """GLM-5-Next ends with the mean of the streams."""

    def forward(self, x):
        return [torch.zeros(2, 24, 4)]


def test_equals_glm5_next():
    theirs = their_model(
        "glm5_next_text",
        2,
        layer_types=["linear_attention"] * 2,
        mlp_layer_types=["dense"] * 2,
        linear_head_dim=16,
        linear_num_heads=4,
        linear_lower_bound=None,
        num_key_value_heads=4,
    )
    ours: Any = HyperTransformer(
        2,
        64,
        4,
        96,
        max_seq_len=128,
        eps=1e-6,
        attention=KimiDeltaAttention,
        d_head=16,
    )
    ours.final_streams = EqualWeights()
    names = {**STREAMS, **KIMI_DELTA_NAMES}
    require_same_model(ours, theirs, names, is_padded=False)


def test_streams_are_neither_amplified_nor_lost():
    matrix = doubly_stochastic(torch.randn(5, 4, 4))
    assert matrix.min().item() > 0, "each stream takes a part of each stream"
    ones = torch.ones(5, 4)
    torch.testing.assert_close(matrix.sum(-2), ones, atol=1e-5, rtol=0)
    torch.testing.assert_close(matrix.sum(-1), ones, atol=1e-3, rtol=0)


def test_a_plain_transformer_cannot_call_the_block():
    model = our_model(block=HyperBlock, streams=4)
    with pytest.raises(TypeError, match="positional argument"):
        model(torch.randn(4, 24, 64))


def test_autocast_does_not_lower_the_weights_of_streams():
    weigh = StreamWeights(8, counts=[4], streams=4)
    x = torch.randn(4, 5, 8)
    with torch.autocast("cpu", torch.bfloat16):
        (weights,) = weigh(x)
    torch.testing.assert_close(weights, weigh(x)[0], rtol=0, atol=0)
