"""Gates of the result of each head."""

from functools import partial

import torch.nn.functional as F
from experts import MixtureOfExperts
from output_gate import GatedAttention
from sandwich_norm import SandwichBlock
from short_convolution import ShortConvolution
from their_models import (
    EXPERTS,
    TWO_ROPES,
    WINDOW_THEN_FULL,
    Halves,
    import_transformers,
    our_model,
    require_same_model,
    split_experts,
    their_model,
)
from windows import WindowAttention, widen


class GatedWindow(WindowAttention, GatedAttention):
    pass


def test_equals_laguna():
    theirs = their_model(
        "laguna",
        2,
        sliding_window=8,
        layer_types=WINDOW_THEN_FULL,
        mlp_layer_types=["sparse", "sparse"],
        rope_parameters=TWO_ROPES,
        moe_routed_scaling_factor=2.5,
        **EXPERTS,
    )
    ours = our_model(
        2,
        attention=GatedWindow,
        gate_per_head=True,
        gate_activation=F.softplus,
        window=8,
        qk_norm=True,
        ffn=partial(MixtureOfExperts, top_k=3, scale=2.5),
    )
    widen(ours, every=2, rope=Halves(1e6, 16, 128))
    require_same_model(ours, theirs, {"g_proj": "gate_proj"}, split_experts)


def test_equals_step3p7():
    step3p7 = import_transformers().models.step3p7.modeling_step3p7
    theirs = their_model(
        step3p7.Step3p7TextModel,
        2,
        sliding_window=8,
        layer_types=WINDOW_THEN_FULL,
        mlp_layer_types=["dense", "dense"],
        num_attention_groups=2,
        rope_parameters=TWO_ROPES,
        query_pre_attn_scalar=16,
    )
    ours = our_model(
        2, attention=GatedWindow, gate_per_head=True, window=8, qk_norm=True
    )
    widen(ours, every=2, rope=Halves(1e6, 16, 128))
    require_same_model(ours, theirs, {"g_proj": "gate_proj"}, centered="norm")


def test_equals_lfm3():
    theirs = their_model(
        "lfm3",
        3,
        norm_eps=1e-6,
        sliding_window=8,
        layer_types=["conv", *WINDOW_THEN_FULL],
        rope_parameters=TWO_ROPES,
    )
    ours = our_model(
        3,
        block=SandwichBlock,
        attention=GatedWindow,
        gate_per_head=True,
        window=8,
        qk_norm=True,
    )
    widen(ours, every=3, rope=Halves(1e6, 16, 128))
    ours.layers[0].attn = ShortConvolution(64, width=7)
    names = {
        "embedding_norm": "ln_final",
        "conv": "attn",
        "conv.conv": "attn.conv",
        "conv.out_proj": "attn.output_proj",
        "g_proj": "gate_proj",
        "post_operator_norm": "post_ln1",
        "operator_norm": "ln1",
        "post_ffn_norm": "post_ln2",
        "ffn_norm": "ln2",
        "feed_forward": "ffn",
    }
    require_same_model(ours, theirs, names, is_padded=False)
