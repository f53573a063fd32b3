"""A case is a layer with its options, its formula, and an input."""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from .target import load

EPS = 1e-5
HALVES = (torch.bfloat16, torch.float16)
# The allowed error, in units of the dtype's precision times the length of the result.
# In float64 the formula rounds, too, as RoPE does with positions of up to 200.
UNITS = {torch.float64: 4096, torch.float32: 16, torch.bfloat16: 4, torch.float16: 4}


def randn(*shape, seed=0):
    """Return seeded normal numbers in float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


class Function(nn.Module):
    """A function as a layer. Its tensors after x are the weights "0", "1", ..."""

    def __init__(self, function, shapes, options):
        super().__init__()
        self.function = function
        self.options = options
        for number, shape in enumerate(shapes):
            self.register_parameter(str(number), nn.Parameter(torch.empty(shape)))

    def forward(self, x, **inputs):
        return self.function(x, *self.parameters(), **inputs, **self.options)


@dataclass
class Case:
    """`formula(x, weights, **inputs)` is the equation, in the dtype of x.

    `weights` has the layer's parameters by their names in the state dict.
    """

    layer: str  # such as "rope.apply_rope"
    formula: Callable[..., Tensor]
    shape: tuple[int, ...]  # of x
    options: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=dict)  # token_positions, mask
    weights: list[tuple[int, ...]] = field(default_factory=list)  # of a function
    scale: float = 1.0  # of x
    rounds_once: bool = False

    def construct(self, **changed):
        """Construct the layer; skip the test if a copy has dropped it, or an option."""
        file, _, name = self.layer.partition(".")
        layer = getattr(load(file), name, None)
        if layer is None:
            pytest.skip(f"{self.layer} is not in this copy")
        options = {**self.options, **changed}
        known = inspect.signature(layer).parameters
        passes_on = any(each.kind is each.VAR_KEYWORD for each in known.values())
        for option in options:
            if option not in known and not passes_on:
                pytest.skip(f"{self.layer} has no {option} in this copy")
        if not isinstance(layer, type):
            return Function(layer, self.weights, options)
        if "eps" in known:  # whose default a copy may have changed
            options.setdefault("eps", EPS)
        return layer(**options)

    def build(self, device="cpu", dtype=torch.float64):
        """Construct the layer with seeded gains around 1 and matrices that keep lengths."""
        module = self.construct().eval()
        for seed, weight in enumerate(module.parameters()):
            values = randn(*weight.shape, seed=seed + 1) / math.sqrt(weight.shape[-1])
            weight.data = values + 1 if weight.ndim == 1 else values
        return module.to(device, dtype)

    def arguments(self, device="cpu", dtype=torch.float64):
        """Return x and the other inputs."""
        x = (self.scale * randn(*self.shape)).to(device, dtype)
        arguments = {"x": x.requires_grad_()}
        for name, tensor in self.inputs.items():
            arguments[name] = tensor.to(device)
        return arguments

    def first(self, count):
        """Return x and the other inputs for the first tokens, in float32."""
        x = self.arguments(dtype=torch.float32)["x"].data
        first = {"x": x[..., :count, :]}
        for name, tensor in self.inputs.items():
            tokens = tensor[..., :count]
            first[name] = tokens[..., :count, :] if name == "mask" else tokens
        return {name: tensor.contiguous() for name, tensor in first.items()}

    def exact(self, module, x):
        """Return the result and gradients of the formula in float64."""
        x = x.detach().cpu().double().requires_grad_()
        weights = {}
        for name, weight in module.named_parameters():
            weights[name] = weight.detach().cpu().double().requires_grad_()
        return with_gradients(self.formula(x, weights, **self.inputs), x, weights)

    def check(self, result, module, x, dtype):
        """Compare a result and its gradients with those of the formula."""
        actual = with_gradients(result, x, dict(module.named_parameters()))
        expected = self.exact(module, x)
        # Terms of a gradient that are as large as another gradient may cancel out.
        largest = max(expected[name].norm() for name in expected if name != "result")
        for name, tensor in actual.items():
            size = expected["result"].norm() if name == "result" else largest
            allowed = UNITS[dtype] * torch.finfo(dtype).eps * size
            check_close(name, tensor, expected[name], allowed)


@dataclass
class Layer:
    """What holds for a layer in all of its cases."""

    case: Case  # in which properties other than the equation are tested
    size: int  # the number of components of all weights
    rejected: list[tuple[str, Any]] = field(default_factory=list)  # options


def with_gradients(result, x, weights):
    """Return a result, and the gradients of x and the weights, by name."""
    # The gradient of the result is the same number in each dtype.
    of_result = randn(*result.shape, seed=9).bfloat16().to(result)
    leaves = {"x": x, **weights}
    gradients = torch.autograd.grad(
        result, list(leaves.values()), of_result, materialize_grads=True
    )
    named = {"result": result}
    for name, gradient in zip(leaves, gradients, strict=True):
        named[f"gradient of {name}"] = gradient
    return named


def check_close(name, actual, expected, allowed):
    """Require the length of the error to be at most `allowed`."""
    got = actual.detach().cpu().double()
    wanted = expected.detach()
    assert got.shape == wanted.shape, f"{name} has shape {tuple(got.shape)}"
    error = got - wanted
    if not error.norm() <= allowed:  # also if it is NaN
        worst = error.abs().argmax()
        at = [int(i) for i in torch.unravel_index(worst, error.shape)]
        values = (
            f"got {got.flatten()[worst]:.9g}, expected {wanted.flatten()[worst]:.9g}"
        )
        pytest.fail(f"{name} at {at}: {values}", pytrace=False)
