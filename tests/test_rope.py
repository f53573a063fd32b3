import copy
import gc
import io
import pickle
import weakref

import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyblock import RotaryPositionalEmbedding, apply_rope

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
LLAMA = {"theta": 5e5, "d_k": 128, "max_seq_len": 131072}


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def angles(positions, d_k, theta):
    return positions.double()[..., None] * theta ** -(torch.arange(0, d_k, 2, dtype=torch.float64) / d_k)


def test_apply_rope_follows_the_formula():
    x, positions = randn(2, 3, 5, 8), torch.tensor([0, 1, 5, 100, 7])
    exact = reference.rope(reference.array(x), positions.numpy(), 100.0)
    np.testing.assert_allclose(reference.array(apply_rope(x, angles(positions, 8, 100.0))), exact, atol=1e-13)


@pytest.mark.parametrize("dtype", FLOATS)
def test_rope_engine_matches_equation_and_its_gradients(dtype):
    x = randn(2, 3, 11, 16, dtype=dtype)
    rope = RotaryPositionalEmbedding(100.0, 16, 11)
    for_engine, for_equation = x.clone().requires_grad_(), x.clone().requires_grad_()
    engine, equation = rope(for_engine), apply_rope(for_equation, angles(torch.arange(11), 16, 100.0))
    upstream = randn(2, 3, 11, 16, seed=1, dtype=dtype)
    engine.backward(upstream)
    equation.backward(upstream)
    tolerance = 2 * torch.finfo(dtype).eps
    assert engine.dtype == dtype
    torch.testing.assert_close(engine, equation, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(for_engine.grad, for_equation.grad, rtol=tolerance, atol=tolerance)


def round_trip(rope, way):
    if way == "bfloat16 and back":
        return rope.to(torch.bfloat16).float()
    if way == "double and back":
        return rope.double().half()
    if way == "meta":
        with torch.device("meta"):
            rope = RotaryPositionalEmbedding(**LLAMA)
        assert rope.cos_sin.is_meta
        rope = rope.to(torch.bfloat16).to_empty(device="cpu")
        rope.reset_parameters()
        return rope
    if way == "to_empty alone":
        return rope.to("meta").to_empty(device="cpu").to_empty(device="cpu")
    if way == "deepcopy":
        return copy.deepcopy(rope.bfloat16())
    if way == "pickle":
        return pickle.loads(pickle.dumps(rope))
    if way == "torch.save":
        file = io.BytesIO()
        torch.save(rope.bfloat16(), file)
        file.seek(0)
        return torch.load(file, weights_only=False)
    return rope


WAYS = ["fresh", "bfloat16 and back", "double and back", "meta", "to_empty alone", "deepcopy", "pickle", "torch.save"]


@pytest.fixture(scope="module")
def far_positions():
    """Every 61st position, and the last 100: both ends of the table and all of its wavelengths."""
    return torch.cat((torch.arange(0, 131072, 61), torch.arange(131072 - 100, 131072)))


@pytest.mark.parametrize("way", WAYS)
def test_rope_is_exact_at_far_positions(way, far_positions):
    rope = round_trip(RotaryPositionalEmbedding(**LLAMA), way)
    assert rope.cos_sin.dtype == torch.float32
    assert rope.state_dict() == {}
    rope(torch.zeros(1, 128), torch.tensor([3]))  # what was read last must not travel with a copy
    for dtype, bound in ((torch.float32, 1e-6), (torch.float64, 1e-10)):
        x = torch.nn.functional.normalize(randn(len(far_positions), 128, dtype=dtype), dim=-1)
        exact = reference.rope(reference.array(x), far_positions.numpy(), 5e5)
        assert np.abs(reference.array(rope(x, far_positions)) - exact).max() <= bound


def test_rope_table_is_rounded_from_float64():
    rope = RotaryPositionalEmbedding(**LLAMA)
    expected = torch.polar(torch.ones(1, dtype=torch.float64), angles(torch.arange(131072), 128, 5e5))
    torch.testing.assert_close(rope.cos_sin, torch.view_as_real(expected).float(), rtol=0, atol=6e-8)
    assert rope.cos_sin.shape == (131072, 64, 2)


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


def test_rope_gradcheck():
    x = randn(2, 3, 4).requires_grad_()
    assert torch.autograd.gradcheck(RotaryPositionalEmbedding(10.0, 4, 3), (x,))
    assert torch.autograd.gradcheck(lambda x: apply_rope(x, angles(torch.arange(3), 4, 10.0)), (x,))


@pytest.mark.parametrize("shape", [(5,), (1, 5), (4, 5), (2, 1, 5), (2, 4, 5)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8])
def test_rope_positions_broadcast(shape, dtype):
    x, rope = randn(2, 4, 5, 6), RotaryPositionalEmbedding(10.0, 6, 200)
    positions = torch.randint(0, 50, shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    exact = reference.rope(reference.array(x), np.broadcast_to(positions.numpy(), (2, 4, 5)), 10.0)
    np.testing.assert_allclose(reference.array(rope(x, positions)), exact, atol=1e-12)
    np.testing.assert_allclose(reference.array(rope(x.float(), positions)), exact, atol=1e-6)


def test_rope_without_positions_counts_from_zero():
    x, rope = randn(2, 5, 6, dtype=torch.float32), RotaryPositionalEmbedding(10.0, 6, 50)
    assert torch.equal(rope(x), rope(x, torch.arange(5)))
    assert rope(x[:, :1]).shape == (2, 1, 6)
    assert torch.equal(rope(x[:, :1]), x[:, :1])
    assert rope(x[:0]).shape == (0, 5, 6)
    assert rope(x[:0], torch.zeros(0, 5, dtype=torch.long)).shape == (0, 5, 6)


def test_rope_takes_any_strides():
    rope, wide = RotaryPositionalEmbedding(10.0, 6, 50), randn(2, 5, 9, dtype=torch.float32)
    even = randn(2, 5, 12, dtype=torch.float32)
    odd_offset, odd_rows, steps = even[..., 1:7], wide[..., :6], even[..., ::2]
    for x in (odd_offset, odd_rows, steps, randn(2, 6, 5, dtype=torch.float32).mT, wide[0, 0, :6].expand(4, 6)):
        torch.testing.assert_close(rope(x), rope(x.contiguous()), rtol=0, atol=1e-6)


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


def test_rope_marks_positions_outside_the_table_where_they_cannot_be_read():
    rope, x = RotaryPositionalEmbedding(10.0, 4, 8), torch.ones(6, 4)
    positions = torch.tensor([0, 7, 8, -1, 3, 10**12])
    compiled = torch.compile(rope, fullgraph=True, backend="aot_eager")
    batched = torch.func.vmap(rope)
    for out in (compiled(x, positions), batched(x[None], positions[None])[0]):
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


def test_rope_leaves_inputs_alone():
    rope, x, positions = RotaryPositionalEmbedding(10.0, 4, 8), randn(3, 4), torch.arange(3)
    table = rope.cos_sin.clone()
    for dtype in FLOATS:
        mine = x.to(dtype)
        before = mine.clone()
        rope(mine, positions)
        assert torch.equal(mine, before)
    assert torch.equal(positions, torch.arange(3))
    assert torch.equal(rope.cos_sin, table)
    assert repr(rope) == "RotaryPositionalEmbedding(theta=10.0, d_k=4, max_seq_len=8)"
