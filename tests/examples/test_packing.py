"""Packed documents have the results and gradients of each document alone."""

import packing
import torch
import torch.nn.functional as F
from packing import Documents, PackedAttention

from tinyblock import Transformer

# Documents of two rows. The first and the last one of the second row have one number.
NUMBERS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [5, 4, 4, 4, 4, 4, 4, 4, 5]])
LENGTHS = [[3, 4, 2], [1, 7, 1]]


def test_packed_documents_equal_each_alone():
    """With Documents as mask, with their dense mask, and compiled to one graph."""
    model = Transformer(
        1, 32, 4, max_seq_len=16, num_kv_heads=2, attention=PackedAttention
    ).double()
    weights = list(model.parameters())
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    rows = []
    for row, lengths in zip(x, LENGTHS, strict=True):
        rows.append(torch.cat([model(document) for document in row.split(lengths)]))
    expected = torch.stack(rows)
    gradients = torch.autograd.grad(expected.square().sum(), weights)
    documents = Documents(NUMBERS)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for run, mask in (
        (model, documents),
        (model, documents.mask),
        (compiled, documents),
    ):
        found = run(x, documents.positions, mask)
        torch.testing.assert_close(found, expected)
        found_gradients = torch.autograd.grad(found.square().sum(), weights)
        torch.testing.assert_close(found_gradients, gradients)


def each_document(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, window_size, enable_gqa):
    """What varlen_attn is documented to return, for all earlier tokens."""
    assert window_size == (-1, 0)
    assert enable_gqa == (q.shape[1] != k.shape[1])
    assert cu_seq_q.dtype == torch.int32
    assert torch.equal(cu_seq_q, cu_seq_k)
    lengths = cu_seq_q.diff().tolist()
    assert max_q == max_k == max(lengths)
    outs = []
    for rows in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        q, k, v = (each.transpose(0, 1) for each in rows)
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=enable_gqa
        )
        outs.append(out.transpose(0, 1))
    return torch.cat(outs)


def test_the_kernel_gets_what_the_dense_mask_means():
    documents = Documents(NUMBERS)
    for kv_heads in (4, 2):
        attention = PackedAttention(32, 4, num_kv_heads=kv_heads)
        q, k, v = attention.project(torch.randn(2, 9, 32), None)
        found = packing.attend_packed(q, k, v, documents, kernel=each_document)
        torch.testing.assert_close(found, attention.attend(q, k, v, documents.mask))
