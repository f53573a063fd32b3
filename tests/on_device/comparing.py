"""How results on a device are compared with those of float64 on the CPU."""

import copy
from contextlib import nullcontext

import torch

# Of the norm of each result and gradient, or of 1: what cancels out is small, and what is rounded on the way is not.
ALLOWED = {torch.float32: 1e-5} | {half: 4 * torch.finfo(half).eps for half in (torch.bfloat16, torch.float16)}


def draw(*shape, seed=0):
    """Draw numbers that every dtype holds exactly."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def results(model, x, *inputs, run=None):
    """Return what `run`, or the model, makes of x, and the gradients, in float64 on the CPU."""
    x = x.detach().clone().requires_grad_()
    model.zero_grad()
    out = (model if run is None else run)(x, *inputs)
    out.backward(draw(*out.shape, seed=1).to(out))
    found = {"result": out, "gradient of x": x.grad}
    found |= {f"gradient of {name}": parameter.grad for name, parameter in model.named_parameters()}
    whole = {name: getattr(tensor, "full_tensor", lambda tensor=tensor: tensor)() for name, tensor in found.items()}
    return {name: tensor.detach().cpu().double() for name, tensor in whole.items()}


def assert_close(actual, expected, allowed):
    for name, tensor in expected.items():
        error, bound = (actual[name] - tensor).norm(), allowed * max(1.0, tensor.norm().item())
        assert error <= bound, f"{name}, of norm {tensor.norm():.1e}, is off by {error:.1e}, allowed {bound:.1e}"


def assert_right(model, x, *inputs, device, by=None):
    """Compare a model that was made on the CPU with a copy in float64; x and inputs are there, too."""
    exact = results(copy.deepcopy(model).double(), x.double(), *inputs)
    with by or nullcontext():
        actual = results(model.to(device), x.to(device), *(it if it is None else it.to(device) for it in inputs))
    assert_close(actual, exact, ALLOWED[x.dtype])
