"""Packed documents have the results and gradients of each document alone."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from language_model import CachedAttention
from output_gate import GatedAttention
from packing import Documents, PackedAttention, attend_packed
from sinks import SinkAttention
from windows import WindowAttention

from tinyblock import (
    CausalMultiHeadSelfAttention,
    RotaryPositionalEmbedding,
    Transformer,
)

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


class OnKernel(PackedAttention):
    """The branch of a GPU, on a CPU."""

    runs = 0

    def attend_by_kernel(self, q, k, v, documents):
        self.runs += 1
        return attend_packed(q, k, v, documents, kernel=each_document)

    def kernel_takes(self, q, v):
        return True


# Classes before and after PackedAttention, and options.
COMBINATIONS: dict[str, tuple[tuple[Any, ...], tuple[Any, ...], dict[str, Any]]] = {
    "alone": ((), (), {"num_kv_heads": 2, "qk_norm": True}),
    "caches": ((CachedAttention,), (), {}),
    "gates": ((), (GatedAttention,), {}),
    "windows": ((), (WindowAttention,), {"window": 2}),
    "sinks": ((), (SinkAttention,), {"num_kv_heads": 2}),
    "windows and sinks": ((), (WindowAttention, SinkAttention), {"window": 3}),
    "windows, gates and caches": (
        (CachedAttention,),
        (WindowAttention, GatedAttention),
        {"window": 3},
    ),
}
USES_KERNEL = {"alone", "caches", "gates"}


@pytest.mark.parametrize("name", COMBINATIONS)
def test_a_gpu_and_a_cpu_compute_the_same_function(name):
    """They have a branch each. Both equal the layer without packing, on each document."""
    before, after, options = COMBINATIONS[name]
    factory: dict[str, Any] = {"rope": RotaryPositionalEmbedding(1e4, 8, 16)}
    factory |= {"dtype": torch.float64, **options}
    alone = type("Alone", (*before, *after, CausalMultiHeadSelfAttention), {})(
        32, 4, **factory
    )
    for weight in alone.parameters():  # also of sinks, which start at 0
        weight.data.add_(0.1 * torch.randn_like(weight))
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    rows = []
    for row, lengths in zip(x, LENGTHS, strict=True):
        rows.append(torch.cat([alone(document) for document in row.split(lengths)]))
    documents = Documents(NUMBERS)
    for packed in (PackedAttention, OnKernel):
        layer = type("Packed", (*before, packed, *after), {})(32, 4, **factory)
        layer.load_state_dict(alone.state_dict())
        found = layer(x, documents.positions, documents)
        torch.testing.assert_close(found, torch.stack(rows))
    assert layer.runs == (name in USES_KERNEL)


@pytest.mark.parametrize("packed", [PackedAttention, OnKernel])
def test_documents_have_the_rows_and_the_length_of_x(packed):
    """Otherwise the kernel would leave rows of its result as they are in memory."""
    attention = packed(32, 4)
    for shape in ((2, 9, 32), (1, 8, 32), (1, 10, 32), (9, 32), (1, 1, 9, 32)):
        with pytest.raises(ValueError, match="Documents must have the shape"):
            attention(torch.randn(shape), mask=Documents(NUMBERS[:1]))
    q, k, v = attention.project(torch.randn(1, 9, 32), None)
    k, v = k.repeat(1, 1, 2, 1), v.repeat(1, 1, 2, 1)  # as from a cache
    with pytest.raises(ValueError, match="and 18 keys"):
        attention.attend(q, k, v, Documents(NUMBERS[:1]))


class WrongOrder(WindowAttention, PackedAttention):
    pass


def test_documents_are_no_mask_for_other_layers():
    x = torch.randn(2, 9, 32)
    documents = Documents(NUMBERS)
    with pytest.raises(ValueError, match=r"mask must be bool, .* got Documents"):
        CausalMultiHeadSelfAttention(32, 4)(x, mask=documents)
    with pytest.raises(TypeError, match="'Tensor' and 'Documents'"):
        WrongOrder(32, 4, window=2)(x, mask=documents)
