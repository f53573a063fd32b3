"""Block and Transformer beyond their contract: one rope for all blocks, positions, and parts that do not fit."""

from typing import Any

import pytest
import torch
from torch import nn

from tinyblock import Block, RotaryPositionalEmbedding, SwiGLU, Transformer


def test_transformer_takes_a_rope_in_place_of_theta():
    rope = RotaryPositionalEmbedding(50.0, 6, 40)
    model = Transformer(2, 24, 4, max_seq_len=20, rope=rope)
    assert {
        id(module) for module in model.modules() if isinstance(module, type(rope))
    } == {id(rope)}
    with pytest.raises(ValueError, match=r"d_k=8.*d_k=6"):
        Transformer(2, 24, 3, max_seq_len=20, rope=rope)


def test_transformer_with_positions_takes_a_sequence_longer_than_its_limit():
    model = Transformer(1, 24, 4, max_seq_len=9)
    assert model(torch.zeros(10, 24), torch.arange(10) % 9).shape == (10, 24)
    message = "x must have at most max_seq_len=9 tokens, got 10: build the Transformer"
    with pytest.raises(ValueError, match=message):
        model(torch.zeros(10, 24))


@pytest.mark.parametrize("part", ["norm", "attention", "ffn"])
@pytest.mark.parametrize(
    ("broken", "got"),
    [(lambda x: x[..., :1], r"\(2, 7, 1\)"), (lambda x: (x, None), "tuple")],
)
def test_block_names_the_part_that_returns_something_else(part, broken, got):
    class Broken(nn.Module):
        def __init__(self, *sizes, **options):
            super().__init__()

        def forward(self, x, *positions_and_mask):
            return broken(x)

    parts: Any = {part: Broken}
    block = Block(24, 4, **parts)
    with pytest.raises(
        ValueError,
        match=rf"{part} must return a tensor of shape \(2, 7, 24\).*got {got}",
    ):
        block(torch.zeros(2, 7, 24))


ODD_HEADS: dict[str, Any] = {
    "of d_model": (
        {"d_model": 60},
        "must be even for RoPE, got 60 / 4 = 15: .* or pass d_head or theta=None",
    ),
    "of d_head": (
        {"d_model": 64, "d_head": 15},
        "d_head, the head size, must be positive and even for RoPE, got 15",
    ),
}


@pytest.mark.parametrize("name", ODD_HEADS)
def test_transformer_names_the_sizes_of_an_odd_head(name):
    sizes, message = ODD_HEADS[name]
    with pytest.raises(ValueError, match=message):
        Transformer(1, num_heads=4, max_seq_len=8, **sizes)
    Transformer(1, num_heads=4, max_seq_len=8, theta=None, **sizes)  # without RoPE


WRONG_PARTS: dict[str, Any] = {
    "an instance": (
        {"norm": nn.LayerNorm(24)},
        r"norm must be a class or a function .* called as norm\(24, eps=1e-05, .* got a "
        r"layer: pass the class LayerNorm",
    ),
    "a function without a result": (
        {"ffn": lambda *sizes, **factory: None},
        r"ffn\(24, None, device=None, dtype=None\) must return a layer, got None",
    ),
    "other arguments": (
        {"ffn": nn.Linear},
        r"ffn is called as ffn\(24, None, device=None, dtype=None\), but Linear raised: ",
    ),
    "a layer of torch": (
        {"attention": nn.MultiheadAttention},
        r"attention is called as attention\(24, 4, num_kv_heads=None",
    ),
    "a class": ({"rope": RotaryPositionalEmbedding}, "rope must be an instance"),
}


@pytest.mark.parametrize("name", WRONG_PARTS)
def test_block_says_how_it_calls_what_builds_a_part(name):
    part, message = WRONG_PARTS[name]
    with pytest.raises(ValueError, match=message):
        Block(24, 4, **part)


def test_block_leaves_a_type_error_about_an_argument_to_the_layer():
    with pytest.raises(TypeError, match=r"Block\.__init__[^$]*parameter 'num_heads'"):
        Block(24, "4")  # type: ignore[arg-type]


def test_block_leaves_a_type_error_of_a_builder_to_its_layer():
    def wide(d_model, d_ff, **factory):
        return SwiGLU(d_model, "wide")  # type: ignore[arg-type]

    with pytest.raises(TypeError, match=r"SwiGLU\.__init__[^$]*parameter 'd_ff'"):
        Block(24, 4, ffn=wide)
