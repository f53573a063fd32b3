"""Feed-forward layers.

SwiGLU(x) = W2 (SiLU(W1 x) * W3 x),    SiLU(x) = x sigmoid(x)
FeedForward(x) = W2 activation(W1 x),  GELU(x) = x/2 (1 + erf(x / sqrt(2)))
GLU(x) = sigmoid(W1 x) * W2 x
"""

import functools
import math

import pytest
from torch import nn

from .checks import Case, case_of
from .every_layer import EveryLayer


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


def swiglu_of_weights(x, weights, d_model, d_ff):
    w1 = weights.get_of("w1.weight", d_ff, d_model)
    w2 = weights.get_of("w2.weight", d_model, d_ff)
    w3 = weights.get_of("w3.weight", d_ff, d_model)
    return swiglu(x, w1, w2, w3)


def feed_forward_of_weights(x, weights, d_model, d_ff, activation=gelu):
    w1 = weights.get_of("w1.weight", d_ff, d_model)
    w2 = weights.get_of("w2.weight", d_model, d_ff)
    return feed_forward(x, w1, w2, activation)


def of_function(formula, *weights, **options):
    name = formula.__name__
    return Case("ffn", name, formula, (2, 3, 5), options, weights=list(weights))


swiglu_case = functools.partial(case_of, "ffn", "SwiGLU", swiglu_of_weights, d_model=24)
ffn_case = functools.partial(
    case_of, "ffn", "FeedForward", feed_forward_of_weights, d_model=24
)


class TestFeedForward(EveryLayer):
    cases = {
        "SwiGLU": swiglu_case(d_ff=64),  # a multiple of 64, as CS336's handout asks
        # Some gates are below -88 and above 88, where exp overflows in float32.
        "SwiGLU, gates of up to 140": swiglu_case(d_ff=64, x_scale=40.0),
        "SwiGLU, another width": swiglu_case(d_ff=100),
        "SwiGLU, no batch axis": swiglu_case(axes=(), d_ff=64, is_common=False),
        "GELU": ffn_case(d_ff=100),
        "SiLU": ffn_case(d_ff=100, activation=nn.SiLU()),
        "silu": of_function(silu),
        "gelu": of_function(gelu),
        "glu": of_function(glu, (7, 5), (7, 5)),
        "swiglu": of_function(swiglu, (7, 5), (5, 7), (7, 5)),
        "feed_forward": of_function(feed_forward, (7, 5), (5, 7)),
        "feed_forward, SiLU": of_function(
            feed_forward, (7, 5), (5, 7), activation=silu
        ),
    }
    typical = ["SwiGLU", "GELU"]
    rejected = {"d_model": (0,), "d_ff": (0,)}


@pytest.mark.parametrize(("d_model", "d_ff"), [(1, 64), (59, 128), (61, 192)])
def test_default_d_ff_is_the_multiple_of_64_nearest_to_8_thirds(d_model, d_ff):
    """And at least 64."""
    layer = swiglu_case(d_model=d_model).construct()
    assert layer.w1.weight.shape == (d_ff, d_model)


def test_default_d_ff_without_a_gate_is_4_d_model():
    layer = ffn_case().construct()
    assert layer.w1.weight.shape == (96, 24)
