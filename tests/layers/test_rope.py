"""RoPE beyond its contract: its table, what it says when it refuses, and its invariants for many sizes."""

import io
import math

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


def test_rope_table_is_whole_and_float32_after_meta_and_torch_save():
    exact, file = RotaryPositionalEmbedding(100.0, 6, 50).cos_sin, io.BytesIO()
    with torch.device("meta"):
        empty = RotaryPositionalEmbedding(100.0, 6, 50)
    assert empty.cos_sin.is_meta
    materialized = empty.half().to_empty(device="cpu").to_empty(device="cpu")
    torch.save(materialized.bfloat16(), file)
    file.seek(0)
    for rope in (materialized, torch.load(file, weights_only=False)):
        assert rope.cos_sin.dtype == torch.float32
        assert torch.equal(rope.cos_sin, exact)


@settings(deadline=None, max_examples=50)
@given(
    shift=st.integers(0, 4000),
    query=st.integers(0, 90),
    key=st.integers(0, 90),
    half=st.integers(1, 12),
    theta=st.floats(2, 1e6),
)
def test_rope_scores_depend_on_relative_positions_only(shift, query, key, half, theta):
    rope = RotaryPositionalEmbedding(theta, 2 * half, 4096)
    q, k = torch.randn(2, 1, 2 * half, dtype=torch.float64)

    def score(query, key):
        return (rope(q, torch.tensor([query])) * rope(k, torch.tensor([key]))).sum()

    torch.testing.assert_close(score(query, key), score(query + shift, key + shift), rtol=1e-9, atol=1e-9)


@settings(deadline=None, max_examples=50)
@given(seq=st.integers(1, 20), half=st.integers(1, 20), theta=st.floats(1.5, 1e7))
def test_rope_preserves_norms(seq, half, theta):
    x = torch.randn(3, seq, 2 * half, dtype=torch.float64)
    rotated = RotaryPositionalEmbedding(theta, 2 * half, seq)(x)
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1), rtol=1e-12, atol=0)


def test_rope_without_positions_counts_from_zero():
    x, rope = torch.randn(2, 5, 6), RotaryPositionalEmbedding(10.0, 6, 50)
    assert torch.equal(rope(x), rope(x, torch.arange(5)))
    assert torch.equal(rope(x[:, :1]), x[:, :1])


@pytest.mark.parametrize("positions", [[0, 1, 8], [0, -1, 2], [2**40, 0, 0]])
def test_rope_refuses_positions_off_the_table(positions):
    rope, x, positions = RotaryPositionalEmbedding(10.0, 4, 8), torch.zeros(3, 4), torch.tensor(positions)
    for call, dtype in ((rope, torch.float32), (rope, torch.float64), (torch.func.vmap(rope), torch.float32)):
        with pytest.raises(ValueError, match=r"token_positions must be 0 \.\.\. 7 \(max_seq_len - 1\)"):
            call(x.to(dtype)[None], positions[None])


def test_rope_of_any_strides_under_vmap():
    rope, x = RotaryPositionalEmbedding(10.0, 6, 50), torch.randn(3, 31)[:, :30].unflatten(1, (5, 6))
    torch.testing.assert_close(torch.func.vmap(rope)(x), rope(x), rtol=0, atol=1e-6)


def test_rope_on_meta_heals_when_it_meets_a_real_tensor():
    rope, x = RotaryPositionalEmbedding(10.0, 4, 8, device="meta"), torch.randn(8, 4)
    assert torch.equal(rope(x), RotaryPositionalEmbedding(10.0, 4, 8)(x))


def test_rope_rejects_a_sequence_longer_than_the_table():
    rope = RotaryPositionalEmbedding(10.0, 4, 8)
    with pytest.raises(ValueError, match=r"9 tokens .*max_seq_len=8"):
        rope(torch.zeros(9, 4))
    assert rope(torch.zeros(9, 4), torch.arange(9) % 8).shape == (9, 4)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((0.0, 4, 8), "theta.*0.0"),
        ((-1.0, 4, 8), "theta.*-1.0"),
        ((math.nan, 4, 8), "theta.*nan"),
        ((math.inf, 4, 8), "theta.*inf"),
        ((10.0, 5, 8), "even.*5"),
        ((10.0, 0, 8), "even.*0"),
        ((10.0, 4, 0), "max_seq_len.*0"),
    ],
)
def test_rope_rejects_bad_hyperparameters(arguments, named):
    with pytest.raises(ValueError, match=named):
        RotaryPositionalEmbedding(*arguments)


def test_rope_in_float64_costs_what_its_tokens_cost():
    """Keep for backward no more than the rotations of the tokens, whatever the length of the table."""
    rope, x = RotaryPositionalEmbedding(1e4, 8, 1000), torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    storages = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: storages.append(t.untyped_storage().nbytes()), lambda t: t):
        rope(x)
        rope(x, torch.arange(5))
    assert max(storages) <= x.untyped_storage().nbytes()


@pytest.mark.parametrize("positions", [torch.tensor([0.0, 1.5, 2.0]), torch.tensor([0.0, 1.0, 2.0])])
def test_rope_takes_no_fractions_of_positions_even_when_compiled(positions):
    rope = torch.compile(RotaryPositionalEmbedding(10.0, 4, 8), backend="eager")
    with pytest.raises(ValueError, match=r"token_positions must be integers, got torch.float32"):
        rope(torch.zeros(3, 4), positions)


def test_rope_wants_a_frequency_for_each_pair():
    class TooFew(RotaryPositionalEmbedding):
        def frequencies(self):
            return super().frequencies()[:1]

    with pytest.raises(RuntimeError, match=r"\[4\].*size 1"):
        TooFew(10.0, 8, 9)
