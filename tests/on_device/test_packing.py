"""Packed documents on a GPU, where torch's varlen_attn computes them."""

import pytest
import torch
from packing import Documents, PackedAttention

pytestmark = pytest.mark.cuda


def test_packed_documents_equal_those_with_a_dense_mask(device):
    factory = {"device": device, "dtype": torch.bfloat16}
    attention = PackedAttention(128, 4, num_kv_heads=2, **factory)
    x = torch.randn(2, 100, 128, **factory)
    documents = Documents((torch.arange(100, device=device) // 30).expand(2, -1))
    found = attention(x, mask=documents)
    expected = attention(x, mask=documents.mask)

    def gradient_of(result):
        return torch.autograd.grad(result.square().sum(), attention.q_proj.weight)[0]

    pairs = [(found, expected), (gradient_of(found), gradient_of(expected))]
    for varlen, dense in pairs:
        assert (varlen - dense).norm() < 4 * torch.finfo(
            torch.bfloat16
        ).eps * dense.norm()
