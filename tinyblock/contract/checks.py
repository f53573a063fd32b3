"""A case of a layer: its options, an input, and the formula that gives the result."""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from .target import exists, is_foreign, load

EPS = 1e-5
THETA = 50.0
TABLE = 200  # positions
HALVES = (torch.bfloat16, torch.float16)
# The allowed error, in units of the dtype's precision times the length of the result.
# In float64 the formula rounds, too, as RoPE does with positions of up to 200.
UNITS = {torch.float64: 4096, torch.float32: 16, torch.bfloat16: 4, torch.float16: 4}

CUT = "detach, .data, or no_grad cuts the graph"


def randn(*shape, seed=0):
    """Return seeded normal numbers in float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


class Function(nn.Module):
    """A function as a layer, which has its tensors after x as weights."""

    def __init__(self, function, shapes, options):
        super().__init__()
        self.function = function
        self.options = options
        self.weights = nn.ParameterList(map(torch.empty, shapes))

    def forward(self, x, **inputs):
        return self.function(x, *self.weights, **inputs, **self.options)


class Weights(dict[str, Tensor]):
    """The weights of a layer, by their names in its state dict."""

    def get_of(self, name, *shape):
        """Return a weight, which must have this shape."""
        if name not in self:
            fail(
                f"the layer must have the parameter {name}, got "
                f"{', '.join(self) or None}"
            )
        weight = self[name]
        if weight.shape != shape:
            fail(f"{name} must have the shape {shape}, got {tuple(weight.shape)}")
        return weight

    def of(self, part):
        """Return the weights of a part of the layer, by their names in that part."""
        prefix = f"{part}."
        weights = Weights(
            (name.removeprefix(prefix), weight)
            for name, weight in self.items()
            if name.startswith(prefix)
        )
        if not weights:
            fail(f"the layer must have the part {part}, got {', '.join(self)}")
        return weights


@dataclass
class Case:
    """A class or function of a layer's file, with options and an input.

    `formula(x, weights, **inputs, **options)` is the equation, in the dtype of x.
    `weights` are the layer's Weights. The formula of a function takes them one by one,
    as the function does.
    """

    layer: str  # the name of the file, such as "rope"
    name: str  # of the class or function, such as "apply_rope"
    formula: Callable[..., Tensor]
    shape: tuple[int, ...]  # of x
    options: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=dict)  # token_positions, mask
    weights: list[tuple[int, ...]] | None = None  # the shapes of a function's
    x_scale: float = 1.0
    is_common: bool = True  # every correct layer, whoever wrote it, takes this input

    def find(self):
        """Return the class or function, or None if the file does not have it."""
        return getattr(load(self.layer), self.name, None)

    def construct(self, **changed):
        """Construct the layer, for evaluation.

        The case is skipped if the layer lacks an option or an input.
        """
        layer = self.find()
        if layer is None:
            pytest.skip(f"there is no {self.name} in {self.layer}.py")
        options = {**self.options, **changed}
        if self.weights is not None:
            self.require(layer, "x", *self.weights, **options, **self.inputs)
            return Function(layer, self.weights, options).eval()
        if isinstance(options.get("rope"), Rope) and is_foreign(self.layer):
            use_rope_of(layer, options)
        # A copy may change the default.
        if "eps" in inspect.signature(layer).parameters:
            options.setdefault("eps", EPS)
        self.require(layer, **options)
        self.require(layer.forward, "self", "x", **self.inputs)
        return layer(**options).eval()

    def require(self, function, *arguments, **named):
        """Skip the case if a function takes other arguments than these."""
        try:
            inspect.signature(function).bind(*arguments, **named)
        except TypeError as error:
            pytest.skip(f"{self.name} takes other arguments: {error}")

    def build(self, device="cpu", dtype=torch.float64):
        """Construct the layer with seeded norm weights around 1 and matrices that keep lengths."""
        module = self.construct()
        for seed, weight in enumerate(module.parameters(), start=1):
            values = randn(*weight.shape, seed=seed) / math.sqrt(weight.shape[-1])
            weight.data.copy_(values + 1 if weight.ndim == 1 else values)
        if dtype != torch.float32:  # a cast destroys a complex table
            module.to(dtype)
        return module.to(device)

    def arguments(self, device="cpu", dtype=torch.float64):
        """Return x and copies of the other inputs, which a wrong layer may overwrite."""
        x = (self.x_scale * randn(*self.shape)).to(device, dtype).requires_grad_()
        inputs = self.inputs.items()
        return x, {name: tensor.to(device, copy=True) for name, tensor in inputs}

    def run(self, device="cpu", dtype=torch.float32, module=None):
        """Return the result of a layer, or of a new one, with the layer and x."""
        module = module or self.build(device, dtype)
        x, inputs = self.arguments(device, dtype)
        return module(x, **inputs), module, x

    def first(self, count):
        """Return x and the other inputs for the first tokens, in float32."""
        x, inputs = self.arguments(dtype=torch.float32)
        for name, tensor in inputs.items():
            queries = tensor[..., :count, :] if name == "mask" else tensor
            inputs[name] = queries[..., :count].contiguous()
        return x.data.expand(1, *x.shape)[..., :count, :].contiguous(), inputs

    def exact(self, module, x):
        """Return the result of the formula in float64."""
        result, _, _ = self._run_exactly(module, x)
        return result.detach()

    def exact_with_gradients(self, module, x):
        """Return the result of the formula, and gradients of x and of trained weights.

        A frozen parameter that the formula does not read may be a table, such as RoPE's.
        """
        result, x, weights = self._run_exactly(module, x)
        gradients = gradients_of(result, x, weights)
        parameters = dict(module.named_parameters())
        trained = [name for name, each in parameters.items() if each.requires_grad]
        for name in parameters:
            is_in_equation = gradients[name] is not None
            if name in trained and not is_in_equation:
                fail(f"the layer has the weight {name}, which is not in the equation")
            if trained and is_in_equation and name not in trained:
                fail(f"{name} must require a gradient, as the other weights do")
        return result.detach(), {name: gradients[name] for name in ("x", *trained)}

    def _run_exactly(self, module, x):
        """Return the result, and x and the weights that it was computed from."""
        x = x.detach().cpu().double().requires_grad_()
        weights = Weights()
        for name, weight in module.named_parameters():
            weights[name] = weight.detach().cpu().double().requires_grad_()
        named = [weights] if self.weights is None else weights.values()
        return self.formula(x, *named, **self.inputs, **self.options), x, weights

    def check(self, result, module, x, dtype):
        """Compare a result and its gradients with those of the formula."""
        self.check_dtype(result, dtype)
        self.check_numbers(result, module, x, dtype)

    def check_dtype(self, result, dtype):
        if result.dtype != dtype:
            expected, got = name_of(dtype), name_of(result.dtype)
            fail(f"the result must have the dtype of x, {expected}, got {got}")

    def check_numbers(self, result, module, x, dtype):
        """Compare a result and its gradients, as exact as a dtype, with the formula."""
        fresh, _ = self.arguments(dtype=x.dtype)  # a wrong layer may have overwritten x
        exact, gradients = self.exact_with_gradients(module, fresh)
        unit = unit_of(dtype)
        if error := error_of(result, exact, unit * exact.norm()):
            fail(f"result in {name_of(dtype)} {error}")
        # Terms of a gradient that are as large as another gradient may cancel out.
        largest = max(gradient.norm() for gradient in gradients.values())
        actual = gradients_of(result, x, dict(module.named_parameters()))
        for name, gradient in actual.items():
            if gradient is None:
                if len(actual) == 1:
                    return  # x has none, which test_gradient_of_x says
                fail(f"{name} has no gradient: {CUT}")
            title = f"gradient of {name} in {name_of(dtype)}"
            check_close(title, gradient, gradients[name], unit * largest)


def case_of(
    layer,
    name,
    formula,
    *,
    axes=(2, 7),
    positions=None,
    mask=None,
    x_scale=1.0,
    is_common=True,
    **options,
):
    """Return a case of a class. x has these axes, and then its d_model or d_k."""
    size = options.get("d_model") or options["d_k"]
    inputs = {"token_positions": positions, "mask": mask}
    return Case(
        layer,
        name,
        formula,
        shape=(*axes, size),
        options=options,
        inputs={name: each for name, each in inputs.items() if each is not None},
        x_scale=x_scale,
        is_common=is_common,
    )


@dataclass
class Rope:
    """RoPE as an option of other layers, which is called as `rope(x, token_positions)`.

    A layer that is not a copy of tinyblock's has RoPE of this theta in its own way.
    """

    formula: Callable[..., Tensor]
    theta: float = THETA

    def __call__(self, x, token_positions=None):
        return self.formula(x, token_positions, theta=self.theta)


def use_rope_of(layer, options):
    """Give a layer that is not a copy the RoPE beside it, or the options of one."""
    table = {"theta": options["rope"].theta, "max_seq_len": TABLE}
    if "rope" not in inspect.signature(layer).parameters:
        del options["rope"]
        options.update(table)
        return
    if not exists("rope"):
        return  # the formula
    rope = load("rope").RotaryPositionalEmbedding
    d_k = options.get("d_head") or options["d_model"] // options["num_heads"]
    options["rope"] = rope(d_k=d_k, **table)


def gradients_of(result, x, weights):
    """Return the gradients of x and of trained weights: None where nothing reads one.

    An adapter copies its weights, so all are frozen.
    """
    trained = {name: weight for name, weight in weights.items() if weight.requires_grad}
    leaves = {"x": x, **trained}
    if not result.requires_grad:
        return dict.fromkeys(leaves)
    # The gradient of the result is the same number in each dtype.
    of_result = randn(*result.shape, seed=9).bfloat16().to(result)
    gradients = torch.autograd.grad(
        result, list(leaves.values()), of_result, allow_unused=True
    )
    return dict(zip(leaves, gradients, strict=True))


def for_each(cases, check, must_run=False):
    """Check each case. Fail if one fails, and begin with the title of the first.

    A case is left out if the layer lacks its option or input. If no case is left, the
    test is skipped, or fails if one must run.
    """
    failures = {}
    reasons = []
    for title, case in cases.items():
        try:
            check(case)
        except pytest.skip.Exception as reason:
            reasons.append(reason.msg)
        except (Exception, pytest.fail.Exception) as failure:
            failures[title] = failure
    ran = len(cases) - len(reasons)
    if failures:
        fail_with(failures, ran)
    if not ran:
        why = "; ".join(dict.fromkeys(reasons))
        if must_run:
            fail(f"no case of it ran: {why}")
        pytest.skip(why)


def fail_with(failures, ran):
    """Fail with the first of several failures. `tinyblock verify` reads all of them."""
    title, first = next(iter(failures.items()))
    is_error = not isinstance(first, pytest.fail.Exception)
    message = f"{type(first).__name__}: {first}" if is_error else first.msg
    failure = pytest.fail.Exception(
        f"{title} ({len(failures)} of {ran} cases fail): {message}", pytrace=is_error
    )
    failure.failures, failure.ran = failures, ran
    raise failure from (first if is_error else None)


def check_close(name, actual, expected, allowed):
    """Require the norm of the error to be at most `allowed`."""
    if error := error_of(actual, expected, allowed):
        fail(f"{name} {error}")


def error_of(actual, expected, allowed):
    """Describe an error whose norm is larger than `allowed`; otherwise return ""."""
    if actual.shape != expected.shape:
        return f"has the shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    error = actual.detach().cpu().double() - expected
    if error.norm() <= allowed:  # not if it is NaN
        return ""
    worst = error.abs().argmax()  # a NaN, if there is one
    at = [int(i) for i in torch.unravel_index(worst, error.shape)]
    values = f"{actual.flatten()[worst]:.9g}, expected {expected.flatten()[worst]:.9g}"
    norm = f"the error's norm is {error.norm():.2g}, allowed {allowed:.2g}"
    return f"at {at}: got {values}; {norm}"


def name_of(dtype):
    """Return "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def unit_of(dtype):
    """Return the allowed error of a result of length 1."""
    return UNITS[dtype] * torch.finfo(dtype).eps


def fail(message):
    """Fail with a message alone, because the traceback would show the contract's code."""
    raise pytest.fail.Exception(message, pytrace=False)
