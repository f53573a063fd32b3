"""What a part does: the bytes that it moves and keeps, its operations and its parameters.

All inputs are 2 sequences of 5 tokens of width 4: 160 bytes. A token has 16.
"""

import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

SHAPE = (2, 5, 4)
TABLE = torch.ones(1000, 4)
CACHE = torch.zeros(SHAPE)
THREE = torch.arange(3)


class Calls(nn.Module):
    """Calls a function of x. Its tables are neither parameters nor buffers."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.tables = {"small": [torch.ones(10, 4)]}

    def forward(self, x):
        return self.function(x)


def overwrite(x):
    CACHE.zero_()
    CACHE.fill_(1.0)
    return CACHE.copy_(x)


# What a part reads from others and leaves to them, and what its operations read and write.
MOVED = {
    "x and the result": (lambda x: x.sin(), 320, 320),
    "a product of two halves of x": (lambda x: x[..., :2] * x[..., 2:], 160 + 80, 240),
    "a slice and an expanded number": (
        lambda x: x[:, :1] * x[0, 0, 0].expand(2, 1, 4),
        32 + 4 + 32,
        32 + 4 + 32,
    ),
    # 2 x 3 windows of 3 tokens overlap, and are written apart.
    "overlapping windows": (
        lambda x: x.unfold(1, 3, 1) * 2,
        160 + 2 * 3 * 3 * 16,
        160 + 2 * 3 * 3 * 16,
    ),
    "views": (lambda x: x.view(10, 4).T, 0, 0),
    "a change in place": (lambda x: (x * 1).relu_(), 320, 640),
    "what is made between": (lambda x: (x + 1) * 2, 320, 640),
    "what is not written yet": (lambda x: torch.empty_like(x).copy_(x), 320, 320),
    "what needs a shape alone": (torch.ones_like, 160, 160),
    "what is drawn": (lambda x: CACHE.uniform_(), 160, 160),
    # zero_ and fill_ write, copy_ reads and writes.
    "what is overwritten": (overwrite, 320, 160 + 160 + 320),
}


def bags(x):
    return F.embedding_bag(torch.arange(6), TABLE, torch.tensor([0, 3]), mode="sum")


def put(x):
    return CACHE.put_(THREE, x[0, 0, :3])


def scatter(x):
    return CACHE.scatter_reduce_(-1, torch.zeros(1, 2, 1).long(), x[:1, :2, :1], "amax")


def reduce_rows(x):
    return CACHE.index_reduce_(1, THREE, x[:, :3], "amax")


IMAGE = torch.zeros(1, 1, 100, 100)
PLACES = torch.zeros(1, 2, 3, 2)
BOUNDARIES = torch.arange(1000.0)
# What an operation moves that needs a few numbers of a table. Positions have 8 bytes.
TABLES = {
    "embedding": (lambda x: F.embedding(THREE, TABLE), 3 * 8 + 2 * 3 * 16),
    "index": (lambda x: TABLE[THREE], 3 * 8 + 2 * 3 * 16),
    "take": (lambda x: TABLE.take(THREE), 3 * 8 + 2 * 3 * 4),
    # It reads and writes the rows whose norm it limits.
    "embedding_renorm_": (
        lambda x: F.embedding(THREE, TABLE, max_norm=9.0),
        3 * 8 + 2 * 3 * 16,
    ),
    "index_fill_": (lambda x: CACHE.index_fill_(1, THREE, 0.0), 3 * 8 + 2 * 3 * 16),
    # A binary search in 1000 numbers meets 10.
    "searchsorted": (
        lambda x: torch.searchsorted(BOUNDARIES, x[0, 0, :3]),
        3 * (4 + 10 * 4 + 8),
    ),
    # Source, position, what is in the table, and what is written there.
    "put_": (put, 3 * 8 + 3 * 3 * 4),
    "scatter_reduce_": (scatter, 2 * 8 + 3 * 2 * 4),
    "index_reduce_": (reduce_rows, 3 * 8 + 3 * 2 * 3 * 16),
    # Each number of the result takes one number, or four.
    "upsample_nearest2d": (lambda x: F.interpolate(IMAGE, (2, 3)), 2 * 6 * 4),
    "upsample_bilinear2d": (
        lambda x: F.interpolate(IMAGE, (2, 3), mode="bilinear"),
        (4 + 1) * 6 * 4,
    ),
    # A place has two numbers.
    "grid_sampler_2d": (
        lambda x: F.grid_sample(IMAGE, PLACES, mode="bicubic", align_corners=False),
        (2 + 16 + 1) * 6 * 4,
    ),
}


@pytest.mark.filterwarnings("ignore:index_reduce.. is in beta")
def test_a_few_rows_of_a_table_are_read_without_the_others(profile_of):
    for name, (function, moved) in TABLES.items():
        whole = profile_of(Calls(function), SHAPE, "forward").whole
        assert whole.operation(name).moved_bytes == moved, name
    # 6 positions, 2 starts, 6 rows, 2 results, and at most four numbers for each position.
    whole = profile_of(Calls(bags), SHAPE, "forward").whole
    [found] = [each for each in whole.operations if "bag" in each.name]
    assert 0 <= found.moved_bytes - (6 * 8 + 2 * 8 + 6 * 16 + 2 * 16) <= 4 * 6 * 8


def test_bytes_that_a_part_moves(profile_of):
    for name, (function, moved, traffic) in MOVED.items():
        whole = profile_of(Calls(function), SHAPE, "forward").whole
        assert whole.moved_bytes == moved, name
        assert whole.traffic_s == pytest.approx(traffic / 4000), name


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 8, bias=False)
        self.down = nn.Linear(8, 4, bias=False)

    def forward(self, x):
        return self.down(self.up(x))


class Checkpoints(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.layers = nn.ModuleList([Linear(), Linear()])
        self.reentrant = reentrant

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def dead_branch(x):
    x.exp().sin()  # its graph dies with it
    return x.sin()


def detached_branch(x):
    return x.sin(), x.exp().detach()  # the graph of exp dies, and its result does not


def gradient_inside(x):
    [gradient] = torch.autograd.grad(x.exp().sum(), x)
    return x + gradient


class Squares(torch.autograd.Function):
    """Keeps a tensor in an attribute."""

    @staticmethod
    def forward(context, x):
        context.doubled = 2 * x
        return x * x

    @staticmethod
    def backward(context, gradient):
        return gradient * context.doubled


def as_bytes(x):
    """Keep what autograd keeps in a quarter of its bytes."""
    with saved_tensors_hooks(lambda x: x.to(torch.int8), lambda x: x.float()):
        return x.exp().exp().sum()


def offloaded(x):
    with torch.autograd.graph.save_on_cpu():
        return x.exp().sum()


class Selective(nn.Module):
    """Stores the result of its products, and computes the rest again."""

    def __init__(self):
        super().__init__()
        self.layer = Linear()

    def forward(self, x):
        contexts = partial(
            create_selective_checkpoint_contexts, [torch.ops.aten.mm.default]
        )
        return checkpoint(
            lambda x: self.layer(x.sin()).exp(),
            x,
            use_reentrant=False,
            context_fn=contexts,
        )


NUMBERS = [1.0, 2.0, 3.0, 4.0]
# What autograd keeps for backward.
KEPT = {
    "nothing of a sum": (lambda x: x + x, 0),
    "the input of a function": (lambda x: x.sin(), 160),
    "the result of another": (lambda x: x.exp(), 160),
    "one tensor twice": (lambda x: x.exp().sin(), 160),
    "no table": (lambda x: x * TABLE[:5], 0),
    "what forward makes of numbers": (lambda x: x * torch.tensor(NUMBERS), 16),
    "both inputs of products": (Linear(), 160 + 320),
    "no branch whose graph is gone": (dead_branch, 160),
    "nothing of a result whose graph is gone": (detached_branch, 160),
    "nothing for a gradient that is taken": (gradient_inside, 0),
    "what a function keeps in an attribute": (Squares.apply, 160),
    # Both results, as int8.
    "what hooks of the user keep": (as_bytes, 2 * 160 // 4),
    # On a CPU, a copy.
    "what is offloaded": (offloaded, 160),
    # The input of the checkpoint, and the result of two products.
    "what selective checkpointing stores": (Selective(), 160 + 320 + 160),
    "the inputs of checkpoints": (Checkpoints(False), 2 * 160),
    "the inputs of reentrant checkpoints": (Checkpoints(True), 2 * 160),
}


def test_bytes_that_autograd_keeps(profile_of):
    for name, (function, kept) in KEPT.items():
        model = function if isinstance(function, nn.Module) else Calls(function)
        assert profile_of(model, SHAPE).whole.kept_bytes == kept, name


def test_what_is_kept_is_unknown_if_a_gradient_inside_of_forward_hides_it(profile_of):
    def learn(x):
        return x @ torch.func.grad(lambda weight: weight.sum())(torch.eye(4))

    measured = profile_of(Calls(learn), SHAPE)
    assert measured.whole.kept_bytes is None
    assert measured.notes[-1].startswith("Kept bytes are unknown, because torch.func")


def test_noting_a_run_keeps_no_result_alive(profile_of):
    results = []

    def unused(x):
        y = x.exp()  # autograd keeps it, and no backward releases it
        results.append(weakref.ref(y))
        return 2 * x

    gc.disable()  # it would release what only a cycle keeps
    try:
        profile_of(Calls(unused), SHAPE)
    finally:
        gc.enable()
    assert [result() for result in results] == [None] * len(results)


class Wrapped(nn.Linear):
    """Its weight consists of two tensors, as torchao's of numbers and scales."""

    def __init__(self):
        super().__init__(4, 4, bias=False)
        self.weight = nn.Parameter(TwoTensor(torch.ones(4, 4), torch.ones(4, 4)))


