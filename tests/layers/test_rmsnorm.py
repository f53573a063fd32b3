"""What of RMSNorm is no part of the contract in tinyblock/contract.py."""

import pytest
import torch

from tinyblock import RMSNorm, rms_norm

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def inputs(dtype, *shape):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*shape, generator=generator).to(dtype)
    weight = (1 + 0.3 * torch.randn(shape[-1], generator=generator)).to(dtype)
    return x, weight


def module_with(weight):
    norm = RMSNorm(len(weight), dtype=weight.dtype)
    norm.load_state_dict({"weight": weight})
    return norm


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


def engine_of(norm):
    return lambda x, weight: torch.func.functional_call(norm, {"weight": weight}, (x,))


@pytest.mark.parametrize("dtype", FLOATS)
def test_rms_norm_keeps_nothing_but_its_inputs_for_backward_on_a_cpu(dtype):
    x, weight = inputs(dtype, 2, 5, 33)
    norm, kept = module_with(weight), {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t):
        norm(x.requires_grad_())
    assert kept.keys() == {x.data_ptr(), norm.weight.data_ptr()}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, in forward mode
def test_rms_norm_has_second_and_forward_derivatives():
    x, weight = (t.requires_grad_() for t in inputs(torch.float64, 2, 3, 4))
    engine = engine_of(RMSNorm(4, dtype=torch.float64))
    every = {"check_forward_ad": True, "check_batched_grad": True, "check_batched_forward_grad": True}
    assert torch.autograd.gradcheck(engine, (x, weight), **every)
    assert torch.autograd.gradgradcheck(engine, (x, weight), check_fwd_over_rev=True)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_rms_norm_can_be_transformed():
    x, weight = inputs(torch.float64, 6, 7)
    weights = torch.stack((weight, -2 * weight))
    engine = engine_of(RMSNorm(7, dtype=torch.float64))
    transforms = [
        lambda norm: torch.func.vmap(norm, (None, 0))(x, weights),
        lambda norm: torch.func.vmap(torch.func.grad(lambda *p: norm(*p).pow(3).sum(), (0, 1)), (0, None))(x, weight),
        lambda norm: torch.func.jvp(norm, (x, weight), (x.cos(), weight.exp())),
        lambda norm: torch.func.hessian(lambda vector: norm(vector, weight).pow(3).sum())(x[0]),
    ]
    for transform in transforms:
        torch.testing.assert_close(transform(engine), transform(rms_norm))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit:DeprecationWarning")
def test_rms_norm_is_traced_with_torchs_own_operation():
    x, weight = inputs(torch.float32, 3, 8)
    norm = module_with(weight)
    traced = torch.jit.trace(norm, (x,))
    assert "aten::rms_norm" in str(traced.graph)
    torch.testing.assert_close(traced(2 * x), norm(2 * x))
    targets = {str(node.target) for node in torch.export.export(norm, (x,)).graph.nodes}
    assert "aten.rms_norm.default" in targets
