"""The pre-norm block: y = x + attention(norm(x)), and the result is y + ffn(norm(y))."""

import functools

import pytest
import torch
from torch import nn

from .checks import EPS, case_of, randn
from .test_attention import BOTH, OPTIONS, ROPE, self_attention
from .test_ffn import swiglu_of_weights
from .test_rmsnorm import rms_norm
from .test_rope import OF_FOUR, POSITIONS


def weights_of(part, weights):
    """Return the weights of a part of a layer, by their names in that part."""
    prefix = f"{part}."
    names = [name for name in weights if name.startswith(prefix)]
    return {name.removeprefix(prefix): weights[name] for name in names}


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
    attn = weights_of("attn", weights)
    y = x + self_attention(normed, attn, token_positions, mask, eps=eps, **heads)
    return y + swiglu_of_weights(
        rms_norm(y, weights["ln2.weight"], eps), weights_of("ffn", weights)
    )


case = functools.partial(case_of, "block.Block", pre_norm_block, num_heads=4, d_ff=96)
CASES = {
    "RoPE": case(2, 7, 24, **ROPE),
    "all options": case(2, 7, 24, inputs=BOTH, eps=1e-3, **OPTIONS),
    "positions, as many sequences as heads": case(
        4, 7, 24, inputs={"token_positions": OF_FOUR}, **ROPE
    ),
    "no batch axis": case(5, 24, is_common=False, **ROPE),
}
LAYERS = {"block": case(2, 7, 24, **ROPE)}


class Part(nn.Module):
    """Double x, and record what the part was built with and called with."""

    def __init__(self, *sizes, **options):
        super().__init__()
        self.built = (sizes, options)

    def forward(self, x, *inputs):
        self.called = inputs
        return 2 * x


def test_builds_and_calls_any_norm_ffn_and_attention():
    parts = {"norm": Part, "ffn": Part, "attention": Part}
    shared = {"device": "cpu", "dtype": torch.float32}
    block = case(2, 7, 24).construct(**parts, **ROPE, **shared, eps=1e-3, window=3)
    assert block.ln1.built == ((24,), {"eps": 1e-3, **shared})
    assert block.ln2.built == block.ln1.built
    assert block.ffn.built == ((24, 96), shared)
    options = {**ROPE, "eps": 1e-3, "window": 3, **shared}
    assert block.attn.built == ((24, 4), options)
    x = randn(2, 7, 24)
    torch.testing.assert_close(block(x, POSITIONS, "any mask"), 25 * x)
    assert block.attn.called == (POSITIONS, "any mask")


@pytest.mark.parametrize(("name", "part"), [("attn", "attention"), ("ffn", "ffn")])
def test_rejects_a_part_that_changes_the_shape(name, part):
    """The result would broadcast to all sequences."""
    block = case(2, 7, 24).construct()
    block.get_submodule(name).forward = lambda x, *inputs: x[:1]
    with pytest.raises(ValueError, match=rf"{part} .*\(2, 7, 24\).* got \(1, 7, 24\)"):
        block(torch.zeros(2, 7, 24))
