"""Attention sinks."""

from functools import partial

import pytest
import torch
from experts import MixtureOfExperts
from no_positions import NoPositions
from partial_rope import PartialRope
from scaled_residual import ScaledBlock
from sinks import SinkAttention
from their_models import (
    EXPERTS,
    HALF_ROTATES,
    WINDOW_THEN_FULL,
    Halves,
    our_model,
    require_same_layer,
    require_same_model,
    split_experts,
    their_model,
)
from windows import WindowAttention, widen


class SinkWindow(WindowAttention, SinkAttention):
    pass


def test_equals_gpt_oss():
    """Compare attention: the experts of gpt-oss have biases, and are clamped."""
    theirs = their_model(
        "gpt_oss", sliding_window=8, layer_types=["sliding_attention"], **EXPERTS
    )
    layer = theirs.layers[0].self_attn
    positions = torch.arange(24)[None]
    angles = theirs.rotary_emb(torch.zeros(1), positions)
    window = torch.ones(24, 24).tril().triu(-7)  # 1 for 8 keys: its own, and 7 before
    mask = window.log()  # 0, or -inf: their layer adds it to scores
    ours = SinkWindow(64, 4, num_kv_heads=2, rope=Halves(1e4, 16, 128), window=8)
    require_same_layer(ours, layer, run_theirs=lambda x: layer(x, angles, mask)[0])


def test_a_window_that_would_hide_the_sink_raises():
    message = "SinkAttention must be the last base of Wrong, got WindowAttention"
    with pytest.raises(TypeError, match=message):

        class Wrong(SinkAttention, WindowAttention):
            pass


def test_equals_flint():
    theirs = their_model(
        "flint",
        2,
        sliding_window=8,
        layer_types=WINDOW_THEN_FULL,
        mlp_only_layers=[],
        **EXPERTS,
    )
    ours = our_model(
        2,
        attention=SinkWindow,
        window=8,
        qk_norm=True,
        ffn=partial(MixtureOfExperts, top_k=3),
    )
    widen(ours, every=2, rope=NoPositions())
    require_same_model(ours, theirs, convert=split_experts)


def test_equals_granite_swa():
    theirs = their_model(
        "granite_swa",
        2,
        sliding_window=8,
        layer_types=WINDOW_THEN_FULL,
        layer_rope_theta=[1e4, 0],
        residual_multiplier=0.22,
        attention_multiplier=0.25,
    )
    ours = our_model(
        2, block=ScaledBlock, residual_scale=0.22, attention=SinkWindow, window=8
    )
    widen(ours, every=2, rope=NoPositions())
    require_same_model(ours, theirs)


def test_equals_mimo_v2_flash():
    theirs = their_model(
        "mimo_v2_flash",
        v_head_dim=16,
        attention_value_scale=1.0,
        num_key_value_heads=1,  # twice as many in layers with windows
        sliding_window=8,
        layer_types=["sliding_attention"],
        mlp_layer_types=["sparse"],
        rope_parameters={"sliding_attention": HALF_ROTATES},
        routed_scaling_factor=1.0,
        **EXPERTS,
    )
    ours = our_model(
        attention=SinkWindow,
        window=8,
        rope=PartialRope(Halves(1e4, 8, 128)),
        ffn=partial(MixtureOfExperts, top_k=3, has_shared_expert=False),
    )
    require_same_model(ours, theirs, convert=split_experts)