class Embeds(nn.Module):
    """Has a sparse gradient."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(100, 4, sparse=True)

    def forward(self, x):
        return x + self.embed(torch.arange(5))


class Multiplies(nn.Module):
    """Multiplies by a sparse matrix that is neither a parameter nor a buffer."""

    def __init__(self):
        super().__init__()
        self.matrix = torch.sparse_csr_tensor(
            torch.arange(7), torch.arange(6), torch.ones(6), check_invariants=True
        )

    def forward(self, x):
        return self.matrix @ torch.ones(6, 4)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_memory_of_tensors_that_have_no_storage_of_their_own(profile_of):
    wrapped = profile_of(Wrapped(), SHAPE, "forward")
    assert wrapped.memory.parameter_bytes == 2 * 16 * 4
    assert wrapped.whole.flops == {"float32": 2 * 2 * 10 * 4 * 4}  # inside of both
    # 5 rows of 4 numbers, and their indices.
    assert profile_of(Embeds(), SHAPE).memory.gradient_bytes == 5 * 4 * 4 + 5 * 8
    # 6 values and columns, and 7 ends of rows.
    memory = profile_of(Multiplies(), SHAPE, "forward").memory
    assert memory.other_tensor_bytes == 6 * 4 + 6 * 8 + 7 * 8
    assert memory.buffer_bytes == 0


def test_tables_in_attributes_and_globals_are_other_tensors(profile_of):
    model: Any = Calls(lambda x: x * TABLE[:5] + model.tables["small"][0][:5])
    memory = profile_of(model, SHAPE, "forward").memory
    assert memory.other_tensor_bytes == 1000 * 16 + 10 * 16
    # At the peak there are x, the product, and the sum, too.
    assert memory.peak_bytes == 1000 * 16 + 10 * 16 + 3 * 160


def test_operations_have_calls_times_and_passes(profile_of, clock):
    clock.takes = {"sin": 2.0, "cos": 3.0, "mul": 1.0}

    def function(x):
        return x.sin().sin()

    # A call on one number takes a second, so products take no time beyond it.
    found = profile_of(Calls(function), SHAPE).whole.operations
    assert [
        (each.name, each.calls, each.total_s, each.backward_calls) for each in found
    ] == [("cos", 2, 4.0, 2), ("sin", 2, 2.0, 0), ("mul", 2, 0.0, 2)]


def spare():
    model: Any = Linear()
    model.spare = nn.Linear(4, 4)
    return model


def tied():
    model: Any = Linear()
    model.again = model.down
    return model


def direct():
    """Return a model that calls the forward of a child, which is no call of a module."""
    model: Any = Linear()
    model.forward = lambda x: model.down(model.up.forward(x))
    return model


def listed():
    model: Any = Linear()
    model.more = nn.ParameterList(
        [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))]
    )
    model.forward = lambda x: x * model.more[0] + model.more[1]
    return model


def keyed():
    model: Any = Linear()
    model.more = nn.ParameterDict({"scale": nn.Parameter(torch.ones(4))})
    model.forward = lambda x: model.down(model.up(x * model.more["scale"]))
    return model


def exported():
    return torch.export.export(Linear(), (torch.ones(SHAPE),)).module()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attend = nn.MultiheadAttention(4, 2)

    def forward(self, x):
        return self.attend(x, x, x)[0]


# Models, and how many of their weights are those of no part.
OTHERS = {
    "a weight that two modules share": (tied(), 0),
    "a module that is not called": (spare(), 4 * 4 + 4),
    "a child whose forward is called": (direct(), 8 * 4),
    "a list of weights, and two modules": (listed(), 2 * 4 + 2 * 32),
    "a dict of weights": (keyed(), 4),
    "weights that a function uses": (exported(), 2 * 32),
    "the projection that attention calls itself": (Attention(), 4 * 4 + 4),
    "a weight with a parametrization": (
        nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))),
        4 * 4 + 4,
    ),
}


def test_weights_of_rows_add_up_to_the_total(profile_of):
    for name, (model, others) in OTHERS.items():
        measured = profile_of(model, SHAPE)
        rows = {row.name: row for row in measured.rows}
        weights = sum(each.numel() for each in model.parameters())
        assert measured.whole.parameters == weights, name
        assert sum(row.parameters for row in measured.rows) == weights, name
        found = rows["weights of no part"].parameters if others else 0
        assert found == others, name
        assert ("weights of no part" in rows) == bool(others), name
