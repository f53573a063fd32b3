"""Block and Transformer beyond their contract: their parts, and a rope in place of theta."""

import functools

import pytest
import torch
from torch import nn

from tinyblock import Block, FeedForward, RMSNorm, RotaryPositionalEmbedding, Transformer, silu


def test_block_accepts_any_callable_for_its_ffn():
    block = Block(24, 4, 32, ffn=functools.partial(FeedForward, activation=silu))
    assert block.ffn.activation is silu
    assert block.ffn.d_ff == 32
    assert Block(24, 4).ffn.d_ff == 64
    assert Block(24, 4, ffn=FeedForward).ffn.d_ff == 96


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm, RMSNorm])
def test_transformer_accepts_any_callable_for_its_norm(norm):
    model = Transformer(2, 24, 4, max_seq_len=9, norm=norm, eps=1e-3, dtype=torch.float64, qk_norm=True)
    norms = [model.ln_final, *(layer.get_submodule(name) for layer in model.layers for name in ("ln1", "ln2"))]
    assert all(type(made) is norm and made.eps == 1e-3 and made.weight.dtype == torch.float64 for made in norms)
    assert model(torch.randn(2, 7, 24, dtype=torch.float64)).shape == (2, 7, 24)


def test_transformer_takes_a_rope_in_place_of_theta():
    rope = RotaryPositionalEmbedding(50.0, 6, 40)
    model = Transformer(2, 24, 4, max_seq_len=20, rope=rope)
    assert {id(module) for module in model.modules() if isinstance(module, type(rope))} == {id(rope)}
    same = Transformer(2, 24, 4, max_seq_len=20, theta=50.0)
    same.load_state_dict(model.state_dict())
    x = torch.randn(2, 7, 24)
    assert torch.equal(model(x), same(x))
    with pytest.raises(ValueError, match=r"d_k=8.*d_k=6"):
        Transformer(2, 24, 3, max_seq_len=20, rope=rope)


def test_transformer_with_positions_takes_a_sequence_longer_than_its_limit():
    model = Transformer(1, 24, 4, max_seq_len=9)
    assert model(torch.zeros(10, 24), torch.arange(10) % 9).shape == (10, 24)


@pytest.mark.parametrize("part", ["norm", "attention", "ffn"])
@pytest.mark.parametrize(("broken", "got"), [(lambda x: x[..., :1], r"\(2, 7, 1\)"), (lambda x: (x, None), "tuple")])
def test_block_names_the_part_that_returns_something_else(part, broken, got):
    class Broken(nn.Module):
        def __init__(self, *sizes, **options):
            super().__init__()

        def forward(self, x, *positions_and_mask):
            return broken(x)

    block = Block(24, 4, **{part: Broken})
    with pytest.raises(ValueError, match=rf"{part} must return a tensor of shape \(2, 7, 24\).*got {got}"):
        block(torch.zeros(2, 7, 24))
