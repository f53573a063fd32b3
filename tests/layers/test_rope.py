"""What of RoPE is no part of the contract in tinyblock/contract.py, and its invariants for many sizes."""

import gc
import io
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyblock import RotaryPositionalEmbedding
from tinyblock.contract import angles_of, randn


def test_rope_table_is_rounded_from_float64():
    rope = RotaryPositionalEmbedding(5e5, 128, 131072)
    expected = torch.polar(torch.ones(1, dtype=torch.float64), angles_of(torch.arange(131072), 128, 5e5))
    torch.testing.assert_close(rope.cos_sin, torch.view_as_real(expected).float(), rtol=0, atol=6e-8)
    assert rope.cos_sin.shape == (131072, 64, 2)
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
    q, k = randn(1, 2 * half, seed=half), randn(1, 2 * half, seed=half + 100)

    def score(at, other):
        return (rope(q, torch.tensor([at])) * rope(k, torch.tensor([other]))).sum()

    torch.testing.assert_close(score(query, key), score(query + shift, key + shift), rtol=1e-9, atol=1e-9)


@settings(deadline=None, max_examples=50)
@given(seq=st.integers(1, 20), half=st.integers(1, 20), theta=st.floats(1.5, 1e7), seed=st.integers(0, 99))
def test_rope_preserves_norms(seq, half, theta, seed):
    x = randn(3, seq, 2 * half, seed=seed)
    rotated = RotaryPositionalEmbedding(theta, 2 * half, seq)(x)
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1), rtol=1e-12, atol=0)


def test_rope_without_positions_counts_from_zero():
    x, rope = randn(2, 5, 6, dtype=torch.float32), RotaryPositionalEmbedding(10.0, 6, 50)
    assert torch.equal(rope(x), rope(x, torch.arange(5)))
    assert torch.equal(rope(x[:, :1]), x[:, :1])


@pytest.mark.parametrize(
    ("positions", "named"),
    [([0, 1, 8], "0 ... 8"), ([0, -1, 2], "-1 ... 2"), ([10**9, 0, 0], "1000000000"), ([7, 8, 9], "7 ... 9")],
)
def test_rope_rejects_positions_outside_the_table(positions, named):
    rope, x = RotaryPositionalEmbedding(10.0, 4, 8), torch.zeros(3, 4)
    for dtype in (torch.float32, torch.float64):
        with pytest.raises(ValueError, match=rf"0 ... 7, got .*{named}|0 ... 7, got {named}"):
            rope(x.to(dtype), torch.tensor(positions))


def test_rope_reads_again_what_was_written_to():
    rope, x, positions = (
        RotaryPositionalEmbedding(10.0, 4, 8),
        torch.zeros(2, 3, 4),
        torch.zeros(2, 3, dtype=torch.long),
    )
    for _ in range(2):
        rope(x, positions)
    positions[1, 2] = 8
    for view in (positions, positions.unsqueeze(0)[0], positions[1:]):
        with pytest.raises(ValueError, match=r"got 0 \.\.\. 8"):
            rope(x, view)
        rope(x, positions[:1])  # another view of the same numbers, all of them in the table
    with torch.inference_mode():
        untracked = torch.zeros(3, dtype=torch.long)
        rope(x, untracked)
        untracked += 8
        assert rope(x, untracked).isnan().all()


@pytest.mark.parametrize("write", ["data", "numpy"])
def test_rope_marks_a_write_that_torch_does_not_see(write):
    rope, x, positions = RotaryPositionalEmbedding(10.0, 4, 8), torch.ones(3, 4), torch.arange(3)
    rope(x, positions)
    if write == "data":
        positions.data[1] = -1
        positions.data[2] = 8
    else:
        positions.numpy()[1:] = -1, 8
    assert rope(x, positions).isnan().all(-1).tolist() == [False, True, True]


def test_rope_keeps_neither_positions_nor_modules_alive():
    rope, positions = RotaryPositionalEmbedding(10.0, 4, 8), torch.arange(3)
    rope(torch.zeros(3, 4), positions)
    seen_module, seen_positions = weakref.ref(rope), weakref.ref(positions)
    del positions
    gc.collect()
    assert seen_positions() is None
    rope(torch.zeros(3, 4), torch.arange(3))
    del rope
    gc.collect()
    assert seen_module() is None


def test_rope_marks_positions_outside_the_table_under_vmap():
    rope, x = RotaryPositionalEmbedding(10.0, 4, 8), torch.ones(6, 4)
    positions = torch.tensor([0, 7, 8, -1, 3, 10**12])
    out = torch.func.vmap(rope)(x[None], positions[None])[0]
    assert out.isnan().all(-1).tolist() == [False, False, True, True, False, True]
    torch.testing.assert_close(out[[0, 1, 4]], rope(x[:3], positions[[0, 1, 4]]))


def test_rope_of_any_strides_under_vmap():
    rope, x = RotaryPositionalEmbedding(10.0, 6, 50), randn(3, 31, dtype=torch.float32)[:, :30].unflatten(1, (5, 6))
    torch.testing.assert_close(torch.func.vmap(rope)(x), rope(x), rtol=0, atol=1e-6)


def test_rope_on_meta_heals_when_it_meets_a_real_tensor():
    rope, x = RotaryPositionalEmbedding(10.0, 4, 8, device="meta"), randn(8, 4, dtype=torch.float32)
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
        ((float("nan"), 4, 8), "theta.*nan"),
        ((float("inf"), 4, 8), "theta.*inf"),
        ((10.0, 5, 8), "even.*5"),
        ((10.0, 0, 8), "even.*0"),
        ((10.0, -2, 8), "even.*-2"),
        ((10.0, 4, 0), "max_seq_len.*0"),
        ((10.0, 4, -1), "max_seq_len.*-1"),
    ],
)
def test_rope_rejects_bad_hyperparameters(arguments, named):
    with pytest.raises(ValueError, match=named):
        RotaryPositionalEmbedding(*arguments)
