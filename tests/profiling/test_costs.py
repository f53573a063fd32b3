"""The analytic costs, against counts made by hand, by torch, and from the tensors themselves."""

import pytest
import torch
from lab.costs import Cost, adamw_cost
from lab.sizes import Size
from profiling.parts import block_steps, timed_parts
from torch.utils.flop_counter import FlopCounterMode

import tinyblock

SIZE = Size(
    batch_size=2,
    seq_len=5,
    d_model=12,
    num_heads=6,
    num_kv_heads=2,
    d_head=4,
    d_ff=20,
    qk_norm=True,
)


def parts_of(dtype: torch.dtype = torch.float32):
    model = SIZE.build("cpu", dtype)
    x = torch.randn(2, 5, 12, dtype=dtype, requires_grad=True)
    return model, timed_parts(block_steps(model), x, torch.randn_like(x))


def test_costs_of_a_size_counted_by_hand():
    size = Size(
        batch_size=1,
        seq_len=3,
        d_model=4,
        num_heads=2,
        num_kv_heads=1,
        d_head=2,
        d_ff=5,
    )
    costs = size.part_costs(element_size=2)
    # Three tokens; q is 4 wide, k and v are 2 wide each.
    assert costs["q/k/v projections"]["forward"] == Cost(
        2 * 3 * 4 * 8, 2 * 3 * 4 * 8, 0, 2 * (3 * 4 + 4 * 8 + 3 * 8)
    )
    assert costs["q/k/v projections"]["backward"] == Cost(
        384, 384, 0, 2 * (3 * 8 + 2 * (3 * 4 + 4 * 8))
    )
    # Causal: 1 + 2 + 3 = 6 of 9 scores in each of 2 heads, each two products of length 2.
    attention = costs["attention"]["forward"]
    assert attention.matmul_flops == 2 * 6 * (2 * 2 + 2 * 2)
    assert attention.dense_matmul_flops == 2 * 9 * (2 * 2 + 2 * 2)
    assert attention.bytes == 2 * (3 * 4 + 2 * 3 * 2 + 3 * 4)
    assert costs["rope"]["forward"] == Cost(
        0, 0, 3 * (3 * 4 + 3 * 2), 2 * 2 * (3 * 4 + 3 * 2) + 3 * 2 * 4
    )
    assert costs["ln1"]["forward"] == Cost(0, 0, 4 * 12, 2 * (12 + 4 + 12))
    assert costs["residual adds"]["forward"] == Cost(0, 0, 24, 2 * 2 * 3 * 12)
    assert costs["ffn"]["forward"].matmul_flops == 3 * 2 * 3 * 4 * 5
    assert (
        adamw_cost(parameters=10, element_size=4).bytes == (4 + 3) * 10 * 4
    )  # reads four tensors, writes three


def test_costs_of_products_agree_with_the_flop_counter():
    parts = {part.name: part for part in parts_of()[1]}
    for name in ("q/k/v projections", "output projection", "ffn"):
        forward, backward = SIZE.part_costs(4)[name].values()
        with FlopCounterMode(display=False) as counter:
            parts[name].forward()
        assert (
            counter.get_total_flops()
            == forward.matmul_flops
            == forward.dense_matmul_flops
        )
        with FlopCounterMode(display=False) as counter:
            parts[name].accumulate()
        assert counter.get_total_flops() == forward.matmul_flops + backward.matmul_flops


def test_costs_of_dense_attention_agree_with_the_flop_counter():
    # The counter knows nothing of SDPA on a CPU, so it gets the equation, whose two products are all of its products.
    q, k, v = (torch.randn(2, 6, 5, 4, requires_grad=True) for _ in range(3))
    forward, backward = SIZE.part_costs(4)["attention"].values()
    with FlopCounterMode(display=False) as counter:
        out = tinyblock.scaled_dot_product_attention(q, k, v)
    assert counter.get_total_flops() == forward.dense_matmul_flops
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == backward.dense_matmul_flops


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_costs_move_the_inputs_weights_and_outputs_once(dtype):
    model, parts = parts_of(dtype)
    table = model.attn.rope.cos_sin.nbytes
    for part in parts:
        into, weights, out = (
            sum(t.nbytes for t in ts)
            for ts in (part.inputs, part.weights, part.forward())
        )
        forward, backward = SIZE.part_costs(dtype.itemsize)[part.name].values()
        if part.name == "rope":
            assert forward.bytes == backward.bytes == into + out + table
        elif part.name == "residual adds":  # two of its outputs are inputs, passed on
            assert forward.bytes == backward.bytes == into + out / 2
        else:
            assert forward.bytes == into + weights + out
            assert backward.bytes == forward.bytes + into + weights
