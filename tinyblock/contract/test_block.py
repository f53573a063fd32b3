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
    test_built_on_the_default_device,
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


def formula_of(combine):
    """Turn a formula of x and the functions of its parts into one of the block."""

    def formula(x, weights, token_positions=None, mask=None, *, eps=EPS, **heads):
        def ln1(x):
            return rms_norm(x, weights["ln1.weight"], eps)

        def attn(x):
            of_attn = weights.of("attn")
            return self_attention(x, of_attn, token_positions, mask, eps=eps, **heads)

        def ln2(x):
            return rms_norm(x, weights["ln2.weight"], eps)

        def ffn(x):
            return swiglu_of_weights(x, weights.of("ffn"))

        return combine(x, ln1, attn, ln2, ffn)

    return formula


def pre_norm(x, ln1, attn, ln2, ffn):
    y = x + attn(ln1(x))
    return y + ffn(ln2(y))


def post_norm(x, ln1, attn, ln2, ffn):
    y = ln1(x + attn(x))
    return ln2(y + ffn(y))


def post_norm_of_attention(x, ln1, attn, ln2, ffn):
    y = ln1(x + attn(x))
    return y + ffn(ln2(y))


def post_norm_of_ffn(x, ln1, attn, ln2, ffn):
    y = x + attn(ln1(x))
    return ln2(y + ffn(y))


def norms_of_results(x, ln1, attn, ln2, ffn):
    y = x + ln1(attn(x))
    return y + ln2(ffn(y))


def without_norms(x, ln1, attn, ln2, ffn):
    y = x + attn(x)
    return y + ffn(y)


def add_normed_to_attention(x, ln1, attn, ln2, ffn):
    x = ln1(x)
    y = x + attn(x)
    return y + ffn(ln2(y))


def add_normed_to_ffn(x, ln1, attn, ln2, ffn):
    y = ln2(x + attn(ln1(x)))
    return y + ffn(y)


def add_normed_to_both(x, ln1, attn, ln2, ffn):
    x = ln1(x)
    y = ln2(x + attn(x))
    return y + ffn(y)


def without_first_residual(x, ln1, attn, ln2, ffn):
    y = attn(ln1(x))
    return y + ffn(ln2(y))


def without_second_residual(x, ln1, attn, ln2, ffn):
    return ffn(ln2(x + attn(ln1(x))))


def in_parallel(x, ln1, attn, ln2, ffn):
    return x + attn(ln1(x)) + ffn(ln2(x))


def with_ln1_twice(x, ln1, attn, ln2, ffn):
    return pre_norm(x, ln1, attn, ln1, ffn)


pre_norm_block = formula_of(pre_norm)
MISTAKES = {
    "each norm is after its addition (post-norm)": formula_of(post_norm),
    "ln1 is after the addition (post-norm)": formula_of(post_norm_of_attention),
    "ln2 is after the addition (post-norm)": formula_of(post_norm_of_ffn),
    "each norm is after its layer, not before it": formula_of(norms_of_results),
    "the norms are missing": formula_of(without_norms),
    "the residual of attention adds ln1(x) in place of x": formula_of(
        add_normed_to_attention
    ),
    "the residual of ffn adds ln2(y) in place of y": formula_of(add_normed_to_ffn),
    "both residuals add what is normalized": formula_of(add_normed_to_both),
    "the residual of attention is missing": formula_of(without_first_residual),
    "the residual of ffn is missing": formula_of(without_second_residual),
    "ffn reads x, without the result of attention": formula_of(in_parallel),
    "ln1 stands in place of ln2": formula_of(with_ln1_twice),
    "RoPE is missing": lambda x, weights, rope=None, **given: pre_norm_block(
        x, weights, **given
    ),
}
case = functools.partial(
    case_of,
    "block",
    "Block",
    pre_norm_block,
    num_heads=4,
    d_ff=64,
    mistakes=MISTAKES,
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
    parts["ffn"].assert_called_once_with(24, 64, **shared)
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
