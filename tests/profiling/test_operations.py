"""The table of operations: each number of each argument is changed, to see whether it matters.

So an entry that says of an argument that it is not read, or read in part, is compared with
what the operation does.
"""

import pytest
import torch
import torch.nn.functional as F
from profiling.operations import OPERATIONS, facts_of, tensors_in
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

# What the table has for other devices, or in a fused form that only a model calls.
ELSEWHERE = {
    *["_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention"],
    *["_scaled_dot_product_efficient_attention", "_cudnn_rnn", "_cudnn_rnn_backward"],
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_cudnn_attention_backward",
    "_scaled_dot_product_efficient_attention_backward",
    "_transformer_encoder_layer_fwd",
    "_native_multi_head_attention",
}


def numbers(*shape):
    """Return numbers that are all different, which autograd follows."""
    generator = torch.Generator().manual_seed(0)
    return torch.rand(shape, generator=generator).requires_grad_()


def back(result):
    result.backward(torch.linspace(1, 2, result.numel()).view_as(result))


V, M, B = numbers(3), numbers(3, 3), numbers(2, 3, 3)
HEADS = numbers(1, 1, 3, 4)
LINE, IMAGE = numbers(1, 1, 6), numbers(1, 1, 5, 5)
SCORES, TABLE = numbers(4, 3), numbers(12, 3)
TARGETS, PLACES = torch.tensor([0, 2, 1, 1]), torch.tensor([4, 0])


def multiply():
    torch.mm(M, M)
    torch.bmm(B, B)
    torch.mv(M, V)
    torch.dot(V, V)
    torch.vdot(V, V)
    torch._addmm_activation(V, M, M)
    for beta in (0, 1):
        torch.addmm(M, M, M, beta=beta)
        torch.addmv(V, M, V, beta=beta)
        torch.baddbmm(B, B, B, beta=beta)
        torch.addbmm(M, B, B, beta=beta)
    F.grouped_mm(numbers(2, 4, 8), numbers(2, 8, 8))
    first, frozen = nn.Conv1d(2, 2, 3), nn.Conv1d(2, 2, 3).requires_grad_(False)
    back(first(numbers(1, 2, 4)))
    back(first(numbers(1, 2, 4).detach()))
    back(frozen(numbers(1, 2, 4)))
    back(F.scaled_dot_product_attention(HEADS, HEADS, HEADS))
    back(nn.LSTM(2, 2)(numbers(2, 1, 2))[0])


def choose():
    back(F.embedding(PLACES, TABLE))
    F.embedding(PLACES, table(), max_norm=0.1)
    TABLE.gather(0, PLACES[:, None])
    TABLE.index_select(0, PLACES)
    TABLE.take(PLACES)
    torch.ops.aten.index(TABLE, [PLACES])
    torch.ops.aten._unsafe_index(TABLE, [PLACES])
    back(F.embedding_bag(PLACES[None], TABLE, mode="sum"))
    weights = numbers(1, 2)
    bag = F.embedding_bag(PLACES[None], TABLE, mode="sum", per_sample_weights=weights)
    back(bag)
    F.embedding_bag(PLACES[None], table(), mode="sum")


def change_in_part():
    rows, numbers = SCORES[:2].detach(), SCORES.detach()
    table().index_add_(0, PLACES, rows)
    table().index_copy_(0, PLACES, rows)
    table().index_reduce_(0, PLACES, rows, "prod")
    table().put_(PLACES, rows[0, :2])
    table().index_put_((PLACES,), rows)
    table().index_put_((PLACES,), rows, accumulate=True)
    torch.ops.aten.index_put_(table(), [None, PLACES % 3], torch.tensor(2.0))
    torch._index_put_impl_(table(), (PLACES,), rows)
    table().scatter_(0, PLACES[:, None], numbers)
    table().scatter_add_(0, PLACES[:, None], numbers)
    table().scatter_reduce_(0, PLACES[:, None], numbers, "prod")


