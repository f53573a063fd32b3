"""Attention and feed-forward side by side."""

from functools import partial

from no_positions import NoPositions
from parallel_branches import ParallelBlock
from their_models import WINDOW_THEN_FULL, our_model, require_same_model, their_model
from torch import nn
from windows import WindowAttention, widen

from tinyblock import RotaryPositionalEmbedding

COHERE = {
    "block": ParallelBlock,
    "norm": partial(nn.LayerNorm, bias=False),
    "rope": RotaryPositionalEmbedding(1e4, 16, 128),
}


def test_equals_cohere():
    theirs = their_model("cohere", layer_norm_eps=1e-6)
    require_same_model(our_model(**COHERE), theirs)


def test_equals_cohere2():
    theirs = their_model(
        "cohere2",
        2,
        layer_norm_eps=1e-6,
        sliding_window=8,
        layer_types=WINDOW_THEN_FULL,
    )
    ours = our_model(2, attention=WindowAttention, window=8, **COHERE)
    widen(ours, every=2, rope=NoPositions())
    require_same_model(ours, theirs)
