"""The stack: block after block, all with one RoPE or with none, then a norm."""

import copy
import functools
from itertools import combinations

import pytest
import torch
from torch import nn

from .checks import (
    DTYPES,
    EPS,
    Cases,
    build,
    check_autocast,
    check_causality,
    check_checkpointing,
    check_compiles,
    check_equation,
    check_initial_weights,
    check_masks,
    check_matrix_sizes,
    check_on_cuda,
    check_placement,
    check_rejects_input,
    check_rejects_option,
    check_relative_positions,
    check_weight_names,
    construct,
    randn,
    require_options,
)
from .test_attention import mask_of, take_inputs
from .test_block import (
    EVERY_OPTION,
    PARTS,
    check_is_replaced,
    formula_of,
    layer_of,
    norm_of_weights,
    norm_within_a_sequence,
    pre_norm_block,
    weights_of,
)
from .test_block import WEIGHTS as BLOCK_WEIGHTS
from .test_rope import POSITIONS, TABLE, rope_of_positions


def blocks_and_norm(
    x,
    weights,
    token_positions=None,
    mask=None,
    *,
    num_layers=2,
    theta=1e4,
    rope=None,
    norm=norm_of_weights,
    eps=EPS,
    **options,
):
    if rope is None and theta is not None:
        rope = functools.partial(rope_of_positions, theta=theta)
    for layer in range(num_layers):
        weights_of_layer = weights_of(f"layers.{layer}", weights)
        x = pre_norm_block(
            x,
            weights_of_layer,
            token_positions,
            mask,
            rope=rope,
            norm=norm,
            eps=eps,
            **options,
        )
    return norm(x, weights_of("ln_final", weights), eps)


CASES: Cases = {
    "two layers": {},
    "one layer": {"num_layers": 1},
    "every option": EVERY_OPTION,
    "every option, positions, mask": {
        **EVERY_OPTION,
        "token_positions": POSITIONS,
        "mask": mask_of(2, 7, 7),
    },
    "positions": {"token_positions": POSITIONS},
    "mask": {"mask": mask_of(2, 7, 7)},
    "another rope": {"rope": rope_of_positions},
    "another theta, a table of 7 positions": {"theta": 100.0, "max_seq_len": 7},
    "no RoPE": {"theta": None, "max_seq_len": 7},
}


def build_stack(transformer, **options):
    """Build a stack of two layers, unless the options have another number."""
    options = {"num_layers": 2, "max_seq_len": TABLE, "theta": 1e4, **options}
    return build(
        transformer, "Transformer", d_model=24, num_heads=4, d_ff=40, **options
    )


def prepare(transformer, case):
    """Return a stack, its formula, x of shape (2, 7, 24), and further inputs."""
    options = dict(CASES[case])
    inputs = take_inputs(options)
    stack = build_stack(transformer, **options)
    require_options(stack.forward, *inputs)
    options.pop("max_seq_len", None)

    def formula(x, weights, token_positions=None, mask=None):
        return blocks_and_norm(x, weights, token_positions, mask, **options)

    return stack, formula, randn(2, 7, 24), inputs


def test_is_defined(transformer):
    assert hasattr(transformer, "Transformer"), "the file has no Transformer"


def test_weight_names(transformer):
    names = ["ln_final.weight"]
    for layer in range(2):
        names += [f"layers.{layer}.{name}" for name in BLOCK_WEIGHTS]
    check_weight_names(build_stack(transformer), *names)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_equation(transformer, case, dtype):
    stack, formula, x, inputs = prepare(transformer, case)
    check_equation(stack, formula, x, dtype, **inputs)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_equation_on_cuda(transformer, case, dtype):
    stack, formula, x, inputs = prepare(transformer, case)
    check_on_cuda(stack, formula, x, dtype, **inputs)


def test_d_ff_is_the_width_of_the_feed_forward_layers(transformer):
    stack = construct(transformer, "Transformer", 2, 24, 4, 40, max_seq_len=9)
    of_attention = 4 * 24 * 24
    of_swiglu = 3 * 24 * 40
    check_matrix_sizes("two blocks", stack, 2 * (of_attention + of_swiglu))


