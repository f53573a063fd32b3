"""Attention beyond its contract: NaN, its kernel, heads of any size, and what its errors suggest."""

import math
from typing import Any, cast

import numpy
import pytest
import torch
import torch.nn.functional as F

from tinyblock import CausalMultiHeadSelfAttention, RotaryPositionalEmbedding
from tinyblock import scaled_dot_product_attention as attention


def test_scaled_dot_product_attention_does_not_hide_nan():
    q, k, v = torch.randn(3, 3, 4)
    q[1, 0] = math.nan
    mask = torch.ones(3, 3, dtype=torch.bool).tril()
    for out in (
        attention(q, k, v, mask),
        F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask)[0],
    ):
        assert out.isnan().all(-1).tolist() == [False, True, False]


def test_self_attention_uses_no_kernel_that_materializes_the_scores():
    module = CausalMultiHeadSelfAttention(
        24, 4, rope=RotaryPositionalEmbedding(100.0, 6, 16), num_kv_heads=2
    )
    x = torch.randn(2, 3, 6, 24)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU]
    ) as profile:
        module(x)
        module(x[0, 0])
    kernels = {
        event.name for event in profile.events() if "scaled_dot_product" in event.name
    }
    assert kernels == {
        "aten::scaled_dot_product_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
    }


def test_self_attention_with_its_own_head_size_need_not_divide_d_model():
    module = CausalMultiHeadSelfAttention(24, 5, d_head=4)
    assert module.q_proj.weight.shape == (20, 24)
    assert module(torch.randn(3, 24)).shape == (3, 24)


def test_attend_names_the_way_to_attend_to_more_keys():
    module = CausalMultiHeadSelfAttention(24, 4)
    q = torch.randn(1, 4, 1, 6)
    k = torch.randn(1, 4, 9, 6)
    with pytest.raises(
        ValueError,
        match="attend requires as many keys as queries, 1, got 9: for a cache of keys, override",
    ):
        module.attend(q, k, k, None)


BOOL_TENSOR = "mask must be a bool tensor"
BOOL = "mask must be bool"
SHAPE = r"mask must have the shape \(2, 5, 5\) or \(2, 1, 5\)"
BOTH = r"mask must be bool and have the shape \(2, 5, 5\) or \(2, 1, 5\)"
ADDITIVE = "mask == 0"
ONES = "mask.bool()"
PADDING = "mask[..., None, :]"
WRONG_MASKS = {
    "a bool": (True, f"{BOOL_TENSOR}, got True$", ()),
    "text": ("causal", f"{BOOL_TENSOR}, got 'causal'$", ()),
    "a list": ([[True]], f"{BOOL_TENSOR}, got list$", ()),
    "of numpy": (
        numpy.ones((5, 5), bool),
        f"{BOOL_TENSOR}, got numpy.ndarray: pass torch.from_numpy",
        (),
    ),
    "sparse": (
        torch.ones(5, 5, dtype=torch.bool).to_sparse(),
        r"mask must be dense, got torch.sparse_coo: pass mask.to_dense\(\)$",
        (),
    ),
    "another batch": (
        torch.ones(3, 5, 5, dtype=torch.bool),
        rf"{SHAPE}, got \(3, 5, 5\)$",
        (),
    ),
    "an axis for heads": (
        torch.ones(2, 1, 5, 5, dtype=torch.bool),
        rf"{SHAPE}, got \(2, 1, 5, 5\)$",
        (),
    ),
    "a float": (torch.zeros(5, 5), f"{BOOL}, got torch.float32: ", (ADDITIVE, ONES)),
    "integers": (torch.ones(5, 5).long(), f"{BOOL}, got torch.int64: ", (ONES,)),
    "floats of another batch": (
        torch.zeros(3, 5, 5),
        rf"{BOTH}, got torch.float32 and \(3, 5, 5\): ",
        (ADDITIVE, ONES),
    ),
    "padding": (
        torch.ones(2, 5, dtype=torch.bool),
        rf"{SHAPE}, got \(2, 5\): ",
        (PADDING,),
    ),
    "padding of integers": (
        torch.ones(2, 5).long(),
        rf"{BOTH}, got torch.int64 and \(2, 5\): .*; then pass",
        (ONES, PADDING),
    ),
    "padding of floats": (
        torch.zeros(2, 5),
        rf"{BOTH}, got torch.float32 and \(2, 5\): .*; then pass",
        (ADDITIVE, ONES, PADDING),
    ),
}


