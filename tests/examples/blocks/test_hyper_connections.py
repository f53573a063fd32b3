"""Several residual streams."""

import pytest
import torch
from hyper_connections import HyperBlock, HyperTransformer, doubly_stochastic
from their_models import (
    CallableAsTheirs,
    our_model,
    require_same_model,
    their_model,
)
from torch import nn


def test_deepseek_v4():
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
        "attn_hc": "attn_streams",
        "ffn_hc": "ffn_streams",
        "hc_head.hc_": "final_streams.",
        "fn": "weight",
        "base": "bias",
        "mlp.layer": "ffn",
        "self_attn.layer": "attn",
    }
    require_same_model(ours, theirs, names)


def test_streams_are_neither_amplified_nor_lost():
    matrix = doubly_stochastic(torch.randn(5, 4, 4))
    assert (matrix > 0).all()
    ones = torch.ones(5, 4)
    torch.testing.assert_close(matrix.sum(-2), ones, atol=1e-5, rtol=0)
    torch.testing.assert_close(matrix.sum(-1), ones, atol=1e-3, rtol=0)


def test_a_plain_transformer_cannot_call_the_block():
    model = our_model(block=HyperBlock, streams=4)
    with pytest.raises(TypeError, match="positional argument"):
        model(torch.randn(4, 24, 64))
