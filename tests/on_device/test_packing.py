"""Packed documents on a GPU, where torch's varlen_attn computes them."""

import torch
from on_device.comparing import only_on_cuda
from packing import Documents, PackedAttention


@only_on_cuda
def test_packed_documents_equal_those_with_a_dense_mask(device):
    sizes = {"device": device, "dtype": torch.bfloat16}
    attention = PackedAttention(128, 4, num_kv_heads=2, **sizes)
    x = torch.randn(2, 100, 128, **sizes)
    documents = Documents((torch.arange(100, device=device) // 30).expand(2, -1))
    found = attention(x, mask=documents)
    expected = attention(x, mask=documents.mask)
    assert (found - expected).norm() < 0.02 * expected.norm()
    (gradient,) = torch.autograd.grad(found.square().sum(), attention.q_proj.weight)
    assert gradient.isfinite().all()
