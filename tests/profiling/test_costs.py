"""The analytic costs, against counts made by hand, by torch, and from the tensors themselves."""

from dataclasses import replace

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


# Three tokens. Queries are 4 wide; keys and values are 2 wide each. An element takes two bytes.
TINY = Size(
    batch_size=1,
    seq_len=3,
    d_model=4,
    num_heads=2,
    num_kv_heads=1,
    d_head=2,
    d_ff=5,
)
COSTS = TINY.part_costs(element_size=2)


def test_projections_compute_and_move_what_is_counted_by_hand():
    inputs, weights, outputs = 3 * 4, 4 * 8, 3 * 8
    forward, backward = 2 * 3 * 4 * 8, 2 * 2 * 3 * 4 * 8
    assert COSTS["q/k/v projections"]["forward"] == Cost(
        matmul_flops=forward,
        dense_matmul_flops=forward,
        bytes=2 * (inputs + weights + outputs),
    )
    assert COSTS["q/k/v projections"]["backward"] == Cost(
        matmul_flops=backward,
        dense_matmul_flops=backward,
        bytes=2 * (outputs + 2 * (inputs + weights)),
    )


def test_attention_computes_the_scores_below_the_diagonal():
    forward = COSTS["attention"]["forward"]
    # 1 + 2 + 3 = 6 of 9 scores in each of 2 heads; each score takes two products of vectors of length 2.
    assert forward.matmul_flops == 2 * 6 * (2 * 2 + 2 * 2)
    assert forward.dense_matmul_flops == 2 * 9 * (2 * 2 + 2 * 2)
    queries, keys, values, outputs = 3 * 4, 3 * 2, 3 * 2, 3 * 4
    assert forward.bytes == 2 * (queries + keys + values + outputs)


def test_rope_rotates_queries_and_keys():
    elements = 3 * 4 + 3 * 2
    # Six operations for a pair; one cosine and one sine of four bytes for each token.
    assert COSTS["rope"]["forward"] == Cost(
        elementwise_flops=6 * elements // 2,
        bytes=2 * (elements + elements) + 3 * 2 * 4,
    )


def test_norm_reads_its_input_once():
    x, gains = 3 * 4, 4
    # Square, sum, scale and multiply by the gain.
    assert COSTS["ln1"]["forward"] == Cost(
        elementwise_flops=4 * x, bytes=2 * (x + gains + x)
    )


def test_residual_sums_read_two_tensors_and_write_one_twice():
    x = 3 * 4
    assert COSTS["residual sums"]["forward"] == Cost(
        elementwise_flops=2 * x, bytes=2 * 2 * (2 * x + x)
    )


def test_ffn_has_three_products():
    assert COSTS["ffn"]["forward"].matmul_flops == 3 * 2 * 3 * 4 * 5


def test_adamw_reads_four_tensors_and_writes_three():
    assert adamw_cost(parameters=10, element_size=4).bytes == (4 + 3) * 10 * 4


def test_vocabulary_adds_embedding_head_and_loss():
    costs = replace(TINY, num_layers=1, vocab=7).part_costs(element_size=2)
    x, table, logits = 3 * 4, 7 * 4, 3 * 7
    # Reads a row for each token, and writes it. Backward adds the gradient of each row to that of the table.
    assert costs["embedding"]["forward"] == Cost(bytes=2 * (x + x))
    expected = Cost(elementwise_flops=x, bytes=2 * (x + table))
    assert costs["embedding"]["backward"] == expected
    assert costs["head"]["forward"].matmul_flops == 2 * 3 * 4 * 7
    # Maximum, subtract, exponential and sum; a loss for each token.
    expected = Cost(elementwise_flops=4 * logits, bytes=2 * (logits + 3))
    assert costs["loss"]["forward"] == expected


def test_cost_of_a_stack_counts_its_blocks_and_the_final_norm():
    stack = replace(TINY, num_layers=3)
    for name in ("forward", "backward"):
        block = TINY.pass_cost(name, element_size=2)
        final_norm = COSTS["ln1"][name]
        assert stack.pass_cost(name, element_size=2) == block * 3 + final_norm


def test_cost_of_a_mode_is_that_of_its_passes():
    forward = TINY.pass_cost("forward", 2)
    backward = TINY.pass_cost("backward", 2)
    assert TINY.costs("forward", 2) == forward
    assert TINY.costs("train", 2) == forward + backward
    update = adamw_cost(parameters=TINY.parameters, element_size=2)
    assert TINY.costs("step", 2) == forward + backward + update


def test_costs_of_products_agree_with_the_flop_counter():
    parts = {part.name: part for part in parts_of()[1]}
    for name in ("q/k/v projections", "output projection", "ffn"):
        forward, backward = SIZE.part_costs(4)[name].values()
        assert forward.dense_matmul_flops == forward.matmul_flops
        with FlopCounterMode(display=False) as counter:
            parts[name].forward()
        assert counter.get_total_flops() == forward.matmul_flops
        with FlopCounterMode(display=False) as counter:
            parts[name].accumulate()
        assert counter.get_total_flops() == forward.matmul_flops + backward.matmul_flops


def test_costs_of_dense_attention_agree_with_the_flop_counter():
    # The counter counts nothing for SDPA on a CPU, so it counts the equation, which has the same two products.
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
        into = sum(tensor.nbytes for tensor in part.inputs)
        weights = sum(tensor.nbytes for tensor in part.weights)
        out = sum(tensor.nbytes for tensor in part.forward())
        forward, backward = SIZE.part_costs(dtype.itemsize)[part.name].values()
        if part.name == "rope":
            assert forward.bytes == backward.bytes == into + out + table
        elif part.name == "residual sums":
            # Two of its outputs are inputs, passed on.
            assert forward.bytes == backward.bytes == into + out / 2
        else:
            assert forward.bytes == into + weights + out
            assert backward.bytes == forward.bytes + into + weights
