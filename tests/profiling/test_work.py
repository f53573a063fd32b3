"""What a part does: the bytes that it moves, keeps and holds.

x has 2 sequences of 5 tokens of width 4: 160 bytes. A token has 16.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

TABLE = torch.ones(1000, 4)
CACHE = torch.zeros(2, 5, 4)
IMAGE = torch.zeros(1, 1, 100, 100)
PLACES = torch.zeros(1, 2, 3, 2)
BOUNDARIES = torch.arange(1000.0)
ROWS = torch.arange(3)  # positions of 8 bytes
BAGS = torch.tensor([0, 2])


def overwrite(x):
    CACHE.zero_()
    CACHE.fill_(1.0)
    return CACHE.copy_(x)


# What a part reads from others and leaves to them, and what its operations read and write.
MOVED = {
    "what is made between": (lambda x: (x + 1) * 2, 320, 640),
    "a product of two halves of x": (lambda x: x[..., :2] * x[..., 2:], 160 + 80, 240),
    "an expanded number": (lambda x: x[:, :1] * x[0, 0, 0].expand(2, 1, 4), 68, 68),
    # 2 x 3 windows of 3 tokens overlap, and are written apart.
    "windows": (lambda x: x.unfold(1, 3, 1) * 2, 160 + 18 * 16, 160 + 18 * 16),
    "what is not written yet": (lambda x: torch.empty_like(x).copy_(x), 320, 320),
    # zero_ and fill_ write, copy_ reads and writes.
    "what is overwritten": (overwrite, 320, 160 + 160 + 320),
}


def test_bytes_that_a_part_moves(profile_of):
    for name, (function, moved, traffic) in MOVED.items():
        whole = profile_of(function, "forward").whole
        assert whole.moved_bytes == moved, name
        assert whole.traffic_s == pytest.approx(traffic / 4000), name


# Of a large table: the positions, and what is read, and written.
SOME = {
    "take": (lambda x: TABLE.take(ROWS), 24 + 2 * 12),
    "put_": (lambda x: CACHE.put_(ROWS, x[0, 0, :3]), 24 + 3 * 12),
    # It also writes the rows whose norm it limits.
    "embedding": (lambda x: F.embedding(ROWS, TABLE, max_norm=9.0), 24 + 3 * 48),
    "index_fill_": (lambda x: CACHE.index_fill_(1, ROWS, 0.0), 24 + 96),
    # A binary search in 1000 numbers meets 10.
    "searchsorted": (
        lambda x: torch.searchsorted(BOUNDARIES, x[0, 0, :3]),
        3 * (4 + 40 + 8),
    ),
    # Each number of the result takes 4 numbers or, with a place of two numbers, 16.
    "bilinear": (lambda x: F.interpolate(IMAGE, (2, 3), mode="bilinear"), 5 * 24),
    "grid_sample": (
        lambda x: F.grid_sample(IMAGE, PLACES, mode="bicubic", align_corners=False),
        (2 + 16 + 1) * 24,
    ),
}


def test_bytes_that_are_read_and_written_of_a_large_tensor(profile_of):
    for name, (function, moved) in SOME.items():
        assert profile_of(function, "forward").whole.moved_bytes == moved, name
    # Positions and starts of two bags, rows, results, and up to four numbers for a position.
    bags = profile_of(lambda x: F.embedding_bag(ROWS, TABLE, BAGS), "forward").whole
    assert 0 <= bags.moved_bytes - (24 + 16 + 48 + 32) <= 4 * 24


def dead_branch(x):
    x.exp().sin()  # its graph dies with it
    return x.sin()


def detached_branch(x):
    return x.sin(), x.exp().detach()  # the graph of exp dies, and its result does not


class Squares(torch.autograd.Function):
    """Keeps a tensor in an attribute."""

    @staticmethod
    def forward(context, x):
        context.doubled = 2 * x
        return x * x

    @staticmethod
    def backward(context, gradient):
        return gradient * context.doubled


def in_bytes(x):
    with saved_tensors_hooks(lambda x: x.to(torch.int8), lambda x: x.float()):
        return x.exp().exp().sum()


def on_cpu(x):
    with save_on_cpu():
        return x.exp().sum()


KEPT = {
    "what forward makes of numbers": (lambda x: x * torch.tensor([1.0, 2, 3, 4]), 16),
    "no branch whose graph is gone": (dead_branch, 160),
    "nothing of a result whose graph is gone": (detached_branch, 160),
    "what a function keeps in an attribute": (Squares.apply, 160),
    "what hooks of the user keep, of two results": (in_bytes, 2 * 160 // 4),
    "a copy on a CPU": (on_cpu, 160),
}


def test_bytes_that_autograd_keeps(profile_of):
    for name, (model, kept) in KEPT.items():
        assert profile_of(model).whole.kept_bytes == kept, name


LAYERS = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False))
FLOPS = 2 * 10 * (4 * 8 + 8 * 4)  # of both layers in a pass
PLAIN = partial(checkpoint, use_reentrant=False)
PRODUCTS = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
# The bytes that two checkpoints of the layers keep, and how often these run in a pass.
CHECKPOINTS = {
    "inputs": (PLAIN, 2 * 160, 4),
    "inputs, reentrant": (partial(checkpoint, use_reentrant=True), 2 * 160, 4),
    "results of products": (
        partial(PLAIN, context_fn=PRODUCTS),
        2 * (160 + 320 + 160),
        3,
    ),
}


def body(x):
    return LAYERS(x.sin()).exp()


def twice(kind, x):
    return kind(body, kind(body, x))


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


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_memory_of_tensors_that_have_no_storage_of_their_own(profile_of):
    layer = nn.Linear(4, 4, bias=False)
    # As torchao's weights of numbers and scales, it consists of two.
    layer.weight = nn.Parameter(TwoTensor(torch.ones(4, 4), torch.ones(4, 4)))
    wrapped = profile_of(layer, "forward")
    assert wrapped.memory.parameter_bytes == 2 * 64
    assert wrapped.whole.flops == {"float32": 2 * 2 * 10 * 4 * 4}  # inside of both
    # The gradient of 5 rows, and their positions.
    embed = nn.Embedding(100, 4, sparse=True)
    memory = profile_of(embed, inputs=(torch.arange(5),)).memory
    assert memory.gradient_bytes == 5 * 16 + 5 * 8
    # 5 values and columns, and 6 ends of rows.
    matrix = torch.sparse_csr_tensor(
        torch.arange(6), torch.arange(5), torch.ones(5), check_invariants=True
    )
    memory = profile_of(lambda x: matrix @ x[0], "forward").memory
    assert memory.other_tensor_bytes == 5 * 4 + 5 * 8 + 6 * 8
