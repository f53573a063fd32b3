"""RoPE beyond its contract: its table, norms for many sizes, vmap, and memory."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyblock import RotaryPositionalEmbedding


def test_rope_table_is_rounded_from_float64():
    rope = RotaryPositionalEmbedding(5e5, 128, 131072)
    frequencies = torch.tensor([5e5 ** (-2 * k / 128) for k in range(64)], dtype=torch.float64)
    expected = torch.polar(torch.ones(1, dtype=torch.float64), torch.arange(131072)[:, None] * frequencies)
    torch.testing.assert_close(rope.cos_sin, torch.view_as_real(expected).float(), rtol=0, atol=6e-8)
    assert repr(rope) == "RotaryPositionalEmbedding(theta=500000.0, d_k=128, max_seq_len=131072)"


@settings(deadline=None, max_examples=50)
@given(seq=st.integers(1, 20), half=st.integers(1, 20), theta=st.floats(1.5, 1e7))
def test_rope_preserves_norms(seq, half, theta):
    x = torch.randn(3, seq, 2 * half, dtype=torch.float64)
    rotated = RotaryPositionalEmbedding(theta, 2 * half, seq)(x)
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1), rtol=1e-12, atol=0)


def test_rope_of_any_strides_under_vmap():
    rope, x = RotaryPositionalEmbedding(10.0, 6, 50), torch.randn(3, 31)[:, :30].unflatten(1, (5, 6))
    torch.testing.assert_close(torch.func.vmap(rope)(x), rope(x), rtol=0, atol=1e-6)


def test_rope_in_float64_costs_what_its_tokens_cost():
    """Keep for backward no more than the rotations of the tokens, whatever the length of the table."""
    rope, x = RotaryPositionalEmbedding(1e4, 8, 1000), torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    storages = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: storages.append(t.untyped_storage().nbytes()), lambda t: t):
        rope(x)
        rope(x, torch.arange(5))
    assert max(storages) <= x.untyped_storage().nbytes()


def test_rope_requires_a_frequency_for_each_pair():
    class TooFew(RotaryPositionalEmbedding):
        def frequencies(self):
            return super().frequencies()[:1]

    with pytest.raises(RuntimeError, match=r"\[4\].*size 1"):
        TooFew(10.0, 8, 9)


def test_rope_under_vmap_rejects_positions_out_of_range_with_the_range():
    rope = torch.func.vmap(RotaryPositionalEmbedding(10.0, 4, 8))
    with pytest.raises(ValueError, match=r"token_positions must be 0 \.\.\. 7 \(max_seq_len - 1\)"):
        rope(torch.zeros(1, 3, 4), torch.tensor([[0, 1, 8]]))


def test_rope_with_positions_takes_a_sequence_longer_than_the_table():
    assert RotaryPositionalEmbedding(10.0, 4, 8)(torch.zeros(9, 4), torch.arange(9) % 8).shape == (9, 4)


def test_rope_that_cannot_be_moved_keeps_its_table():
    rope, x = RotaryPositionalEmbedding(10.0, 4, 8), torch.randn(8, 4)
    expected = rope(x)
    with pytest.raises((RuntimeError, AssertionError, NotImplementedError)):
        rope.to("xpu")  # not built here
    assert torch.equal(rope(x), expected)
