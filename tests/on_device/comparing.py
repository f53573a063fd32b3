"""Results on a device beside those in float64 on the CPU, and the operations that ran."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# The allowed error in units of the dtype's precision, relative to the length of a result.
UNITS = {torch.float32: 64, torch.bfloat16: 4, torch.float16: 4}


def draw(*shape, seed=0):
    """Return normal numbers in float64 that bfloat16 holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).bfloat16().double()


def results(call, inputs, **parameters):
    """Return the result of call(**inputs), and the gradients of inputs and parameters."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    result = call(**leaves)
    leaves.update(parameters)
    upstream = draw(*result.shape, seed=9).to(result)
    gradients = torch.autograd.grad(result, list(leaves.values()), upstream)
    return {"result": result, **dict(zip(leaves, gradients, strict=True))}


def assert_close(actual, exact, dtype):
    for name, expected in exact.items():
        error = (actual[name].cpu().double() - expected).norm()
        allowed = UNITS[dtype] * torch.finfo(dtype).eps * expected.norm()
        assert error <= allowed, f"{name} is off by {error:.1e}, allowed {allowed:.1e}"


class Operations(TorchDispatchMode):
    """Note the operations that torch runs, forward and backward."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(function)
        return function(*args, **(kwargs or {}))
