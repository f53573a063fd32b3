"""How results on a device are compared with those of float64 on the CPU."""

import torch
from torch.distributed.tensor import DTensor

HALVES = (torch.bfloat16, torch.float16)
# Of the norm of each result and gradient, or of 1: what cancels out is small, and what is rounded on the way is not.
ALLOWED = {torch.float32: 1e-5} | {half: 4 * torch.finfo(half).eps for half in HALVES}


def draw(*shape, seed=0):
    """Draw numbers that every dtype holds exactly."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def results(model, x, *inputs, run=None):
    """Return the output of `run`, or of the model, and the gradients, in float64 on the CPU."""
    x = x.detach().clone().requires_grad_()
    model.zero_grad()
    out = (model if run is None else run)(x, *inputs)
    out.backward(draw(*out.shape, seed=1).to(out))
    found = {"output": out, "gradient of x": x.grad}
    for name, parameter in model.named_parameters():
        found[f"gradient of {name}"] = parameter.grad
    for name, tensor in found.items():
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        found[name] = tensor.detach().cpu().double()
    return found


def assert_close(actual, expected, dtype):
    for name, tensor in expected.items():
        error = (actual[name] - tensor).norm()
        bound = ALLOWED[dtype] * max(1.0, tensor.norm().item())
        assert error <= bound, (
            f"{name}, of norm {tensor.norm():.1e}, is off by {error:.1e}, allowed {bound:.1e}"
        )
