import functools
import pickle

import numpy as np
import pytest
import reference
import torch

from tinyblock import FeedForward, SwiGLU, feed_forward, gelu, glu, silu, swiglu

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["silu", "gelu"])
def test_activation_follows_the_formula(dtype, name):
    x = torch.linspace(-12, 12, 401, dtype=torch.float64).to(dtype)
    exact = getattr(reference, name)(reference.array(x))
    actual = {"silu": silu, "gelu": gelu}[name](x)
    assert actual.dtype == dtype
    # In float32 torch evaluates erf and exp to a few units of the last place of 1.
    np.testing.assert_allclose(reference.array(actual), exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_glu_follows_the_formula():
    x, w1, w2 = randn(3, 5), randn(7, 5, seed=1), randn(7, 5, seed=2)
    exact = reference.sigmoid(reference.array(x @ w1.T)) * reference.array(x @ w2.T)
    np.testing.assert_allclose(reference.array(glu(x, w1, w2)), exact, rtol=1e-13)


def test_swiglu_follows_the_formula():
    x = randn(2, 3, 5)
    state = {"w1.weight": randn(7, 5, seed=1), "w2.weight": randn(5, 7, seed=2), "w3.weight": randn(7, 5, seed=3)}
    exact = reference.feed_forward(reference.array(x), {key: reference.array(w) for key, w in state.items()})
    np.testing.assert_allclose(reference.array(swiglu(x, *state.values())), exact, rtol=1e-12, atol=1e-13)
    layer = SwiGLU(5, 7, dtype=torch.float64)
    layer.load_state_dict(state)
    np.testing.assert_allclose(reference.array(layer(x)), exact, rtol=1e-12, atol=1e-13)


def test_feed_forward_follows_the_formula():
    x = randn(2, 3, 5)
    state = {"w1.weight": randn(7, 5, seed=1), "w2.weight": randn(5, 7, seed=2)}
    exact = reference.feed_forward(reference.array(x), {key: reference.array(w) for key, w in state.items()})
    np.testing.assert_allclose(reference.array(feed_forward(x, *state.values())), exact, rtol=1e-12, atol=1e-13)
    layer = FeedForward(5, 7, dtype=torch.float64)
    layer.load_state_dict(state)
    np.testing.assert_allclose(reference.array(layer(x)), exact, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("activation", [silu, torch.relu, torch.nn.ReLU()])
def test_feed_forward_applies_the_activation_it_was_given(activation):
    layer = FeedForward(6, 9, activation=activation)
    x = randn(4, 6, dtype=torch.float32)
    hidden = x @ layer.w1.weight.T
    expected = torch.where(hidden > 0, hidden, 0) if activation is not silu else hidden / (1 + torch.exp(-hidden))
    torch.testing.assert_close(layer(x), expected @ layer.w2.weight.T)
    torch.testing.assert_close(feed_forward(x, layer.w1.weight, layer.w2.weight, activation), layer(x))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", ["swiglu", "gelu", "silu"])
def test_engine_matches_equation_and_its_gradients(dtype, kind):
    if kind == "swiglu":
        layer, equation = SwiGLU(12, 20, dtype=dtype), swiglu
    else:
        activation = {"gelu": gelu, "silu": silu}[kind]
        layer = FeedForward(12, 20, activation=activation, dtype=dtype)
        equation = functools.partial(feed_forward, activation=activation)
    names = sorted(name for name, _ in layer.named_parameters())
    weights = [layer.get_parameter(name).detach().clone().requires_grad_() for name in names]
    x = randn(2, 5, 12, dtype=dtype)
    for_engine, for_equation = x.clone().requires_grad_(), x.clone().requires_grad_()
    engine, expected = layer(for_engine), equation(for_equation, *weights)
    upstream = randn(2, 5, 12, seed=9, dtype=dtype)
    engine.backward(upstream)
    expected.backward(upstream)
    tolerance = 16 * torch.finfo(dtype).eps
    torch.testing.assert_close(engine, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(for_engine.grad, for_equation.grad, rtol=tolerance, atol=tolerance)
    for name, weight in zip(names, weights, strict=True):
        torch.testing.assert_close(layer.get_parameter(name).grad, weight.grad, rtol=tolerance, atol=tolerance)


def test_ffn_gradcheck():
    x = randn(2, 3).requires_grad_()
    w1, w2, w3 = (randn(*shape, seed=seed).requires_grad_() for seed, shape in enumerate([(5, 3), (3, 5), (5, 3)]))
    assert torch.autograd.gradcheck(swiglu, (x, w1, w2, w3))
    assert torch.autograd.gradcheck(glu, (x, w1, w3))
    assert torch.autograd.gradcheck(feed_forward, (x, w1, w2))


@pytest.mark.parametrize(
    ("d_model", "d_ff"),
    [(512, 1344), (768, 2048), (1600, 4288), (64, 192), (24, 64), (1, 64), (36, 128), (59, 128), (61, 192)],
)
def test_swiglu_width_is_the_multiple_of_64_nearest_to_8_thirds(d_model, d_ff):
    assert SwiGLU(d_model, device="meta").d_ff == d_ff
    assert all(
        abs(d_ff - 8 / 3 * d_model) <= abs(other - 8 / 3 * d_model) for other in (d_ff - 64, d_ff + 64) if other > 0
    )


def test_feed_forward_width_is_4_d_model():
    assert FeedForward(12).d_ff == 48


def test_ffn_weights_are_truncated_normal():
    torch.manual_seed(0)
    for layer in (SwiGLU(256, 512), FeedForward(256, 512)):
        for weight in layer.parameters():
            std = (2 / (256 + 512)) ** 0.5
            assert weight.abs().max() <= 3 * std
            assert weight.abs().max() > 2.9 * std
            # Cut at three sigma, a normal keeps 0.98658 of its standard deviation.
            assert weight.std().item() == pytest.approx(0.98658 * std, rel=0.01)
            assert weight.mean().abs() < 0.01 * std


@pytest.mark.parametrize("layer", [SwiGLU, FeedForward])
@pytest.mark.parametrize("sizes", [(0, 4), (-1, 4), (4, 0), (4, -2)])
def test_ffn_rejects_sizes_below_one(layer, sizes):
    with pytest.raises(ValueError, match=rf"d_model={sizes[0]}, d_ff={sizes[1]}"):
        layer(*sizes)


@pytest.mark.parametrize("layer", [SwiGLU, FeedForward])
def test_ffn_reset_parameters_after_meta(layer):
    module = layer(8, 16, device="meta").to_empty(device="cpu")
    for weight in module.parameters():
        torch.nn.init.constant_(weight, torch.nan)
    module.reset_parameters()
    assert module(torch.ones(2, 8)).isfinite().all()


def test_ffn_leaves_input_alone():
    x = randn(3, 8, dtype=torch.float32)
    before = x.clone()
    SwiGLU(8)(x)
    FeedForward(8)(x)
    assert torch.equal(x, before)


def test_feed_forward_can_be_pickled_with_its_default_activation():
    layer = FeedForward(4)
    assert layer.activation is gelu
    copy = pickle.loads(pickle.dumps(layer))
    x = randn(2, 4, dtype=torch.float32)
    assert torch.equal(copy(x), layer(x))
