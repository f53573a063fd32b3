"""The pre-norm block: y = x + attention(norm(x)), and the result is y + ffn(norm(y))."""

import functools
from unittest.mock import Mock, call

import pytest
import torch
from torch import nn

from .checks import EPS, case_of, randn
from .every_layer import EveryLayer
from .test_attention import (
    EACH_ITSELF,
    OPTIONS,
    OTHER_THETA,
    ROPE,
    mask_of,
    self_attention,
)
from .test_ffn import swiglu_of_weights
from .test_rmsnorm import rms_norm
from .test_rope import OF_FOUR, POSITIONS


def pre_norm(x, ln1, attn, ln2, ffn):
    y = x + attn(ln1(x))
    return y + ffn(ln2(y))


def block_of(combine):
    """Turn a formula of x and the functions of its parts into one of the block."""

    def formula(
        x, weights, token_positions=None, mask=None, *, d_model, d_ff, eps=EPS, **heads
    ):
        gains1 = weights.get_of("ln1.weight", d_model)
        gains2 = weights.get_of("ln2.weight", d_model)
        of_attn = weights.of("attn")
        of_ffn = weights.of("ffn")
        options = {"d_model": d_model, "eps": eps, **heads}
        return combine(
            x,
            ln1=lambda x: rms_norm(x, gains1, eps),
            attn=lambda x: self_attention(x, of_attn, token_positions, mask, **options),
            ln2=lambda x: rms_norm(x, gains2, eps),
            ffn=lambda x: swiglu_of_weights(x, of_ffn, d_model, d_ff),
        )

    return formula


pre_norm_block = block_of(pre_norm)
case = functools.partial(
    case_of, "block", "Block", pre_norm_block, d_model=24, num_heads=4, d_ff=64
)


class TestBlock(EveryLayer):
    cases = {
        "RoPE": case(**ROPE),
        "another theta": case(**OTHER_THETA),
        "all options": case(positions=POSITIONS, mask=mask_of(2, 7, 7), **OPTIONS),
        "another eps": case(eps=1e-3, **ROPE),
        "mask": case(mask=EACH_ITSELF, **ROPE),
        "positions, as many sequences as heads": case(
            axes=(4, 7), positions=OF_FOUR, **ROPE
        ),
        "no batch axis": case(axes=(7,), is_common=False, **ROPE),
    }
    typical = ["RoPE"]
    rejected = {"eps": (0.0,)}


class Double(nn.Module):
    def forward(self, x, *inputs):
        self.inputs = inputs
        return 2 * x


def test_builds_and_calls_any_norm_ffn_and_attention():
    shared = {"device": "cpu", "dtype": torch.float32}
    options = {**ROPE, **shared, "eps": 1e-3, "window": 3}
    parts = {name: Mock(return_value=Double()) for name in ("norm", "ffn", "attention")}
    block = case().construct(**parts, **options)
    assert parts["norm"].call_args_list == [call(24, eps=1e-3, **shared)] * 2
    parts["ffn"].assert_called_once_with(24, 64, **shared)
    parts["attention"].assert_called_once_with(24, 4, **options)
    x = randn(2, 7, 24)
    y = x + 2 * (2 * x)  # each norm and each layer doubles its input
    torch.testing.assert_close(block(x, POSITIONS, "any mask"), y + 2 * (2 * y))
    assert block.attn.inputs == (POSITIONS, "any mask")


@pytest.mark.parametrize(("name", "part"), [("attn", "attention"), ("ffn", "ffn")])
def test_rejects_a_part_that_changes_the_shape(name, part):
    """The result would broadcast to all sequences."""
    block = case().construct()
    block.get_submodule(name).forward = lambda x, *inputs: x[:1]
    with pytest.raises(ValueError, match=rf"{part} .*\(2, 7, 24\).* got \(1, 7, 24\)"):
        block(torch.zeros(2, 7, 24))