@pytest.mark.parametrize("case", CASES)
def test_autocast(transformer, case):
    stack, formula, x, inputs = prepare(transformer, case)
    check_autocast(stack, formula, x, **inputs)


def test_checkpointing(transformer):
    stack, formula, x, inputs = prepare(transformer, "every option, positions, mask")
    check_checkpointing(stack, formula, x, **inputs)


@pytest.mark.parametrize("case", CASES)
def test_causality(transformer, case):
    stack, _, x, inputs = prepare(transformer, case)
    check_causality(stack, x, **inputs)


@pytest.mark.parametrize("case", [case for case in CASES if "mask" not in CASES[case]])
def test_masks(transformer, case):
    stack, _, x, inputs = prepare(transformer, case)
    check_masks(stack, x, **inputs)


def test_relative_positions_only(transformer):
    stack, _, x, _ = prepare(transformer, "two layers")
    check_relative_positions(stack, x)


def test_compiles_to_one_graph(transformer):
    stack = build_stack(transformer, num_layers=1)
    check_compiles(stack, lambda length: {"x": randn(2, length, 24)})


def test_device_and_dtype(transformer):
    check_placement(transformer, "Transformer", 2, 24, 4, 40, max_seq_len=9)


def tables_of(module):
    """Return the tables of a module by name, but no masks, and each memory once."""
    by_memory = {}
    for name, table in module.named_buffers():
        if table.dtype != torch.bool:
            by_memory[table.data_ptr()] = (name, table)
    return dict(by_memory.values())


def test_one_table_for_all_blocks(transformer):
    """No two tables have equal values, after all that torch does to modules."""
    stack = construct(transformer, "Transformer", 3, 24, 4, max_seq_len=9)
    stack = stack.to(torch.bfloat16)
    stack = stack.to("meta").to_empty(device="cpu")
    tables = tables_of(copy.deepcopy(stack))
    for name, other_name in combinations(tables, 2):
        table = tables[name]
        other = tables[other_name]
        is_same = table.shape == other.shape and torch.equal(table, other)
        assert not is_same, f"{name} and {other_name} have the same values"


@pytest.mark.parametrize("part", PARTS)
def test_takes_any_norm_ffn_and_attention(transformer, part):
    stack = build_stack(transformer, **{part: layer_of(PARTS[part])})
    check_is_replaced(stack, part)

    def formula(x, weights):
        return blocks_and_norm(x, weights, **{part: formula_of(PARTS[part])})

    check_equation(stack, formula, randn(2, 7, 24), torch.float64)


RESET_PARTS: Cases = {
    "own layers": {},
    "layers of torch": {"norm": nn.RMSNorm},
    "layers within layers": {"ffn": norm_within_a_sequence},
}


@pytest.mark.parametrize("parts", RESET_PARTS)
def test_reset_reaches_every_layer(transformer, parts):
    options = {"max_seq_len": 9, **RESET_PARTS[parts]}
    check_initial_weights(construct(transformer, "Transformer", 2, 24, 4, **options))


@pytest.mark.parametrize("theta", [100.0, None])
def test_rejects_a_sequence_longer_than_max_seq_len(transformer, theta):
    options = {"max_seq_len": 9, "theta": theta}
    stack = construct(transformer, "Transformer", 1, 24, 4, **options)
    check_rejects_input(stack, 9, {"x": torch.zeros(10, 24)})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("num_layers", 0),
        ("num_layers", -1),
        ("num_heads", 5),
        ("num_heads", 0),
        ("d_model", 0),
        ("d_ff", 0),
        ("d_head", 3),
        ("max_seq_len", 0),
        ("theta", 0.0),
        ("eps", -1.0),
    ],
)
def test_rejects_hyperparameters(transformer, option, value):
    valid = {"num_layers": 1, "d_model": 24, "num_heads": 4, "max_seq_len": 9}
    check_rejects_option(transformer, "Transformer", valid, option, value)
