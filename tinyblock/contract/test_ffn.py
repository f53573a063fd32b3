"""Feed-forward layers.

SwiGLU(x) = W2 (SiLU(W1 x) * W3 x),    SiLU(x) = x sigmoid(x)
FeedForward(x) = W2 activation(W1 x),  GELU(x) = x/2 (1 + erf(x / sqrt(2)))
GLU(x) = sigmoid(W1 x) * W2 x
"""

import functools
import math

import pytest
import torch
from torch import nn

from .checks import Case, case_of
from .every_layer import (  # noqa: F401  with the tables of this page
    test_any_strides,
    test_built_on_meta,
    test_built_on_the_default_device,
    test_calls_change_nothing,
    test_compiles_to_one_graph,
    test_equation,
    test_equation_under_autocast,
    test_initial_weights,
    test_later_tokens_change_nothing,
    test_layer_is_defined,
    test_rejects_option,
    test_reset_parameters,
)


def sigmoid(x):
    return (1 + (x / 2).tanh()) / 2  # also where exp(-x) overflows


def silu(x):
    return x * sigmoid(x)


def gelu(x):
    return x / 2 * (1 + (x / math.sqrt(2)).erf())


def glu(x, w1, w2):
    return sigmoid(x @ w1.T) * (x @ w2.T)


def swiglu(x, w1, w2, w3):
    return (silu(x @ w1.T) * (x @ w3.T)) @ w2.T


def feed_forward(x, w1, w2, activation=gelu):
    return activation(x @ w1.T) @ w2.T


def swiglu_of_weights(x, weights, **sizes):
    return swiglu(x, weights["w1.weight"], weights["w2.weight"], weights["w3.weight"])


def feed_forward_of_weights(x, weights, activation=gelu, **sizes):
    return feed_forward(x, weights["w1.weight"], weights["w2.weight"], activation)


def of_function(formula, *weights, **options):
    name = formula.__name__
    return Case("ffn", name, formula, (2, 3, 5), options, weights=list(weights))


def gated_by(activation):
    """Return SwiGLU with another activation than SiLU."""

    def formula(x, weights, **sizes):
        gate = activation(x @ weights["w1.weight"].T)
        return gate * (x @ weights["w3.weight"].T) @ weights["w2.weight"].T

    return formula


MISTAKES = {
    "w1 and w3 are swapped; the gate is w1": lambda x, weights, **sizes: swiglu(
        x, weights["w3.weight"], weights["w2.weight"], weights["w1.weight"]
    ),
    "w1 is missing; the gate is w1": lambda x, weights, **sizes: swiglu(
        x, weights["w3.weight"], weights["w2.weight"], weights["w3.weight"]
    ),
    "the gate has a sigmoid in place of SiLU": gated_by(sigmoid),
    "the gate has a GELU in place of SiLU": gated_by(gelu),
    "the gate has a ReLU in place of SiLU": gated_by(torch.relu),
    "the gate has no activation": gated_by(lambda gate: gate),
    "w3 is missing": lambda x, weights, **sizes: feed_forward(
        x, weights["w1.weight"], weights["w2.weight"], silu
    ),
}
swiglu_case = functools.partial(
    case_of, "ffn", "SwiGLU", swiglu_of_weights, mistakes=MISTAKES
)
ffn_case = functools.partial(case_of, "ffn", "FeedForward", feed_forward_of_weights)
CASES = {
    "SwiGLU": swiglu_case(2, 7, 24, d_ff=64),  # a multiple of 64, as the handout says
    # Where exp(gate) overflows in float32. exp(-gate) does not, so x / (1 + exp(-x)) passes.
    "SwiGLU, gates of up to 100": swiglu_case(2, 7, 24, d_ff=64, scale=28.0),
    "SwiGLU, no batch axis": swiglu_case(5, d_ff=7, is_common=False),
    "GELU": ffn_case(2, 7, 24, d_ff=96),
    "SiLU": ffn_case(2, 3, 5, d_ff=7, activation=nn.SiLU()),
    "silu": of_function(silu),
    "gelu": of_function(gelu),
    "glu": of_function(glu, (7, 5), (7, 5)),
    "swiglu": of_function(swiglu, (7, 5), (5, 7), (7, 5)),
    "feed_forward": of_function(feed_forward, (7, 5), (5, 7)),
    "feed_forward, SiLU": of_function(feed_forward, (7, 5), (5, 7), activation=silu),
}
TYPICAL = ["SwiGLU", "GELU"]
REJECTED = {"d_model": (0,), "d_ff": (0,)}


@pytest.mark.parametrize(("d_model", "d_ff"), [(1, 64), (59, 128), (61, 192)])
def test_default_d_ff_is_the_multiple_of_64_nearest_to_8_thirds(d_model, d_ff):
    layer = swiglu_case(d_model).construct()
    assert layer.w1.weight.shape == (d_ff, d_model)


def test_default_d_ff_without_a_gate_is_4_d_model():
    layer = ffn_case(12).construct()
    assert layer.w1.weight.shape == (48, 12)
