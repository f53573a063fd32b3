"""The pre-norm block: y = x + attention(norm(x)), and the result is y + ffn(norm(y))."""

import functools
from unittest.mock import Mock, call

import pytest
import torch
from torch import nn

from .checks import EPS, case_of, randn
from .every_layer import (  # noqa: F401  with the tables of this page
    test_any_strides,
    test_built_on_meta,
    test_calls_change_nothing,
    test_compiles_to_one_graph,
    test_equation,
    test_equation_under_autocast,
    test_initial_weights,
    test_later_tokens_change_nothing,
    test_layer_is_defined,
    test_rejects_option,
    test_reset_parameters,
)
from .test_attention import BOTH, OPTIONS, OTHER_THETA, ROPE, self_attention
from .test_ffn import swiglu_of_weights
from .test_rmsnorm import rms_norm
from .test_rope import OF_FOUR, POSITIONS


def pre_norm_block(
    x,
    weights,
    token_positions=None,
    mask=None,
    *,
    eps=EPS,
    **heads,
):
    normed = rms_norm(x, weights["ln1.weight"], eps)
    attn = weights.of("attn")
    y = x + self_attention(normed, attn, token_positions, mask, eps=eps, **heads)
    return y + swiglu_of_weights(
        rms_norm(y, weights["ln2.weight"], eps), weights.of("ffn")
    )


case = functools.partial(
    case_of, "block", "Block", pre_norm_block, num_heads=4, d_ff=96
)
CASES = {
    "RoPE": case(2, 7, 24, **ROPE),
    "another theta": case(2, 7, 24, **OTHER_THETA),
    "all options": case(2, 7, 24, inputs=BOTH, eps=1e-3, **OPTIONS),
    "positions, as many sequences as heads": case(
        4, 7, 24, inputs={"token_positions": OF_FOUR}, **ROPE
    ),
    "no batch axis": case(5, 24, is_common=False, **ROPE),
}
TYPICAL = ["RoPE"]
REJECTED = {"eps": (0.0,)}


class Double(nn.Module):
    def forward(self, x, *inputs):
        self.inputs = inputs
        return 2 * x


def test_builds_and_calls_any_norm_ffn_and_attention():
    shared = {"device": "cpu", "dtype": torch.float32}
    options = {**ROPE, **shared, "eps": 1e-3, "window": 3}
    parts = {name: Mock(return_value=Double()) for name in ("norm", "ffn", "attention")}
    block = case(2, 7, 24).construct(**parts, **options)
    assert parts["norm"].call_args_list == [call(24, eps=1e-3, **shared)] * 2
    parts["ffn"].assert_called_once_with(24, 96, **shared)
    parts["attention"].assert_called_once_with(24, 4, **options)
    x = randn(2, 7, 24)
    torch.testing.assert_close(block(x, POSITIONS, "any mask"), 25 * x)
    assert block.attn.inputs == (POSITIONS, "any mask")


@pytest.mark.parametrize(("name", "part"), [("attn", "attention"), ("ffn", "ffn")])
def test_rejects_a_part_that_changes_the_shape(name, part):
    """The result would broadcast to all sequences."""
    block = case(2, 7, 24).construct()
    block.get_submodule(name).forward = lambda x, *inputs: x[:1]
    with pytest.raises(ValueError, match=rf"{part} .*\(2, 7, 24\).* got \(1, 7, 24\)"):
        block(torch.zeros(2, 7, 24))
