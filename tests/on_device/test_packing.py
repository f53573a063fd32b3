"""Packed documents on a GPU, where torch's varlen_attn computes them."""

from typing import Any

import pytest
import torch
from latent_attention import LatentAttention
from on_device.comparing import Operations
from packing import Documents, PackedAttention
from windows import WindowAttention

from tinyblock import RotaryPositionalEmbedding

pytestmark = pytest.mark.cuda


class PackedWindow(PackedAttention, WindowAttention):
    pass


class PackedLatent(LatentAttention, PackedAttention):
    pass


# A layer, and whether the kernel can compute it.
LAYERS: dict[str, tuple[Any, dict[str, Any], bool]] = {
    "shared key heads": (PackedAttention, {"num_kv_heads": 2}, True),
    "windows": (PackedWindow, {"window": 7}, False),
    "values of another size": (PackedLatent, {"q_rank": 40, "kv_rank": 24}, False),
    "a size of heads that the kernel has not": (PackedAttention, {"d_head": 20}, False),
}


@pytest.mark.parametrize("name", LAYERS)
def test_packed_documents_equal_those_with_a_dense_mask(name, device):
    make, options, uses_kernel = LAYERS[name]
    factory = {"device": device, "dtype": torch.bfloat16}
    d_head = options.setdefault("d_head", 32)
    rope = RotaryPositionalEmbedding(1e4, d_head, 100, device=device)
    attention = make(128, 4, rope=rope, **options, **factory)
    x = torch.randn(2, 100, 128, **factory)
    documents = Documents((torch.arange(100, device=device) // 30).expand(2, -1))
    with Operations() as operations:
        found = attention(x, documents.positions, documents)
    assert uses_kernel == any("varlen_attn" in str(each) for each in operations.seen)
    expected = attention(x, documents.positions, documents.mask)

    def with_gradients(result):
        weights = list(attention.parameters())
        return result, *torch.autograd.grad(result.square().sum(), weights)

    # Both round their results, and what these are computed from, to bfloat16.
    allowed = 4 * torch.finfo(torch.bfloat16).eps
    for varlen, dense in zip(
        with_gradients(found), with_gradients(expected), strict=True
    ):
        assert (varlen - dense).norm() < allowed * dense.norm()
