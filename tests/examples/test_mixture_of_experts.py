"""The mixture of experts against a sum over all experts, token by token."""

import re
from functools import partial

import mixture_of_experts
import pytest
import torch
from mixture_of_experts import MixtureOfExperts

from tinyblock import Transformer


def expected_of(layer, x):
    """Run every expert on every token, and give all but the best the weight 0."""
    total = torch.zeros_like(x)
    probabilities = torch.softmax(x @ layer.router.weight.T, dim=-1)
    smallest_kept = probabilities.sort(dim=-1).values[..., -layer.top_k, None]
    kept = probabilities * (probabilities >= smallest_kept)
    for number, expert in enumerate(layer.experts):
        weight = kept[..., number, None] / kept.sum(dim=-1, keepdim=True)
        total = total + weight * expert(x)
    return total


@pytest.mark.parametrize("shape", [(64,), (7, 64), (2, 7, 64), (2, 3, 5, 64), (0, 64)])
@pytest.mark.parametrize(("num_experts", "top_k"), [(4, 2), (3, 1), (3, 3)])
def test_mixture_equals_the_weighted_sum_of_its_experts(shape, num_experts, top_k):
    layer = MixtureOfExperts(
        64, 96, dtype=torch.float64, num_experts=num_experts, top_k=top_k
    )
    x = torch.randn(*shape, dtype=torch.float64)
    torch.testing.assert_close(layer(x), expected_of(layer, x), rtol=1e-10, atol=1e-10)


def test_mixture_gives_every_parameter_the_gradient_of_that_sum():
    layer = MixtureOfExperts(64, 96, dtype=torch.float64)
    x = torch.randn(1, 64, dtype=torch.float64)  # most experts get no token
    layer(x).square().sum().backward()
    parameters = list(layer.parameters())
    expected = torch.autograd.grad(expected_of(layer, x).square().sum(), parameters)
    for parameter, gradient in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-9, atol=1e-12)


def test_mixture_trains_under_autocast():
    build = partial(Transformer, 2, d_model=64, num_heads=4, max_seq_len=8)
    model = build(ffn=MixtureOfExperts)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(torch.randn(2, 7, 64))
    assert out.dtype == torch.float32
    out.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@torch.no_grad()
def test_mixture_equals_the_weighted_sum_under_autocast():
    layer = MixtureOfExperts(64, 96, num_experts=2)  # both chosen: no close choice
    x = torch.randn(2, 7, 64)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    torch.testing.assert_close(out, expected_of(layer, x), rtol=0.02, atol=0.02)


def test_mixture_returns_the_dtype_of_its_input():
    layer = MixtureOfExperts(64, 96, dtype=torch.bfloat16)
    assert layer(torch.randn(2, 7, 64, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@torch.no_grad()
def test_router_computes_probabilities_in_float32_or_wider(dtype):
    layer = MixtureOfExperts(64, 96, dtype=dtype)
    tokens = torch.randn(5, 64, dtype=dtype)
    weights, chosen = layer.route(tokens)
    exact = layer.router(tokens).double().softmax(dim=-1).gather(-1, chosen)
    expected = exact / exact.sum(dim=-1, keepdim=True)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(weights.double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("top_k", [0, 9])
def test_mixture_rejects_a_top_k_out_of_range(top_k):
    with pytest.raises(ValueError, match=rf"top_k must be 1 .* got {top_k}"):
        MixtureOfExperts(64, top_k=top_k)


def test_mixture_of_experts_main(capsys):
    mixture_of_experts.main()
    out = capsys.readouterr().out
    counts = [int(number) for number in re.findall(r"\d+", out)]
    assert len(counts) == 9
    assert sum(counts[:8]) == counts[8] == 2000
