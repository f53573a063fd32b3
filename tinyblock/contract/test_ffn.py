"""Feed-forward layers: SwiGLU(x) = W2 (SiLU(W1 x) * W3 x), and FeedForward(x) = W2 activation(W1 x).

SiLU(x) = x sigmoid(x), GELU(x) = x/2 (1 + erf(x / sqrt(2))), and GLU(x) = sigmoid(W1 x)
* W2 x.
"""

import math

import pytest
import torch
from torch import nn

from .checks import (
    DTYPES,
    Cases,
    build,
    check_autocast,
    check_checkpointing,
    check_compiles,
    check_equation,
    check_function,
    check_initial_weights,
    check_matrix_sizes,
    check_on_cuda,
    check_placement,
    check_rejects_option,
    check_weight_names,
    construct,
    find,
    randn,
)


def sigmoid(x):
    return (1 + (x / 2).tanh()) / 2  # also where exp(-x) overflows


def silu(x):
    return x * sigmoid(x)


def gelu(x):
    return x / 2 * (1 + (x / math.sqrt(2)).erf())


def relu(x):
    return x.clamp(min=0)


def glu(x, w1, w2):
    return sigmoid(x @ w1.T) * (x @ w2.T)


def swiglu(x, w1, w2, w3):
    return (silu(x @ w1.T) * (x @ w3.T)) @ w2.T


def feed_forward(x, w1, w2, activation=gelu):
    return activation(x @ w1.T) @ w2.T


def swiglu_of_weights(x, weights):
    return swiglu(x, weights["w1.weight"], weights["w2.weight"], weights["w3.weight"])


def feed_forward_of_weights(x, weights, activation=gelu):
    return feed_forward(x, weights["w1.weight"], weights["w2.weight"], activation)


CASES: Cases = {
    "SwiGLU": {"name": "SwiGLU", "shape": (2, 3, 5)},
    "SwiGLU, no batch axis": {"name": "SwiGLU", "shape": (5,)},
    "SwiGLU, empty batch": {"name": "SwiGLU", "shape": (0, 5)},
    "GELU": {"name": "FeedForward", "shape": (2, 3, 5)},
    "GELU, no batch axis": {"name": "FeedForward", "shape": (5,)},
    "GELU, empty batch": {"name": "FeedForward", "shape": (0, 5)},
    "ReLU": {"name": "FeedForward", "shape": (2, 3, 5), "activation": torch.relu},
    "SiLU": {"name": "FeedForward", "shape": (4, 5), "activation": nn.SiLU()},
}
ACTIVATIONS = {"ReLU": relu, "SiLU": silu}


def prepare(ffn, case):
    """Return a layer, its formula, and x."""
    options = dict(CASES[case])
    name = options.pop("name")
    shape = options.pop("shape")
    layer = build(ffn, name, 5, 7, **options)
    if name == "SwiGLU":
        return layer, swiglu_of_weights, randn(*shape)

    def formula(x, weights):
        return feed_forward_of_weights(x, weights, ACTIVATIONS.get(case, gelu))

    return layer, formula, randn(*shape)


def test_is_defined(ffn):
    is_there = hasattr(ffn, "SwiGLU") or hasattr(ffn, "FeedForward")
    assert is_there, "the file has no SwiGLU and no FeedForward"


WEIGHTS = {
    "SwiGLU": ["w1.weight", "w2.weight", "w3.weight"],
    "FeedForward": ["w1.weight", "w2.weight"],
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weight_names(ffn, name):
    check_weight_names(build(ffn, name, 5, 7), *WEIGHTS[name])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_equation(ffn, case, dtype):
    check_equation(*prepare(ffn, case), dtype)


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_equation_of_large_values(ffn, dtype):
    """These overflow in float16."""
    layer, formula, x = prepare(ffn, "SwiGLU")
    check_equation(layer, formula, 1e3 * x, dtype)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_equation_on_cuda(ffn, case, dtype):
    check_on_cuda(*prepare(ffn, case), dtype)


@pytest.mark.parametrize("case", CASES)
def test_autocast(ffn, case):
    check_autocast(*prepare(ffn, case))


@pytest.mark.parametrize("case", ["SwiGLU", "GELU"])
def test_checkpointing(ffn, case):
    check_checkpointing(*prepare(ffn, case))


@pytest.mark.parametrize("case", ["SwiGLU", "GELU"])
def test_compiles_to_one_graph(ffn, case):
    layer, _, _ = prepare(ffn, case)
    check_compiles(layer, lambda length: {"x": randn(2, length, 5)})


@pytest.mark.parametrize("name", ["SwiGLU", "FeedForward"])
def test_device_and_dtype(ffn, name):
    check_placement(ffn, name, 5, 7)


@pytest.mark.parametrize("name", ["SwiGLU", "FeedForward"])
def test_initial_weights(ffn, name):
    check_initial_weights(construct(ffn, name, 96, 160))


@pytest.mark.parametrize("name", WEIGHTS)
def test_d_ff_is_the_width_that_is_passed(ffn, name):
    layer = construct(ffn, name, 5, 7)
    matrices = len(WEIGHTS[name])
    check_matrix_sizes(f"{name}(5, 7)", layer, matrices * 5 * 7)


@pytest.mark.parametrize(
    ("d_model", "d_ff"),
    [(512, 1344), (64, 192), (24, 64), (1, 64), (36, 128), (59, 128), (61, 192)],
)
def test_d_ff_is_the_multiple_of_64_nearest_to_8_thirds_of_d_model(ffn, d_model, d_ff):
    layer = construct(ffn, "SwiGLU", d_model)
    check_matrix_sizes(f"SwiGLU({d_model})", layer, 3 * d_model * d_ff)


def test_d_ff_is_4_d_model_without_a_gate(ffn):
    layer = construct(ffn, "FeedForward", 12)
    check_matrix_sizes("FeedForward(12)", layer, 2 * 12 * 48)


@pytest.mark.parametrize("name", ["SwiGLU", "FeedForward"])
@pytest.mark.parametrize(
    ("option", "value"), [("d_model", 0), ("d_model", -1), ("d_ff", 0), ("d_ff", -2)]
)
def test_rejects_hyperparameters(ffn, name, option, value):
    check_rejects_option(ffn, name, {"d_model": 4}, option, value)


FUNCTIONS = {
    "silu": (silu, []),
    "gelu": (gelu, []),
    "glu": (glu, [(7, 5), (7, 5)]),
    "swiglu": (swiglu, [(7, 5), (5, 7), (7, 5)]),
    "feed_forward": (feed_forward, [(7, 5), (5, 7)]),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 5), (5,), (2, 1, 3, 5)], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(ffn, name, shape, dtype):
    formula, weights = FUNCTIONS[name]
    check_function(find(ffn, name), formula, [shape, *weights], dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_feed_forward_with_another_activation(ffn, dtype):
    function = find(ffn, "feed_forward")
    shapes = [(2, 3, 5), (7, 5), (5, 7)]
    check_function(function, feed_forward, shapes, dtype, activation=torch.relu)
