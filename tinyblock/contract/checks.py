"""A case is a layer with its options, its formula, and an input."""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from .target import foreign, found, load

EPS = 1e-5
THETA = 100.0
TABLE = 200  # positions
HALVES = (torch.bfloat16, torch.float16)
# The allowed error, in units of the dtype's precision times the length of the result.
# In float64 the formula rounds, too, as RoPE does with positions of up to 200.
VARIADIC = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
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


class Weights(dict[str, Tensor]):
    def __missing__(self, name):
        names = ", ".join(self) or "none"
        pytest.fail(
            f"the layer must have the weight {name}, got {names}", pytrace=False
        )


@dataclass
class Case:
    """`formula(x, weights, **inputs, **options)` is the equation, in the dtype of x.

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
    is_common: bool = True  # every right layer takes this input

    def construct(self, **changed):
        """Construct the layer; skip the test if it lacks an option or an input."""
        file, _, name = self.layer.partition(".")
        layer = getattr(load(file), name, None)
        if layer is None:
            pytest.skip(f"there is no {self.layer}")
        options = {**self.options, **changed}
        if not isinstance(layer, type):
            self.require(layer, {**options, **self.inputs}, given=1 + len(self.weights))
            return Function(layer, self.weights, options)
        if file in foreign and options.get("rope"):
            options = with_rope_of(layer, options)
        self.require(layer, options)
        self.require(layer.forward, self.inputs, given=2)  # self and x
        if (
            "eps" in inspect.signature(layer).parameters
        ):  # a copy may change the default
            options.setdefault("eps", EPS)
        return layer(**options)

    def require(self, function, arguments, given=0):
        """Skip the test unless a function takes these, and requires no others."""
        takes = inspect.signature(function).parameters
        open_ended = {each.kind for each in takes.values()} & VARIADIC
        for name in arguments:
            if name not in takes and not open_ended:
                pytest.skip(f"{self.layer} has no {name}")
        for name, each in list(takes.items())[given:]:
            is_required = each.default is each.empty and each.kind not in VARIADIC
            if is_required and name not in arguments:
                pytest.skip(f"{self.layer} requires {name}")

    def build(self, device="cpu", dtype=torch.float64):
        """Construct the layer with seeded gains around 1 and matrices that keep lengths."""
        module = self.construct().eval()
        for seed, weight in enumerate(module.parameters()):
            values = randn(*weight.shape, seed=seed + 1) / math.sqrt(weight.shape[-1])
            weight.data = values + 1 if weight.ndim == 1 else values
            if dtype == torch.float32:  # without a cast, which destroys a complex table
                weight.data = weight.data.float()
        return module.to(device, None if dtype == torch.float32 else dtype)

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
        weights = Weights()
        for name, weight in module.named_parameters():
            exact = weight.detach().cpu().double()
            weights[name] = exact.requires_grad_(weight.requires_grad)
        result = self.formula(x, weights, **self.inputs, **self.options)
        return with_gradients(result, x, weights)

    def check(self, result, module, x, dtype):
        """Compare a result and its gradients with those of the formula."""
        actual = with_gradients(result, x, dict(module.named_parameters()))
        expected = self.exact(module, x)
        # Terms of a gradient that are as large as another gradient may cancel out.
        largest = max(expected[name].norm() for name in expected if name != "result")
        for name, tensor in actual.items():
            size = expected["result"].norm() if name == "result" else largest
            allowed = UNITS[dtype] * torch.finfo(dtype).eps * size
            check_close(f"{name} in {dtype}", tensor, expected[name], allowed)


def case_of(layer, formula, *shape, inputs=None, is_common=True, **options):
    """Return a case of a layer whose first option is the last size of x."""
    options = {"d_model": shape[-1], **options}
    return Case(layer, formula, shape, options, inputs or {}, is_common=is_common)


def call(module, arguments):
    """Call a layer, whatever the name of its first argument."""
    inputs = dict(arguments)
    return module(inputs.pop("x"), **inputs)


def with_rope_of(layer, options):
    """Give a layer that is no copy the RoPE beside it, or the options of one."""
    table = {"theta": THETA, "max_seq_len": TABLE}
    if "rope" not in inspect.signature(layer).parameters:
        others = {name: value for name, value in options.items() if name != "rope"}
        return {**others, **table}
    if "rope" not in found:
        return options
    d_k = options.get("d_head") or options["d_model"] // options["num_heads"]
    rope = load("rope").RotaryPositionalEmbedding(d_k=d_k, **table)
    return {**options, "rope": rope}


def with_gradients(result, x, weights):
    """Return a result, and the gradients of x and the weights, by name.

    A function of frozen weights may have no gradient, as an adapter has none.
    """
    # The gradient of the result is the same number in each dtype.
    of_result = randn(*result.shape, seed=9).bfloat16().to(result)
    trained = {name: weight for name, weight in weights.items() if weight.requires_grad}
    if weights and not trained and not result.requires_grad:
        return {"result": result}
    leaves = {"x": x, **trained}
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
    if got.shape != wanted.shape:
        shapes = f"got {tuple(got.shape)}, expected {tuple(wanted.shape)}"
        pytest.fail(f"shape of {name}: {shapes}", pytrace=False)
    error = got - wanted
    if not error.norm() <= allowed:  # also if it is NaN
        worst = error.abs().argmax()
        at = [int(i) for i in torch.unravel_index(worst, error.shape)]
        values = (
            f"got {got.flatten()[worst]:.9g}, expected {wanted.flatten()[worst]:.9g}"
        )
        length = f"the error's length is {error.norm():.2g}, allowed {allowed:.2g}"
        pytest.fail(f"{name} at {at}: {values}; {length}", pytrace=False)
