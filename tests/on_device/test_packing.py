"""Packed documents on a GPU, where torch's varlen_attn computes them."""

import pytest
import torch
from on_device.comparing import Operations
from packing import Documents, PackedAttention

pytestmark = pytest.mark.cuda


def test_packed_documents_equal_those_with_a_dense_mask(device):
    factory = {"device": device, "dtype": torch.bfloat16}
    attention = PackedAttention(128, 4, num_kv_heads=2, **factory)
    x = torch.randn(2, 100, 128, **factory)
    documents = Documents((torch.arange(100, device=device) // 30).expand(2, -1))
    with Operations() as operations:
        found = attention(x, mask=documents)
    assert any("varlen_attn" in str(each) for each in operations.seen)
    expected = attention(x, mask=documents.mask)

    def with_gradients(result):
        weights = list(attention.parameters())
        return result, *torch.autograd.grad(result.square().sum(), weights)

    # Both round their results, and what these are computed from, to bfloat16.
    allowed = 4 * torch.finfo(torch.bfloat16).eps
    for varlen, dense in zip(
        with_gradients(found), with_gradients(expected), strict=True
    ):
        assert (varlen - dense).norm() < allowed * dense.norm()
