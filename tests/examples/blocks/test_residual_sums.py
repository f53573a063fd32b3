"""Residual sums with weights: constant, by depth, or learned."""

import copy

import pytest
import torch
import torch.nn.functional as F
from depth_scaled_residual import DepthScaledTransformer
from output_gate import GatedAttention
from residual_gate import GatedResidualBlock, ResidualGate
from scaled_residual import ScaledBlock
from their_models import (
    SANDWICH_NAMES,
    CallableAsTheirs,
    our_model,
    require_same_model,
    their_model,
)
from torch import nn
from windows import WindowAttention


class GatedWindow(WindowAttention, GatedAttention):
    pass


def test_equals_granite():
    theirs = their_model(
        "granite", 2, residual_multiplier=0.22, attention_multiplier=0.25
    )
    ours = our_model(2, block=ScaledBlock, residual_scale=0.22)
    require_same_model(ours, theirs)


def test_equals_beam():
    theirs = their_model(
        "beam",
        2,
        sliding_window=8,
        layer_types=["sliding_attention"] * 2,
        mlp_layer_types=["dense"] * 2,
        rope_parameters=None,
    )
    for layer in theirs.layers:  # a bias that GatedAttention does not have
        nn.init.zeros_(layer.self_attn.gate_bias)
    ours = our_model(
        2, DepthScaledTransformer, attention=GatedWindow, window=8, qk_norm=True
    )
    require_same_model(ours, theirs, SANDWICH_NAMES, drop_gate_bias)


def drop_gate_bias(state):
    for name in list(state):
        if name.endswith("gate_bias"):
            del state[name]


class InputScaledNorm(nn.Module):
    """Muse Spark's norm after the feed-forward layer: its gains come before the norm."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x):
        return F.rms_norm(x * self.weight, (64,), eps=1e-6)


def test_equals_muse_spark():
    """Their layers call our attention and feed-forward: only the rest is compared."""
    theirs = their_model(
        "muse_spark_text",
        2,
        layer_types=["full_attention"] * 2,
        mlp_layer_types=["dense"] * 2,
        residual_gate_temperature=0.3,
        post_norm_eps=1e-6,
    )
    ours = our_model(2, block=GatedResidualBlock, temperature=0.3)
    for layer, block in zip(theirs.layers, ours.layers, strict=True):
        block.post_ln1 = nn.RMSNorm(64, 1e-6, elementwise_affine=False)
        block.post_ln2 = InputScaledNorm()
        layer.self_attn = CallableAsTheirs(block.attn)
        layer.mlp = copy.deepcopy(block.ffn)
    names = {
        "self_attn.layer": "attn",
        "mlp": "ffn",
        "post_attention_residual_gate.gate": "attn_gate.weight",
        "post_feedforward_residual_gate.gate": "ffn_gate.weight",
        **SANDWICH_NAMES,
    }
    require_same_model(ours, theirs, names, centered="layernorm")


def test_a_new_gate_takes_a_half():
    _, take = ResidualGate(9).weights()
    torch.testing.assert_close(take, torch.full((9,), 0.5))


def test_a_gate_keeps_the_scale_of_a_sum():
    gate = ResidualGate(9)
    gate.weight.data = torch.linspace(-4, 4, 9)
    keep, take = gate.weights()
    torch.testing.assert_close(keep.square() + take.square(), torch.ones(9))


def test_keep_is_exact_where_take_is_almost_1():
    gate = ResidualGate(50)
    gate.weight.data = torch.linspace(0, 6.9, 50)
    keep, _ = gate.weights()
    expected = (1 - gate.weight.double().sigmoid().square()).sqrt()
    torch.testing.assert_close(keep.double(), expected, rtol=1e-6, atol=0)


def test_by_default_a_block_takes_the_sigmoid_of_the_weight():
    block = GatedResidualBlock(8, 2)
    for gate in (block.attn_gate, block.ffn_gate):
        gate.weight.data.fill_(2)
        _, take = gate.weights()
        torch.testing.assert_close(take, torch.tensor(2.0).sigmoid().expand(8))


def test_a_scaled_block_requires_its_scale():
    with pytest.raises(TypeError, match="residual_scale"):
        ScaledBlock(8, 2)  # type: ignore[call-arg]


def test_an_open_gate_still_keeps_a_part_of_the_stream():
    gate = ResidualGate(9)
    gate.weight.data.fill_(30)
    keep, take = gate.weights()
    torch.testing.assert_close(keep, torch.full((9,), 0.001**0.5))
    torch.testing.assert_close(take, torch.ones(9))
