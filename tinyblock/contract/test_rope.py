"""RoPE: rotate the k-th pair of components, x[2k] and x[2k+1], by the angle position * theta^(-2k / d_k).

The rotation is rounded once to the dtype of x. Its table stays exact, whatever the
dtype of the model.
"""

import copy
import math
import pickle

import pytest
import torch
from torch import nn

from .checks import (
    DTYPES,
    HALVES,
    Cases,
    build,
    check_autocast,
    check_checkpointing,
    check_close,
    check_compiles,
    check_equation,
    check_function,
    check_function_rounds_once,
    check_on_cuda,
    check_placement,
    check_rejects_input,
    check_rejects_option,
    check_rounds_once,
    check_weight_names,
    construct,
    find,
    randn,
)

THETA = 100.0
TABLE = 200  # positions
POSITIONS = torch.tensor([[3, 9, 2, TABLE - 1, 0, 5, 5], [0, 1, 2, 3, 4, 5, 6]])


def angles_of(positions, d_k, theta):
    """Return the angle of each pair in radians, in float64."""
    frequencies = [theta ** (-2 * k / d_k) for k in range(d_k // 2)]
    row = torch.tensor(frequencies, dtype=torch.float64, device=positions.device)
    return positions[..., None] * row


def rotate(x, angles):
    """Rotate each pair as a complex number, in float64."""
    pairs = torch.complex(x[..., 0::2].double(), x[..., 1::2].double())
    rotated = pairs * torch.exp(1j * angles)
    return torch.stack((rotated.real, rotated.imag), dim=-1).flatten(-2).to(x.dtype)


def rope_of_positions(x, token_positions=None, theta=THETA):
    if token_positions is None:
        token_positions = torch.arange(x.shape[-2], device=x.device)
    return rotate(x, angles_of(token_positions, x.shape[-1], theta))


def seeded_positions(*shape):
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 50, shape, generator=generator)


CASES: Cases = {
    "positions 0, 1, 2, ...": {"shape": (2, 3, 11, 8)},
    "given positions": {"shape": (2, 7, 6), "positions": POSITIONS[0]},
    "no batch axis": {"shape": (5, 6)},
    "one pair, a table of one position": {"shape": (1, 2), "table": 1},
    "empty batch": {"shape": (0, 5, 6)},
    "an empty axis": {"shape": (2, 0, 6)},
    "empty batch, given positions": {"shape": (0, 7, 6), "positions": POSITIONS[0]},
    "empty batch, no positions": {"shape": (0, 7, 6), "positions": POSITIONS[:0]},
}
for _shape in [(5,), (1, 5), (4, 5), (2, 1, 5), (2, 4, 5)]:
    CASES[f"positions of shape {_shape}"] = {
        "shape": (2, 4, 5, 6),
        "positions": seeded_positions(*_shape),
    }
for _dtype in (torch.int32, torch.int16, torch.int8):
    CASES[f"positions of {_dtype}"] = {
        "shape": (2, 4, 5, 6),
        "positions": seeded_positions(4, 5).to(_dtype),
    }


def prepare(rope, case):
    """Return a layer, its formula, x, and further inputs."""
    shape = CASES[case]["shape"]
    table = CASES[case].get("table", TABLE)
    layer = build(rope, "RotaryPositionalEmbedding", THETA, shape[-1], table)

    def formula(x, weights, token_positions=None):
        return rope_of_positions(x, token_positions)

    inputs = {}
    if "positions" in CASES[case]:
        inputs["token_positions"] = CASES[case]["positions"]
    return layer, formula, randn(*shape), inputs


def test_is_defined(rope):
    name = "RotaryPositionalEmbedding"
    assert hasattr(rope, name), f"the file has no {name}"


def test_weight_names(rope):
    check_weight_names(build(rope, "RotaryPositionalEmbedding", THETA, 8, TABLE))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_equation(rope, case, dtype):
    layer, formula, x, inputs = prepare(rope, case)
    check_equation(layer, formula, x, dtype, **inputs)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_equation_on_cuda(rope, case, dtype):
    layer, formula, x, inputs = prepare(rope, case)
    check_on_cuda(layer, formula, x, dtype, **inputs)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_rounds_once(rope, case, dtype):
    layer, formula, x, inputs = prepare(rope, case)
    check_rounds_once(layer, formula, x, dtype, **inputs)


@pytest.mark.parametrize("case", CASES)
def test_autocast(rope, case):
    layer, formula, x, inputs = prepare(rope, case)
    check_autocast(layer, formula, x, **inputs)


@pytest.mark.parametrize("case", ["positions 0, 1, 2, ...", "given positions"])
def test_checkpointing(rope, case):
    layer, formula, x, inputs = prepare(rope, case)
    check_checkpointing(layer, formula, x, **inputs)


def test_compiles_to_one_graph(rope):
    layer = build(rope, "RotaryPositionalEmbedding", THETA, 8, TABLE)
    check_compiles(layer, lambda length: {"x": randn(2, length, 8)})


def test_compiles_with_positions_to_one_graph(rope):
    def inputs_of(length):
        return {"x": randn(2, length, 8), "token_positions": torch.arange(length) + 3}

    layer = build(rope, "RotaryPositionalEmbedding", THETA, 8, TABLE)
    check_compiles(layer, inputs_of)


def test_device(rope):
    check_placement(rope, "RotaryPositionalEmbedding", THETA, 8, TABLE)


@pytest.mark.parametrize("theta", [2.0, 1e4, 1e6])
@pytest.mark.parametrize(
    ("query", "key", "shift"), [(0, 0, 4000), (7, 3, 1), (3, 90, 511), (90, 2, 4000)]
)
def test_scores_depend_on_relative_positions_only(rope, theta, query, key, shift):
    layer = build(rope, "RotaryPositionalEmbedding", theta, 8, 4096)

    def score(query_position, key_position):
        q = layer(randn(1, 8, seed=0), torch.tensor([query_position]))
        k = layer(randn(1, 8, seed=1), torch.tensor([key_position]))
        return (q * k).sum()

    expected = score(query, key)
    shifted = score(query + shift, key + shift)
    check_close(f"score {shift} positions further on", shifted, expected, 1e-9)


# The table.

LONG = (5e5, 16, 131072)  # theta, d_k, positions


def emptied(layer):
    """Move a layer to meta and back, which leaves its memory as it happens to be."""
    layer = layer.to("meta")
    # The freed memory may still contain the table: overwrite it.
    dirty = [torch.full((131072, 8, 2), math.nan) for _ in range(3)]
    del dirty
    return layer.to_empty(device="cpu")


WAYS = {
    "constructed": lambda layer: layer,
    "copied, bfloat16": lambda layer: copy.deepcopy(layer).to(torch.bfloat16),
    "pickled, half, double": lambda layer: (
        pickle.loads(pickle.dumps(layer)).half().double()
    ),
    "moved to meta and back": emptied,
}


def check_table(layer):
    """Compare a layer of the sizes LONG with the formula, for unit vectors at many positions and the last 100."""
    theta, d_k, length = LONG
    many = torch.arange(0, length, 61)
    last = torch.arange(length - 100, length)
    positions = torch.cat((many, last))
    x = nn.functional.normalize(randn(len(positions), d_k), dim=-1)
    exact = rope_of_positions(x, positions, theta)

    # In float64 the angles, which are at most the length, are rounded.
    allowed = 2 * length * torch.finfo(torch.float64).eps
    check_close("result in float64", layer(x, positions), exact, allowed)
    allowed = 8 * torch.finfo(torch.float32).eps
    check_close("result in float32", layer(x.float(), positions), exact, allowed)


@pytest.mark.parametrize("way", WAYS)
def test_table_is_exact(rope, way):
    check_table(WAYS[way](construct(rope, "RotaryPositionalEmbedding", *LONG)))


def test_table_is_exact_if_built_on_meta_and_emptied(rope):
    layer = construct(rope, "RotaryPositionalEmbedding", *LONG, device="meta")
    check_table(emptied(layer.to(torch.bfloat16)))


def test_table_is_exact_if_built_on_meta_and_called(rope):
    check_table(construct(rope, "RotaryPositionalEmbedding", *LONG, device="meta"))


# Rejections.


def test_rejects_a_sequence_longer_than_the_table(rope):
    layer = construct(rope, "RotaryPositionalEmbedding", 10.0, 4, 8)
    check_rejects_input(layer, 9, {"x": torch.zeros(9, 4)})


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64, *DTYPES], ids=str)
def test_rejects_positions_that_are_not_integers(rope, dtype):
    layer = construct(rope, "RotaryPositionalEmbedding", 10.0, 4, 8)
    positions = torch.zeros(3, dtype=dtype)
    inputs = {"x": torch.zeros(3, 4), "token_positions": positions}
    check_rejects_input(layer, dtype, inputs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    "positions", [[0, 1, 8], [0, -1, 2], [10**9, 0, 0], [0, 0, 2**32]], ids=str
)
def test_rejects_positions_out_of_range(rope, positions, dtype):
    layer = construct(rope, "RotaryPositionalEmbedding", 10.0, 4, 8)
    inputs = {
        "x": torch.zeros(3, 4).to(dtype),
        "token_positions": torch.tensor(positions),
    }
    check_rejects_input(layer, 7, inputs, by_torch=True)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("theta", 0.0),
        ("theta", -1.0),
        ("theta", math.nan),
        ("theta", math.inf),
        ("d_k", 5),
        ("d_k", 0),
        ("d_k", -2),
        ("max_seq_len", 0),
        ("max_seq_len", -1),
    ],
)
def test_rejects_hyperparameters(rope, option, value):
    valid = {"theta": 10.0, "d_k": 4, "max_seq_len": 8}
    check_rejects_option(rope, "RotaryPositionalEmbedding", valid, option, value)


ANGLES = {
    "far positions": [(2, 3, 5, 8), torch.tensor([0, 1, 5, 100, 131071])],
    "no batch axis": [(5, 8), torch.tensor([0, 1, 5, 100, 131071])],
    "positions of each sequence": [(2, 7, 8), POSITIONS],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ANGLES)
def test_apply_rope(rope, case, dtype):
    shape, positions = ANGLES[case]
    angles = angles_of(positions, 8, THETA)
    check_function(find(rope, "apply_rope"), rotate, [shape], dtype, angles=angles)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("case", ANGLES)
def test_apply_rope_rounds_once(rope, case, dtype):
    function = find(rope, "apply_rope")
    shape, positions = ANGLES[case]
    angles = angles_of(positions, 8, THETA)
    check_function_rounds_once(function, rotate, [shape], dtype, angles=angles)
