"""Two norms per branch."""

from functools import partial

import pytest
import torch
from bounded_scores import BoundedAttention
from experts import MixtureOfExperts
from gelu_gate import GeGLU
from no_positions import NoPositions
from norm_without_gain import norm_without_gain
from output_gate import GatedAttention
from partial_rope import PartialRope
from sandwich_norm import SandwichBlock
from their_models import (
    EXPERTS,
    HALF_ROTATES,
    SANDWICH_NAMES,
    TWO_ROPES,
    WINDOW_THEN_FULL,
    Halves,
    our_model,
    require_same_model,
    split_experts,
    their_model,
)
from windows import WindowAttention, widen

from tinyblock import RotaryPositionalEmbedding

GLM = {"post_self_attn_layernorm": "post_ln1", "post_mlp_layernorm": "post_ln2"}
TRINITY = {
    "post_attention_layernorm": "post_ln1",
    "pre_mlp_layernorm": "ln2",
    "post_mlp_layernorm": "post_ln2",
}


class BoundedWindow(WindowAttention, BoundedAttention):
    pass


class GatedWindow(WindowAttention, GatedAttention):
    pass


def test_a_window_that_would_not_be_applied_raises():
    message = "BoundedAttention must be the last base of Wrong, got WindowAttention"
    with pytest.raises(TypeError, match=message):

        class Wrong(BoundedAttention, WindowAttention):
            pass


def test_scores_of_bfloat16_are_computed_in_float32():
    attention = BoundedAttention(32, 4)
    q, k, v = 3 * torch.randn(3, 1, 4, 9, 8).bfloat16()
    found = attention.attend(q, k, v, None)
    expected = attention.attend(q.float(), k.float(), v.float(), None)
    torch.testing.assert_close(found, expected.bfloat16())


def split_gate_and_up(state):
    """GLM-4 fuses both projections of the feed-forward layer that read x."""
    for name in list(state):
        if "mlp.gate_up_proj" in name:
            w1, w3 = state.pop(name).chunk(2)
            state[name.replace("mlp.gate_up_proj", "ffn.w1")] = w1
            state[name.replace("mlp.gate_up_proj", "ffn.w3")] = w3


def test_equals_gemma2():
    theirs = their_model(
        "gemma2",
        2,
        sliding_window=8,
        layer_types=WINDOW_THEN_FULL,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=2.0,
    )
    ours = our_model(
        2,
        block=SandwichBlock,
        ffn=GeGLU,
        attention=BoundedWindow,
        window=8,
        cap=2.0,
    )
    widen(ours, every=2)
    require_same_model(ours, theirs, SANDWICH_NAMES, centered="norm")


def test_equals_gemma3():
    theirs = their_model(
        "gemma3_text",
        2,
        sliding_window=8,
        layer_types=WINDOW_THEN_FULL,
        query_pre_attn_scalar=16,
        rope_parameters=TWO_ROPES,
    )
    ours = our_model(
        2,
        block=SandwichBlock,
        ffn=GeGLU,
        attention=WindowAttention,
        window=8,
        qk_norm=True,
    )
    widen(ours, every=2, rope=Halves(1e6, 16, 128))
    require_same_model(ours, theirs, SANDWICH_NAMES, centered="norm")


def test_equals_glm4():
    theirs = their_model("glm4", rope_parameters=HALF_ROTATES)
    rope = PartialRope(RotaryPositionalEmbedding(1e4, 8, 128))
    ours = our_model(block=SandwichBlock, rope=rope)
    require_same_model(ours, theirs, GLM, split_gate_and_up)


def test_equals_kolibri1():
    theirs = their_model(
        "kolibri1", 2, sliding_window=8, layer_types=WINDOW_THEN_FULL, **EXPERTS
    )
    for layer in theirs.layers:  # it adds the bias to logits, and we add it to scores
        layer.mlp.gate.e_score_correction_bias.zero_()
    ours = our_model(
        2,
        block=SandwichBlock,
        attention=WindowAttention,
        window=8,
        qk_norm=True,
        ffn=partial(MixtureOfExperts, top_k=3),
    )
    widen(ours, every=2, rope=NoPositions())
    require_same_model(ours, theirs, GLM, split_experts)


def test_equals_afmoe():
    theirs = their_model(
        "afmoe",
        2,
        sliding_window=8,
        layer_types=WINDOW_THEN_FULL,
        num_dense_layers=0,
        num_shared_experts=1,
        route_scale=2.5,
        **EXPERTS,
    )
    ours = our_model(
        2,
        block=SandwichBlock,
        attention=GatedWindow,
        window=8,
        qk_norm=True,
        ffn=partial(MixtureOfExperts, top_k=3, scale=2.5),
    )
    widen(ours, every=2, rope=NoPositions())
    require_same_model(ours, theirs, TRINITY, split_experts)


def test_both_norms_of_a_branch_are_of_the_kind_that_is_passed():
    block = SandwichBlock(8, 2, norm=norm_without_gain)
    for norm in (block.ln1, block.post_ln1, block.ln2, block.post_ln2):
        assert not list(norm.parameters())