def take_shapes():
    torch.fill(M, 2.0)
    back(F.nll_loss(SCORES.log_softmax(-1), TARGETS))
    back(F.nll_loss(numbers(2, 3, 2), torch.ones(2, 2, dtype=torch.int64)))
    back(F.layer_norm(SCORES, (3,), V, V))
    back(F.avg_pool2d(IMAGE, 2))
    back(F.adaptive_avg_pool2d(IMAGE, 2))
    back(F.max_pool2d(IMAGE, 2))
    back(F.adaptive_max_pool2d(IMAGE, 2))
    back(F.fractional_max_pool2d(IMAGE, 2, output_size=2))
    back(F.pad(LINE, [1, 1], mode="reflect"))
    back(F.pad(IMAGE, [1] * 4, mode="replicate"))


def overwrite():
    table().copy_(TABLE.detach())
    table().fill_(2.0)
    table().zero_()
    table().masked_fill_(table() > 0.5, 2.0)
    table().bernoulli_()
    table().exponential_()
    table().normal_()
    table().random_()
    table().uniform_()


def table():
    return TABLE.detach().clone()


class Changes(TorchDispatchMode):
    """Calls each operation of which the table says something again, with one number changed.

    found: what the table says otherwise.
    """

    def __init__(self):
        super().__init__()
        self.called = set()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        names = [each.name for each in function._schema.arguments]
        given = dict(zip(names, args, strict=False)) | (kwargs or {})
        name = str(function._overloadpacket).removeprefix("aten.")
        facts = facts_of(f"aten.{name}")
        if name not in OPERATIONS and not facts.touches:
            return function(**given)
        before = copied(given)
        first = run(function, copied(given))
        made, _ = first
        self.called.add(name)
        changed = {each.name for each in function._schema.arguments if each.is_write}
        for argument, value in before.items():
            if not isinstance(value, torch.Tensor) or not value.is_floating_point():
                continue
            said = facts.touches.get(argument)
            size = value.numel()
            most = said(before, made[0] if made else value) if said else size
            # One by one, if the table has a count; otherwise all at once.
            groups = torch.eye(size) if said and most else torch.ones(1, size)
            reads = writes = 0
            for group in groups.bool():
                is_read, is_written = change(function, before, argument, group, first)
                reads += int(group.sum()) * is_read
                writes += int(group.sum()) * is_written
            may_read = most > 0 and not (facts.overwrites and argument in changed)
            if max(reads, writes) > most or (reads and not may_read):
                self.found.append((name, argument, reads, writes, most))
            if 4 * max(reads, writes) < min(most, size):
                self.found.append((name, argument, "is not touched", reads, most))
        return function(**given)


def copied(value):
    def copy(x):
        return x.detach().clone(memory_format=torch.contiguous_format)

    return tree_map_only(torch.Tensor, copy, value)


def run(function, given):
    """Call an operation; return what it made, and its arguments afterward."""
    torch.default_generator.manual_seed(0)  # faster, as in tests/conftest.py
    result = function(**given)
    arguments = tensors_in(given)
    made = [x for x in tensors_in(result) if not any(x is y for y in arguments)]
    return made, copied(given)


def change(function, before, argument, group, first):
    """Change some numbers of an argument; say whether these are read, and written.

    first: what an earlier call made, and its arguments afterward.
    """
    given = copied(before)
    given[argument].view(-1)[group] += 0.25
    changed = given[argument].view(-1).clone()
    again = run(function, given)
    was, now = (after[argument].view(-1) for _, after in (first, again))
    is_written = bool((now != changed)[group].any())
    # What is neither left alone nor overwritten depends on its old value.
    is_mixed = bool(((now != changed) & (now != was))[group].any())
    is_used = others(first, argument, ~group) != others(again, argument, ~group)
    return is_mixed or is_used, is_written


def others(call, argument, places):
    """Return all numbers that a call made and left, besides some of an argument."""
    made, after = call
    rest = [value for name, value in after.items() if name != argument]
    tensors = tensors_in([made, rest, after[argument].view(-1)[places]])
    return [each.tolist() for each in tensors]


@pytest.mark.filterwarnings(r"ignore:index_reduce\(\) is in beta")
def test_arguments_are_touched_as_the_table_says():
    with Changes() as changes:
        multiply()
        choose()
        change_in_part()
        take_shapes()
        overwrite()
    assert changes.found == []
    assert not set(OPERATIONS) - ELSEWHERE - changes.called
