"""Packed documents have the results and gradients of each document alone."""

import packing
import pytest
import torch
import torch.nn.functional as F
from packing import Documents, PackedAttention

from tinyblock import CausalMultiHeadSelfAttention, Transformer

# Documents of two rows. The second row ends with one more of its first number.
NUMBERS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [5, 4, 4, 4, 4, 4, 4, 4, 5]])
LENGTHS = [[3, 4, 2], [1, 7, 1]]


def build(attention, layers=2, **factory):
    return Transformer(
        layers, 32, 4, max_seq_len=16, num_kv_heads=2, attention=attention, **factory
    )


def alone(model, x):
    """Run each document by itself."""
    rows = [row.split(lengths) for row, lengths in zip(x, LENGTHS, strict=True)]
    return torch.stack([torch.cat([model(part) for part in row]) for row in rows])


def gradients(model, out):
    return torch.autograd.grad(out.square().sum(), list(model.parameters()))


@pytest.mark.parametrize(
    ("attention", "is_dense"),
    [(CausalMultiHeadSelfAttention, True), (PackedAttention, False)],
    ids=["a dense mask", "Documents"],
)
def test_packed_documents_equal_each_alone(attention, is_dense):
    model = build(attention, dtype=torch.float64)
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    documents = Documents(NUMBERS)
    mask = documents.mask if is_dense else documents
    found, expected = model(x, documents.positions, mask), alone(model, x)
    torch.testing.assert_close(found, expected)
    for one, other in zip(
        gradients(model, found), gradients(model, expected), strict=True
    ):
        torch.testing.assert_close(one, other)


def each_document(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, window_size, enable_gqa):
    """What varlen_attn is documented to return, for all earlier tokens."""
    assert window_size == (-1, 0)
    assert cu_seq_q.dtype == torch.int32
    assert torch.equal(cu_seq_q, cu_seq_k)
    assert max_q == max_k == int(cu_seq_q.diff().max())
    assert (q.shape[1] != k.shape[1]) == enable_gqa
    lengths = cu_seq_q.diff().tolist()
    parts = [each.transpose(0, 1).split(lengths, dim=1) for each in (q, k, v)]
    outs = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=enable_gqa)
        for q, k, v in zip(*parts, strict=True)
    ]
    return torch.cat(outs, dim=1).transpose(0, 1)


def test_a_model_with_documents_compiles_to_one_graph():
    model = build(PackedAttention, layers=1)
    x = torch.randn(2, 9, 32)
    documents = Documents(NUMBERS)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    expected = model(x, documents.positions, documents)
    torch.testing.assert_close(compiled(x, documents.positions, documents), expected)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_kernel_gets_what_the_dense_mask_means(kv_heads):
    attention = PackedAttention(32, 4, num_kv_heads=kv_heads)
    documents = Documents(NUMBERS)
    q, k, v = attention.project(torch.randn(2, 9, 32), None)
    found = packing.attend_packed(q, k, v, documents, kernel=each_document)
    torch.testing.assert_close(found, attention.attend(q, k, v, documents.mask))
