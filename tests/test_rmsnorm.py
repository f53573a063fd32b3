import numpy as np
import pytest
import reference
import torch

from tinyblock import RMSNorm, rms_norm

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def inputs(dtype, *shape, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(*shape, generator=generator) * scale).to(dtype)
    weight = (1 + 0.3 * torch.randn(shape[-1], generator=generator)).to(dtype)
    return x, weight


def module_with(weight, eps=1e-5):
    norm = RMSNorm(len(weight), eps, dtype=weight.dtype)
    norm.load_state_dict({"weight": weight})
    return norm


def test_rms_norm_follows_the_formula():
    x, weight = inputs(torch.float64, 2, 3, 7)
    exact = reference.rms_norm(reference.array(x), reference.array(weight))
    np.testing.assert_allclose(reference.array(rms_norm(x, weight)), exact, rtol=1e-14)
    np.testing.assert_allclose(reference.array(module_with(weight)(x)), exact, rtol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 200.0])
@pytest.mark.parametrize("form", ["equation", "engine"])
def test_rms_norm_rounds_once(dtype, scale, form):
    x, weight = inputs(dtype, 64, 257, scale=scale)
    exact = reference.rms_norm(reference.array(x), reference.array(weight))
    actual = rms_norm(x, weight) if form == "equation" else module_with(weight)(x)
    assert actual.dtype == dtype
    assert reference.ulps(actual, exact).max() <= 0.51


@pytest.mark.parametrize("form", ["equation", "engine"])
def test_rms_norm_of_large_float16_does_not_overflow(form):
    x = torch.full((3, 65), 6e4, dtype=torch.float16)
    x[1] *= -1
    weight = torch.linspace(0.5, 2, 65, dtype=torch.float16)
    exact = reference.rms_norm(reference.array(x), reference.array(weight))
    actual = rms_norm(x, weight) if form == "equation" else module_with(weight)(x)
    assert reference.ulps(actual, exact).max() <= 0.51


@pytest.mark.parametrize("dtype", FLOATS)
def test_rms_norm_engine_matches_equation_and_its_gradients(dtype):
    x, weight = inputs(dtype, 2, 5, 33)
    upstream = torch.randn(2, 5, 33, generator=torch.Generator().manual_seed(1)).to(dtype)
    norm = module_with(weight)
    for_engine, for_equation = x.clone().requires_grad_(), x.clone().requires_grad_()
    weight = weight.clone().requires_grad_()
    engine, equation = norm(for_engine), rms_norm(for_equation, weight)
    engine.backward(upstream)
    equation.backward(upstream)
    tolerance = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(engine, equation, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(for_engine.grad, for_equation.grad, rtol=tolerance, atol=tolerance)
    # The gain's gradient is a sum over 10 tokens, of which torch keeps the terms in the dtype.
    torch.testing.assert_close(norm.weight.grad, weight.grad, rtol=tolerance, atol=10 * tolerance)


def test_rms_norm_gradcheck():
    x, weight = inputs(torch.float64, 2, 3, 4)
    assert torch.autograd.gradcheck(rms_norm, (x.requires_grad_(), weight.requires_grad_()))
    assert torch.autograd.gradcheck(module_with(weight.detach()), (x,))


def test_rms_norm_output_has_unit_root_mean_square():
    x, _ = inputs(torch.float32, 4, 96, scale=30.0)
    torch.testing.assert_close(RMSNorm(96)(x).square().mean(-1), torch.ones(4))


def test_rms_norm_adds_eps_under_the_root():
    x = torch.zeros(2, 8)
    assert torch.equal(RMSNorm(8)(x), x)
    tiny = torch.full((8,), 1e-3)
    torch.testing.assert_close(RMSNorm(8, eps=3e-6)(tiny), torch.full((8,), 0.5))


def test_rms_norm_with_wider_gains_computes_in_them():
    x, weight = inputs(torch.float32, 3, 129)
    x = x.bfloat16()
    exact = reference.rms_norm(reference.array(x), reference.array(weight))
    actual = module_with(weight)(x)
    assert actual.dtype == torch.bfloat16
    assert reference.ulps(actual, exact).max() <= 0.51


def test_rms_norm_leaves_inputs_alone():
    x, weight = inputs(torch.float32, 3, 5)
    before = x.clone(), weight.clone()
    rms_norm(x, weight)
    module_with(weight)(x)
    assert torch.equal(x, before[0])
    assert torch.equal(weight, before[1])


@pytest.mark.parametrize("shape", [(6,), (1, 6), (0, 6), (2, 3, 4, 6)])
def test_rms_norm_keeps_any_leading_axes(shape):
    assert RMSNorm(6)(torch.randn(shape)).shape == shape


@pytest.mark.parametrize(
    ("arguments", "named"), [((0,), "0"), ((-3,), "-3"), ((4, 0.0), "0.0"), ((4, -1e-5), "-1e-05")]
)
def test_rms_norm_rejects_bad_hyperparameters(arguments, named):
    with pytest.raises(ValueError, match=named):
        RMSNorm(*arguments)


@pytest.mark.parametrize("eps", [float("nan"), float("inf")])
def test_rms_norm_rejects_eps_that_is_not_finite(eps):
    with pytest.raises(ValueError, match=str(eps)):
        RMSNorm(4, eps)


def test_rms_norm_reset_parameters_after_meta():
    norm = RMSNorm(5, device="meta").to_empty(device="cpu")
    norm.reset_parameters()
    assert torch.equal(norm.weight, torch.ones(5))
    assert repr(norm) == "RMSNorm(5, eps=1e-05)"
