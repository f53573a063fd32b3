"""Norms after the branches."""

from joint_qk_norm import JointNormAttention
from no_positions import NoPositions
from reordered_norm import ReorderedNormBlock
from their_models import (
    JOINT_NORM_NAMES,
    TWO_ROPES,
    WINDOW_THEN_FULL,
    Halves,
    our_model,
    require_same_model,
    their_model,
)
from windows import WindowAttention, widen

AFTER = {"post_attention_layernorm": "ln1", "post_feedforward_layernorm": "ln2"}
JOINT = {**AFTER, **JOINT_NORM_NAMES}


class JointNormWindow(WindowAttention, JointNormAttention):
    pass


def test_equals_olmo2():
    theirs = their_model("olmo2")
    ours = our_model(block=ReorderedNormBlock, attention=JointNormAttention)
    require_same_model(ours, theirs, JOINT)


def test_equals_olmo3():
    theirs = their_model(
        "olmo3",
        2,
        sliding_window=8,
        layer_types=WINDOW_THEN_FULL,
        rope_parameters=TWO_ROPES,
    )
    ours = our_model(2, block=ReorderedNormBlock, attention=JointNormWindow, window=8)
    widen(ours, every=2, rope=Halves(1e6, 16, 128))
    require_same_model(ours, theirs, JOINT)


def test_equals_exaone4():
    theirs = their_model("exaone4", 2, sliding_window=8, layer_types=WINDOW_THEN_FULL)
    ours = our_model(
        2, block=ReorderedNormBlock, attention=WindowAttention, window=8, qk_norm=True
    )
    widen(ours, every=2, rope=NoPositions())
    require_same_model(ours, theirs, AFTER)