@pytest.mark.parametrize("name", WRONG_MASKS)
def test_self_attention_says_what_is_wrong_with_a_mask_and_what_to_pass(name):
    mask, expected, hints = WRONG_MASKS[name]
    module = CausalMultiHeadSelfAttention(24, 4)
    with pytest.raises(ValueError, match=f"^{expected}") as caught:
        module(torch.zeros(2, 5, 24), mask=mask)
    for hint in (ADDITIVE, ONES, PADDING):
        assert (hint in str(caught.value)) == (hint in hints)


def test_self_attention_rejects_a_rope_that_changes_the_shape():
    """The result would broadcast: the first sequence would rotate the whole batch."""

    def first_sequence(x, token_positions):
        return x[:1]

    module = CausalMultiHeadSelfAttention(24, 4, rope=first_sequence)
    message = r"rope must .* \(2, 4, 5, 6\), the shape of its input, got \(1, 4, 5, 6\)"
    with pytest.raises(ValueError, match=message):
        module(torch.randn(2, 5, 24))


def test_self_attention_rejects_a_rope_that_changes_the_shape_of_keys_only():
    def shorten_keys(x, token_positions):
        return x[:1] if x.shape[-3] == 2 else x

    module = CausalMultiHeadSelfAttention(24, 4, num_kv_heads=2, rope=shorten_keys)
    message = r"rope must .* \(2, 2, 5, 6\), the shape of its input, got \(1, 2, 5, 6\)"
    with pytest.raises(ValueError, match=message):
        module(torch.randn(2, 5, 24))


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_attend_accepts_values_of_another_width(batch):
    class Twice(CausalMultiHeadSelfAttention):
        def attend(self, q, k, v, mask):
            return super().attend(q, k, torch.cat((v, v), dim=-1), mask)[..., 6:]

    torch.manual_seed(0)
    expected = CausalMultiHeadSelfAttention(24, 4)
    twice = Twice(24, 4)
    twice.load_state_dict(expected.state_dict())
    x = torch.randn(*batch, 5, 24)
    torch.testing.assert_close(twice(x), expected(x))


def test_self_attention_rejects_an_attend_that_returns_heads_after_tokens():
    class Transposed(CausalMultiHeadSelfAttention):
        def attend(self, q, k, v, mask):
            return super().attend(q, k, v, mask).transpose(1, 2)

    message = (
        r"attend must return a tensor of shape \(2, 4, 5, 6\), .* got \(2, 5, 4, 6\)"
    )
    with pytest.raises(ValueError, match=message):
        Transposed(24, 4)(torch.randn(2, 5, 24))


def test_self_attention_requires_an_instance_of_rope():
    with pytest.raises(
        ValueError, match=r"rope must be an instance .* got the class R"
    ):
        CausalMultiHeadSelfAttention(24, 4, rope=cast(Any, RotaryPositionalEmbedding))


def test_self_attention_asks_for_shared_heads_only_where_heads_are_shared():
    """Torch 2.4 has no enable_gqa=, and runs everything else."""
    asked = []

    class Recorder(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is F.scaled_dot_product_attention:
                asked.append("enable_gqa" in kwargs)
            return function(*args, **(kwargs or {}))

    with Recorder():
        for num_kv_heads in (4, 2, 1):
            module = CausalMultiHeadSelfAttention(24, 4, num_kv_heads=num_kv_heads)
            module(torch.randn(2, 5, 24))
    assert asked == [False, True, True]
