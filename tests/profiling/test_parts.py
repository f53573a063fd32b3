"""Parts run as in the model, and their work is what formulas say."""

from functools import partial
from typing import Any

import pytest
import torch
from lab.sizes import Size
from profiling.block import record_block
from profiling.modules import record_modules
from profiling.parts import Call, Part, cut
from profiling.work import count_flops, kept_bytes, work_of_adamw, works_of
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

CPU = torch.device("cpu")
SIZES = {
    "block": Size(2, 5, 32, 2, d_ff=24),
    "shared heads and q/k norm": Size(1, 6, 32, 4, 2, d_head=16, d_ff=8, qk_norm=True),
    "stack": Size(1, 5, 32, 2, d_ff=24, num_layers=1),
}


def own(size, dtype=torch.float64):
    return size.build(CPU, dtype), (size.batch_size, size.seq_len, size.d_model)


def encoder():
    layer = nn.TransformerEncoderLayer(
        16, 2, 24, dropout=0.0, batch_first=True, dtype=torch.float64
    )
    return layer, (2, 5, 16)


def parts_of(record, model, shape):
    dtype = next(model.parameters()).dtype
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    calls, out = record(model, x)
    gradient = torch.randn_like(out)
    parts = cut(calls, out, gradient)
    whole = Part("the whole", (Call(model, (x,), (out,), (model,)),), (gradient,))
    return whole, parts, out


CASES: dict[str, Any] = {
    name: (partial(own, size), record_block) for name, size in SIZES.items()
}
CASES["modules of an encoder"] = encoder, record_modules


@pytest.mark.parametrize("case", CASES)
def test_parts_compute_what_the_model_computes(case):
    build, record = CASES[case]
    model, shape = build()
    whole, parts, out = parts_of(record, model, shape)
    torch.testing.assert_close(out, whole.forward()[0], rtol=0, atol=0)
    # From the gradients that the parts recorded, they compute the model's.
    expected = dict(zip(map(id, whole.leaves), whole.train(), strict=True))
    covered = set()
    for part in parts:
        for leaf, gradient in zip(part.leaves, part.train(), strict=True):
            if id(leaf) in expected:
                torch.testing.assert_close(gradient, expected[id(leaf)])
                covered.add(id(leaf))
    named = {name for name, weight in model.named_parameters() if id(weight) in covered}
    left_out = {name for name, _ in model.named_parameters()} - named
    assert all(name.startswith("self_attn.") for name in left_out)


def test_block_is_cut_into_all_of_its_parts():
    *_, stack_parts, _ = parts_of(record_block, *own(SIZES["stack"]))
    names = ["ln1", "q/k/v projections", "rope", "attention", "output projection"]
    names += ["residual sums", "ln2", "ffn up", "ffn gate", "ffn down", "final norm"]
    assert [part.name for part in stack_parts] == names


def test_parts_of_several_calls_keep_the_order_of_their_gradients():
    whole, parts, _ = parts_of(record_block, *own(SIZES["block"]))
    [sums] = [part for part in parts if part.name == "residual sums"]
    # The last branch has the gradient of the block's output.
    torch.testing.assert_close(sums.train()[-1], whole.gradients[0])


def test_parts_of_a_stack_count_for_each_layer():
    size = Size(1, 5, 32, 2, d_ff=24, num_layers=3)
    _, parts, _ = parts_of(record_block, *own(size))
    counts = {part.name: part.count for part in parts}
    assert counts["ffn up"] == 3
    assert counts["final norm"] == 1


def test_modules_are_left_in_the_rest_if_called_with_keywords():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)
            self.b = nn.Linear(4, 4)

        def forward(self, x):
            return self.a(x) + self.b(input=x)

    model = Named()
    calls, _ = record_modules(model, torch.randn(2, 3, 4))
    assert [name for name, _ in calls] == ["a"]
    assert not model.a._forward_hooks  # nothing remains in the user's module


def test_frozen_weights_have_no_gradient():
    model, shape = encoder()
    model.linear1.requires_grad_(False)
    _, parts, _ = parts_of(record_modules, model, shape)
    [linear] = [part for part in parts if part.name == "linear1"]
    assert len(linear.train()) == 1  # that of the input


def test_flops_of_the_block_are_those_of_the_formulas():
    size = Size(2, 5, 32, 4, 2, d_head=16, d_ff=24)
    whole, parts, _ = parts_of(record_block, *own(size))
    works = works_of(whole, parts, is_own=True)
    tokens = 10
    expected = {
        "ln1": 4 * tokens * 32,
        "q/k/v projections": 2 * tokens * 32 * (64 + 2 * 32),
        "rope": 3 * tokens * (64 + 32),
        # For each head, query, and key that is not later: two products of d_head.
        "attention": 4 * 2 * 4 * (5 * 6 // 2) * 16,
        "output projection": 2 * tokens * 64 * 32,
        "residual sums": 2 * tokens * 32,
        "ln2": 4 * tokens * 32,
        "ffn up": 2 * 2 * tokens * 32 * 24,
        "ffn gate": 5 * tokens * 24,
        "ffn down": 2 * tokens * 24 * 32,
    }
    assert {name: works[name].flops / 3 for name in expected} == expected
    assert works.keys() == expected.keys()


@pytest.mark.parametrize("build", [encoder, partial(own, SIZES["block"])])
def test_flops_of_a_users_block_are_those_on_meta(build):
    model, shape = build()
    whole, parts, _ = parts_of(record_modules, model, shape)
    works = works_of(whole, parts, is_own=False)
    counted = count_flops(whole)
    on_meta = model.to("meta")  # where attention is products
    with FlopCounterMode(display=False) as counter:
        on_meta(torch.empty(shape, dtype=torch.float64, device="meta"))
    assert sum(work.flops for work in works.values()) == 3 * counter.get_total_flops()
    assert counted == counter.get_total_flops()
    assert works["rest"].flops > 0  # attention


def test_bytes_of_parts_are_the_fewest_possible():
    whole, parts, _ = parts_of(record_block, *own(SIZES["block"], torch.float32))
    works = works_of(whole, parts, is_own=True)
    x, inner, weight = 4 * 10 * 32, 4 * 10 * 24, 4 * 32 * 24
    # Forward reads input and weight; backward reads both again, and writes gradients.
    assert works["ffn down"].bytes == (inner + weight + x) + (x + 2 * (inner + weight))
    # Backward of a sum reads two gradients, and writes their sum.
    assert works["residual sums"].bytes == 2 * (3 * x + 3 * x)
    [table] = [part.tables[0].nbytes for part in parts if part.name == "rope"]
    assert works["rope"].bytes == 2 * (4 * x + table)
    trained = sum(w.nbytes for w in whole.weights)
    assert work_of_adamw(whole).bytes == 7 * trained


@pytest.mark.parametrize("name", ["block", "shared heads and q/k norm"])
def test_kept_bytes_of_the_parts_are_those_of_the_whole(name):
    whole, parts, _ = parts_of(record_block, *own(SIZES[name]))
    kept = kept_bytes(parts)
    assert sum(kept.values()) == kept_bytes([whole])["the whole"]
    assert kept["residual sums"] == 0
    # w2 keeps its input; the gate keeps both of its inputs.
    size = SIZES[name]
    assert kept["ffn down"] == 8 * size.tokens * (size.d_ff or 0)
