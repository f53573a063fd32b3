"""What a part does: the bytes that it moves, keeps and holds.

x has 2 sequences of 5 tokens of width 4: 160 bytes. A token has 16.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

TABLE = torch.ones(1000, 4)  # 16 bytes in a row
ROWS = torch.arange(3)  # three positions of 8 bytes
CACHE = torch.zeros(2, 5, 4)  # as large as x


def cached(x):
    CACHE[:, :1] = x[:, :1]
    return CACHE * 2


# Functions of x, and the bytes that each must read from others and leave to them.
MOVED = {
    # x, and the product. The sum stays inside.
    "what is made between": (lambda x: (x + 1) * 2, 160 + 160),
    # A token of each of two sequences, one of whose numbers is read twice, and the product
    # of two tokens.
    "an expanded number": (
        lambda x: x[:, :1] * x[0, 0, 0].expand(2, 1, 4),
        2 * 16 + 2 * 16,
    ),
    # x, and its copy. What the copy is written to has nothing to be read.
    "what is not written yet": (lambda x: torch.empty_like(x).copy_(x), 160 + 160),
    # A token of both sequences and its copy, the others of the cache, and the product.
    "a cache that is written in part": (cached, 2 * 2 * 16 + 2 * 4 * 16 + 160),
    # A position, a number of the table, and the result.
    "a number of a table": (lambda x: TABLE.take(ROWS[:1]), 8 + 4 + 4),
    # Positions, and for each a row of the table, which is read, a row that
    # is written, because its norm is limited, and a row of the result.
    "rows of a table": (
        lambda x: F.embedding(ROWS, TABLE, max_norm=9.0),
        24 + 3 * 3 * 16,
    ),
}


def test_bytes_that_a_part_moves(profile_of):
    for name, (function, moved) in MOVED.items():
        assert profile_of(function, "forward").whole.moved_bytes == moved, name


def dead_branch(x):
    x.exp().sin()  # its graph dies with it
    return x.sin()


def detached_branch(x):
    return x.sin(), x.exp().detach()  # the graph of exp dies, and its result does not


def in_bytes(x):
    with saved_tensors_hooks(lambda x: x.to(torch.int8), lambda x: x.float()):
        return x.exp().exp().sum()


# Functions of x, and the bytes of forward that stay, besides the result.
KEPT = {
    # The four factors, by which the gradient is multiplied.
    "what forward makes of numbers": (lambda x: x * torch.tensor([1.0, 2, 3, 4]), 16),
    # x, for the gradient of sin.
    "no branch whose graph is gone": (dead_branch, 160),
    "nothing of a result whose graph is gone": (detached_branch, 160),
    # Both results of exp, with one byte for each number in place of four.
    "what hooks of the user keep": (in_bytes, 2 * 160 // 4),
}


def test_bytes_that_autograd_keeps(profile_of):
    for name, (model, kept) in KEPT.items():
        assert profile_of(model).whole.kept_bytes == kept, name


LAYERS = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False))
FLOPS = 2 * 10 * (4 * 8 + 8 * 4)  # of both layers in a pass
PLAIN = partial(checkpoint, use_reentrant=False)
PRODUCTS = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
# Two checkpoints, each around the layers: the bytes that they keep, and how often all
# layers run: once in forward, twice in backward, and to compute again what is not kept.
CHECKPOINTS = {
    "inputs": (PLAIN, 2 * 160, 3 + 1),
    "inputs, reentrant": (partial(checkpoint, use_reentrant=True), 2 * 160, 3 + 1),
    "inputs and results of products": (
        partial(PLAIN, context_fn=PRODUCTS),
        2 * (160 + 320 + 160),
        3,
    ),
}


def layers(x):
    return LAYERS(x.sin()).exp()


def twice(kind, x):
    return kind(layers, kind(layers, x))


# Of torch 2.14: a later one may give what checkpoints store to hooks.
@pytest.mark.filterwarnings("ignore:A saved_tensors_hooks context")
def test_checkpoints_keep_bytes_and_compute_again_what_they_do_not_keep(profile_of):
    for name, (kind, kept, passes) in CHECKPOINTS.items():
        whole = profile_of(partial(twice, kind)).whole
        assert whole.kept_bytes == kept, name
        assert whole.flops == {"float32": passes * 2 * FLOPS}, name


def test_what_is_kept_is_unknown_if_a_gradient_inside_of_forward_hides_it(profile_of):
    measured = profile_of(lambda x: x @ torch.func.grad(torch.sum)(torch.eye(4)))
    assert measured.whole.kept_bytes is None
    assert measured.notes[-1].startswith("Kept bytes are unknown, because torch.func")


def test_wrapper_tensors_consist_of_what_they_wrap(profile_of):
    """As torchao's weights, which consist of numbers and scales."""
    layer = nn.Linear(4, 4, bias=False)
    layer.weight = nn.Parameter(TwoTensor(torch.ones(4, 4), torch.ones(4, 4)))
    measured = profile_of(layer, "forward")
    assert measured.memory.parameter_bytes == 2 * 64
    assert measured.whole.flops == {"float32": 2 * 2 * 10 * 4 * 4}  # a product for each


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_sparse_tensors_have_the_bytes_of_their_values_and_positions(profile_of):
    embed = nn.Embedding(100, 4, sparse=True)
    memory = profile_of(embed, inputs=(torch.arange(5),)).memory
    assert memory.gradient_bytes == 5 * 16 + 5 * 8  # of rows
    eye = torch.sparse_csr_tensor(
        torch.arange(6), torch.arange(5), torch.ones(5), check_invariants=True
    )
    memory = profile_of(lambda x: eye @ x[0], "forward").memory
    assert memory.other_tensor_bytes == 5 * 4 + 5 * 8 + 6 * 8  # with 6 ends of rows
