"""Block and Transformer beyond their contract: one rope for all blocks, positions, and parts that do not fit."""

from typing import Any

import pytest
import torch
from torch import nn

from tinyblock import Block, RotaryPositionalEmbedding, Transformer


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
