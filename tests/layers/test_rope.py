"""RoPE beyond its contract: norms for many sizes, other frequencies, vmap, memory, and a failed move."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyblock import RotaryPositionalEmbedding, apply_rope


@settings(deadline=None, max_examples=50)
@given(seq=st.integers(1, 20), half=st.integers(1, 20), theta=st.floats(1.5, 1e7))
def test_rope_preserves_norms(seq, half, theta):
    x = torch.randn(3, seq, 2 * half, dtype=torch.float64)
    rotated = RotaryPositionalEmbedding(theta, 2 * half, seq)(x)
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1), rtol=1e-12, atol=0)


def test_rope_under_vmap_takes_any_strides_and_rejects_positions_with_the_range():
    rope = RotaryPositionalEmbedding(10.0, 6, 8)
    x = torch.randn(3, 31)[:, :30].unflatten(1, (5, 6))
    torch.testing.assert_close(torch.func.vmap(rope)(x), rope(x), rtol=0, atol=1e-6)
    with pytest.raises(
        ValueError, match=r"token_positions must be 0 \.\.\. 7 \(max_seq_len - 1\)"
    ):
        torch.func.vmap(rope)(x, torch.arange(15).view(3, 5))


def test_rope_in_float64_costs_what_its_tokens_cost():
    """Keep for backward no more than the rotations of the tokens, whatever the length of the table."""
    rope = RotaryPositionalEmbedding(1e4, 8, 1000)
    x = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    storages = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: storages.append(t.untyped_storage().nbytes()), lambda t: t
    ):
        rope(x)
        rope(x, torch.arange(5))
    assert max(storages) <= x.untyped_storage().nbytes()


def test_rope_rotates_by_the_frequencies_of_a_subclass_and_requires_one_for_each_pair():
    class Slower(RotaryPositionalEmbedding):
        def frequencies(self):
            return super().frequencies() / 8

    class TooFew(RotaryPositionalEmbedding):
        def frequencies(self):
            return super().frequencies()[:1]

    x = torch.randn(2, 7, 6, dtype=torch.float64)
    angles = (
        torch.arange(7)[:, None]
        * 100 ** (-torch.arange(0, 6, 2, dtype=torch.float64) / 6)
        / 8
    )
    for positions in (None, torch.arange(7)):
        torch.testing.assert_close(
            Slower(100.0, 6, 9)(x, positions), apply_rope(x, angles), rtol=0, atol=1e-12
        )
    with pytest.raises(RuntimeError, match=r"\[4\].*size 1"):
        TooFew(10.0, 8, 9)


def test_rope_that_cannot_be_moved_keeps_its_table():
    rope = RotaryPositionalEmbedding(10.0, 4, 8)
    x = torch.randn(8, 4)
    expected = rope(x)
    with pytest.raises((RuntimeError, AssertionError, NotImplementedError)):
        rope.to("xpu")  # not built here
    assert torch.equal(rope(x), expected)


def on_meta():
    return RotaryPositionalEmbedding(1e4, 64, 2048, device="meta")


def test_rope_on_meta_computes_one_table_in_several_threads():
    x = torch.randn(2, 7, 64)
    expected = RotaryPositionalEmbedding(1e4, 64, 2048)(x)
    for _ in range(20):
        rope = on_meta()
        together = threading.Barrier(4)

        def call(_, rope=rope, together=together):
            together.wait()
            return rope(x)

        with ThreadPoolExecutor(4) as threads:
            results = list(threads.map(call, range(4)))
        assert all(torch.equal(result, expected) for result in results)


def test_rope_on_meta_called_in_inference_mode_can_be_trained():
    rope = on_meta()
    x = torch.randn(2, 7, 64)
    with torch.inference_mode():
        rope(x)
    x.requires_grad_()
    rope(x).sum().backward()
    assert x.grad is not None


def test_rope_on_meta_keeps_a_table_without_gradients():
    class Learned(RotaryPositionalEmbedding):
        def frequencies(self):
            scale = getattr(self, "scale", torch.ones(()))
            return super().frequencies() * scale

    rope = Learned(1e4, 64, 2048, device="meta")
    rope.scale = torch.nn.Parameter(torch.ones(()))
    rope(torch.randn(2, 7, 64))
    assert not rope.cos_sin.requires_grad


def test_rope_on_meta_keeps_no_table_of_fake_tensors():
    rope = on_meta()
    x = torch.randn(2, 7, 64)
    with torch._subclasses.FakeTensorMode() as mode:
        assert rope(mode.from_tensor(x)).shape == x.shape
    expected = RotaryPositionalEmbedding(1e4, 64, 2048)(x)
    assert torch.equal(rope(x), expected)


def test_rope_says_how_many_tokens_its_table_has():
    rope = RotaryPositionalEmbedding(10.0, 6, 8)
    message = (
        "x must have at most max_seq_len=8 tokens, got 9: build RoPE with a larger"
    )
    with pytest.raises(ValueError, match=message):
        rope(torch.randn(9, 6))


def test_rope_rejects_complex_positions():
    rope = RotaryPositionalEmbedding(10.0, 6, 8)
    with pytest.raises(ValueError, match=r"must be integers, got torch\.complex64"):
        rope(torch.randn(3, 6), torch.arange(3) + 1j)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rope_says_which_positions_are_out_of_range(dtype):
    rope = RotaryPositionalEmbedding(10.0, 6, 8)
    message = r"must be 0 \.\.\. 7 \(max_seq_len - 1\), got values from -2 to 37"
    with pytest.raises(ValueError, match=message):
        rope(torch.randn(3, 6, dtype=dtype), torch.tensor([5, 37, -2]))
