"""Attention beyond its contract: NaN, its kernel, heads of any size, and what its errors suggest."""

import math

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


def test_self_attention_suggests_what_to_pass_in_place_of_an_additive_mask_and_of_more_keys():
    module, q, k = (
        CausalMultiHeadSelfAttention(24, 4),
        torch.randn(1, 4, 1, 6),
        torch.randn(1, 4, 9, 6),
    )
    with pytest.raises(
        ValueError,
        match=r"must be bool .* got torch.float32 of \(5, 5\): .*mask == 0 if additive",
    ):
        module(torch.zeros(2, 5, 24), mask=torch.zeros(5, 5))
    with pytest.raises(
        ValueError, match="as many keys as queries, 1, got 9: override it"
    ):
        module.attend(q, k, k, None)


def test_self_attention_rejects_a_mask_with_an_axis_for_heads():
    module, mask = (
        CausalMultiHeadSelfAttention(24, 4),
        torch.ones(2, 1, 5, 5, dtype=torch.bool),
    )
    with pytest.raises(
        ValueError,
        match=r"of shape \(2, 5, 5\) or \(2, 1, 5\), got torch.bool of \(2, 1, 5, 5\)",
    ):
        module(torch.zeros(2, 5, 24), mask=mask)
