"""Check the properties that layers share, with seeded inputs and weights.

A formula is a function `formula(x, weights, **inputs)`, written as in the paper, that
computes in the dtype of `x`. `weights` are those of the layer, by their names in the
state dict. `inputs` are further arguments of the layer's forward, such as `mask`. A
layer's result is compared with that of the formula in float64.

A copy of a layer may drop what its project does not need. A test that needs a dropped
option or function is skipped.
"""

import copy
import inspect
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

HALVES = (torch.bfloat16, torch.float16)
DTYPES = (torch.float64, torch.float32, *HALVES)

# Allowed errors, in units of the dtype's precision times the largest component. In float64 the formula rounds as
# often as the layer does. RoPE multiplies its own rounding by positions of up to 200.
UNITS = {torch.float64: 4096, torch.float32: 16}
UNITS_ON_CUDA = 10  # times more, as its kernels sum in another order

EPS = 1e-5
OTHER_WEIGHTS = "this copy has other weights, as weight_names shows"

Weights = Mapping[str, Tensor]
Results = dict[str, Tensor | None]  # "result", "gradient of x", "gradient of NAME"
Inputs = Mapping[str, Tensor]  # token_positions, mask
Formula = Callable[..., Tensor]
Cases = dict[str, dict[str, Any]]  # arguments and inputs, by the name of a case


# Inputs and weights.


def randn(*shape: int, seed: int = 0) -> Tensor:
    """Return seeded normal numbers in float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def fill(module: nn.Module) -> None:
    """Set the parameters: matrices that keep the length of a vector, and gains around 1."""
    for seed, parameter in enumerate(module.parameters()):
        values = randn(*parameter.shape, seed=seed)
        if parameter.ndim:
            d_in = parameter.shape[-1]
            values /= math.sqrt(d_in)
        is_gain = parameter.ndim == 1
        if is_gain:
            values += 1
        parameter.data.copy_(values)


def find(layer: Any, name: str) -> Any:
    """Return a class or a function of a layer's file; skip the test if this copy has dropped it."""
    if not hasattr(layer, name):
        pytest.skip(f"{name} is not in this copy")
    return getattr(layer, name)


def require_options(function: Any, *names: str) -> None:
    """Skip the test unless a function, or a class, takes these arguments."""
    parameters = inspect.signature(function).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    takes_any = inspect.Parameter.VAR_KEYWORD in kinds
    if takes_any:
        return
    for name in names:
        if name not in parameters:
            pytest.skip(f"{function.__qualname__} has no {name} in this copy")


def construct(layer: Any, name: str, *arguments: Any, **options: Any) -> Any:
    """Construct a class of a layer's file; skip the test if this copy has dropped the class or an option."""
    return construct_class(find(layer, name), *arguments, **options)


def construct_class(cls: Any, *arguments: Any, **options: Any) -> Any:
    """Construct a class; skip the test if this copy has dropped an option."""
    require_options(cls, *options)
    if "eps" in inspect.signature(cls).parameters:
        options.setdefault("eps", EPS)  # a copy may have another default
    return cls(*arguments, **options)


def build(layer: Any, name: str, *arguments: Any, **options: Any) -> Any:
    """Construct a layer in float64, with the weights of `fill`."""
    return build_class(find(layer, name), *arguments, **options)


def build_class(cls: Any, *arguments: Any, **options: Any) -> Any:
    module = construct_class(cls, *arguments, **options).double()
    fill(module)
    return module


class FunctionLayer(nn.Module):
    """A function as a layer: its further tensors are the weights. The layer ignores all inputs but `x`."""

    def __init__(self, function: Any, *shapes: tuple[int, ...], **options: Any) -> None:
        super().__init__()
        self.function = function
        self.options = options
        weights = [torch.empty(shape, dtype=torch.float64) for shape in shapes]
        self.weights = nn.ParameterList(weights)
        fill(self)

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return self.function(x, *self.weights, **self.options)


def turn_off_dropout(module: nn.Module, x: Tensor, inputs: Inputs) -> None:
    """Put the module into eval mode if it draws random numbers in training."""
    before = torch.get_rng_state()
    trial = copy.deepcopy(module)  # a first call may change the module
    trial(x.detach().clone(), **inputs)
    is_random = not torch.equal(before, torch.get_rng_state())
    if is_random:
        module.eval()


# Comparisons.


def largest(tensor: Tensor) -> float:
    return tensor.detach().abs().max().item() if tensor.numel() else 0.0


def check_shape(name: str, actual: Tensor, expected: Tensor) -> None:
    got = tuple(actual.shape)
    wanted = tuple(expected.shape)
    assert got == wanted, f"{name}: got shape {got}, expected {wanted}"


def describe(name: str, actual: Tensor, expected: Tensor, at: tuple[int, ...]) -> str:
    """Show one component."""
    return f"{name} at {list(at)}: got {actual[at]:.9g}, expected {expected[at]:.9g}"


def index_of_largest(tensor: Tensor) -> tuple[int, ...]:
    index = torch.unravel_index(tensor.argmax(), tensor.shape)
    return tuple(int(i) for i in index)


def check_close(
    name: str, actual: Tensor, expected: Tensor, allowed: float | Tensor
) -> None:
    """Require the absolute error of each component to be at most `allowed`."""
    check_shape(name, actual, expected)
    if not expected.numel():
        return
    got = actual.detach().cpu().double()
    wanted = expected.detach().cpu().double()
    bounds = torch.as_tensor(allowed).expand_as(wanted)
    excess = (got - wanted).abs().nan_to_num(math.inf) - bounds
    worst = index_of_largest(excess)
    component = describe(name, got, wanted, worst)
    assert excess[worst] <= 0, (
        f"{component}, with an error of at most {bounds[worst]:.1e}"
    )


def root_mean_square(tensor: Tensor) -> float:
    return tensor.detach().double().square().mean().sqrt().item()


def check_close_in_half(
    name: str, actual: Tensor, exact: Tensor, rounded: Tensor, floor: float
) -> None:
    """Require at most three times the error of the formula in the same dtype.

    `rounded` is the result of that formula. An error of one rounding is allowed in any
    case, as few components may all be exact in the formula, and so is `floor`.
    """
    check_shape(name, actual, exact)
    if not exact.numel():
        return
    got = actual.detach().cpu().double()
    error = root_mean_square(got - exact)
    usual = root_mean_square(rounded - exact)
    one_rounding = torch.finfo(rounded.dtype).eps * root_mean_square(exact)
    allowed = max(3 * usual, one_rounding, floor)
    worst = index_of_largest((got - exact).abs().nan_to_num(math.inf))
    component = describe(name, got, exact, worst)
    assert error <= allowed, (
        f"{component}; root mean square error {error:.1e}, expected at most {allowed:.1e}"
    )


def half_a_unit(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the error of one rounding to a dtype, and of the float32 computation before it."""
    info = torch.finfo(dtype)
    exponent = exact.abs().clamp(min=info.smallest_normal).log2().floor()
    unit = info.eps * 2.0**exponent
    one_rounding = unit / 2
    computation = 8 * torch.finfo(torch.float32).eps * largest(exact)
    return one_rounding + computation


# The equation.


def add_gradients(
    result: Tensor, x: Tensor, weights: Weights, dtype: torch.dtype
) -> Results:
    """Return the result, and the gradients of x and of each weight, by name.

    They are those for a seeded gradient of the result, rounded to a dtype. What the
    result does not depend on has the gradient None.
    """
    rounded = randn(*result.shape, seed=9).to(dtype)
    gradient_of_result = rounded.to(result)  # its dtype and device
    leaves = {"x": x, **weights}
    gradients = torch.autograd.grad(
        result, list(leaves.values()), gradient_of_result, allow_unused=True
    )
    named: Results = {"result": result.detach()}
    for name, gradient in zip(leaves, gradients, strict=True):
        named[f"gradient of {name}"] = gradient
    return named


class Reference:
    """The result and the gradients of a formula, which a layer must return in a dtype.

    `exact` is in float64. `rounded` is in a half precision, or in float32 and then
    rounded where a half overflows.
    """

    def __init__(
        self,
        formula: Formula,
        module: nn.Module,
        x: Tensor,
        inputs: Inputs,
        dtype: torch.dtype,
    ) -> None:
        self.formula = formula
        self.weights = dict(module.named_parameters())
        self.x = x
        self.inputs = inputs
        self.dtype = dtype
        self.exact = self.evaluate(torch.float64)
        self.rounded = self.evaluate(dtype) if dtype in HALVES else {}
        self.replace_overflows()

    def evaluate(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Evaluate the formula in a dtype; skip the test if the layer has other weights."""
        x = self.x.detach().to(dtype).requires_grad_()
        weights = {}
        for name, weight in self.weights.items():
            weights[name] = weight.detach().to(dtype).requires_grad_()
        try:
            result = self.formula(x, weights, **self.inputs)
        except KeyError:  # the layer lacks a weight of the formula
            pytest.skip(OTHER_WEIGHTS)
        results = {}
        for name, tensor in add_gradients(result, x, weights, self.dtype).items():
            if tensor is None:  # the formula lacks a weight of the layer
                pytest.skip(OTHER_WEIGHTS)
            results[name] = tensor
        return results

    def replace_overflows(self) -> None:
        """Replace results in a half that overflowed by those in float32, rounded."""
        overflowed = [name for name in self.rounded if self.has_overflowed(name)]
        if not overflowed:
            return
        in_float32 = self.evaluate(torch.float32)
        for name in overflowed:
            self.rounded[name] = in_float32[name].to(self.dtype)

    def has_overflowed(self, name: str) -> bool:
        """Return whether the error in a half is more than half of the value, or NaN."""
        exact = self.exact[name]
        if not exact.numel():
            return False
        error = root_mean_square(self.rounded[name] - exact)
        is_usual = error <= root_mean_square(exact) / 2
        return not is_usual

    def check(self, actual: Results) -> None:
        """Require results of the layer to be close to those of the formula."""
        for name, tensor in actual.items():
            if tensor is None:  # the layer's result does not depend on a weight
                tensor = torch.zeros_like(self.exact[name])
            if self.dtype in HALVES:
                self.check_in_half(name, tensor)
            else:
                factor = UNITS_ON_CUDA if tensor.is_cuda else 1
                allowed = UNITS[self.dtype] * factor * self.rounding_of(name)
                check_close(name, tensor, self.exact[name], allowed)

    def check_in_half(self, name: str, tensor: Tensor) -> None:
        # In the gradient of a weight, terms as large as another gradient may cancel out.
        may_cancel = name not in ("result", "gradient of x")
        floor = self.rounding_of(name) if may_cancel else 0.0
        check_close_in_half(name, tensor, self.exact[name], self.rounded[name], floor)

    def rounding_of(self, name: str) -> float:
        """Return the error of rounding the largest component of the result, or of all gradients."""
        if name == "result":
            size = largest(self.exact["result"])
        else:
            gradients = [other for other in self.exact if other != "result"]
            size = max(largest(self.exact[gradient]) for gradient in gradients)
        return torch.finfo(self.dtype).eps * size


def plainly(module: nn.Module, x: Tensor, **inputs: Tensor) -> Tensor:
    return module(x, **inputs)


def in_autocast(module: nn.Module, x: Tensor, **inputs: Tensor) -> Tensor:
    with (
        warnings.catch_warnings(action="error"),
        torch.autocast("cpu", torch.bfloat16),
    ):
        return module(x, **inputs)


def recomputed(module: nn.Module, x: Tensor, **inputs: Any) -> Tensor:
    return checkpoint(module, x, use_reentrant=False, **inputs)


def call_without_changes(
    call: Callable[..., Tensor], module: nn.Module, x: Tensor, inputs: Inputs
) -> Tensor:
    """Call a layer, and require it not to modify what it is passed."""
    passed = {"x": x, **inputs}
    before = {name: tensor.detach().clone() for name, tensor in passed.items()}
    result = call(module, **passed)
    for name, tensor in passed.items():
        assert torch.equal(tensor, before[name]), f"{name} was modified"
    return result


def compare(
    module: nn.Module,
    formula: Formula,
    x: Tensor,
    inputs: Inputs,
    dtype: torch.dtype,
    call: Callable[..., Tensor] = plainly,
    device: str = "cpu",
) -> None:
    """Compare a layer with its formula: result, gradients, and the result in eval mode. No input may be modified.

    `dtype` is the one in which the layer computes.
    """
    reference = Reference(formula, module, x, inputs, dtype)
    turn_off_dropout(module, x, inputs)
    module = module.to(device)
    inputs = {name: tensor.to(device) for name, tensor in inputs.items()}

    x = x.to(device, copy=True).requires_grad_()
    result = call_without_changes(call, module, x, inputs)
    if call is not in_autocast:  # there, the result may be in float32
        assert result.dtype == dtype, f"result: got {result.dtype}, expected {dtype}"
    weights = dict(module.named_parameters())
    reference.check(add_gradients(result, x, weights, dtype))

    module.eval()
    with torch.no_grad():
        # The same numbers as in x, but neither contiguous nor aligned.
        longer = torch.cat((x[..., :1], x), dim=-1)
        at_odd_offset = longer[..., 1:]
        result = call_without_changes(call, module, at_odd_offset, inputs)
    reference.check({"result": result})


def check_equation(
    module: nn.Module, formula: Formula, x: Tensor, dtype: torch.dtype, **inputs: Tensor
) -> None:
    """Compare result and gradients with the formula in float64, also in eval mode and for x at an odd offset.

    bfloat16 and float16 may have three times the error of the formula in that dtype.
    """
    compare(module.to(dtype), formula, x.to(dtype), inputs, dtype)


def check_on_cuda(
    module: nn.Module, formula: Formula, x: Tensor, dtype: torch.dtype, **inputs: Tensor
) -> None:
    """Check the equation on CUDA, if there is a GPU."""
    if not torch.cuda.is_available():
        pytest.skip("CUDA is not available")
    is_torch_2_9 = torch.__version__.startswith("2.9.")
    if is_torch_2_9 and dtype in HALVES and not x.numel():
        # pytorch issue 165944
        pytest.skip("flash attention of torch 2.9 rejects empty batches")
    compare(module.to(dtype), formula, x.to(dtype), inputs, dtype, device="cuda")


def check_autocast(
    module: nn.Module, formula: Formula, x: Tensor, **inputs: Tensor
) -> None:
    """Check the equation in bfloat16, for a layer in float32 under autocast. Warnings are errors."""
    compare(module.float(), formula, x.float(), inputs, torch.bfloat16, in_autocast)


def check_checkpointing(
    module: nn.Module, formula: Formula, x: Tensor, **inputs: Tensor
) -> None:
    """Check the equation if the backward pass computes the layer again."""
    compare(module.float(), formula, x.float(), inputs, torch.float32, recomputed)


def check_rounds_once(
    module: nn.Module, formula: Formula, x: Tensor, dtype: torch.dtype, **inputs: Tensor
) -> None:
    """Require the result in a half precision to be the exact one, rounded."""
    module = module.to(dtype)
    x = x.to(dtype)
    exact = Reference(formula, module, x, inputs, dtype).exact["result"]
    result = module(x, **inputs)
    check_close("result", result, exact, half_a_unit(exact, dtype))


def function_and_formula(
    function: Any, formula: Formula, shapes: Sequence[tuple[int, ...]], options: Any
) -> tuple[FunctionLayer, Formula]:
    """Return a function of tensors of these shapes as a layer, and its formula.

    The first tensor is x. The others are the weights.
    """
    require_options(function, *options)
    layer = FunctionLayer(function, *shapes[1:], **options)
    names = [name for name, _ in layer.named_parameters()]

    def of_weights(x: Tensor, weights: Weights) -> Tensor:
        further_tensors = [weights[name] for name in names]
        return formula(x, *further_tensors, **options)

    return layer, of_weights


def check_function(
    function: Any,
    formula: Formula,
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    **options: Any,
) -> None:
    """Check the equation of a function of tensors of these shapes."""
    layer, of_weights = function_and_formula(function, formula, shapes, options)
    check_equation(layer, of_weights, randn(*shapes[0]), dtype)


def check_function_rounds_once(
    function: Any,
    formula: Formula,
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    **options: Any,
) -> None:
    """Require the result of a function in a half precision to be exact, rounded."""
    layer, of_weights = function_and_formula(function, formula, shapes, options)
    check_rounds_once(layer, of_weights, randn(*shapes[0]), dtype)


# torch.compile.


@contextmanager
def compiled(module: nn.Module, fullgraph: bool) -> Iterator[tuple[Any, Any]]:
    """Yield the compiled module, and what counts its graphs. The graphs run torch's own operations."""
    with warnings.catch_warnings():
        # The compiler's own imports use deprecated functions.
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch._dynamo.testing import CompileCounter

        graphs = CompileCounter()
        torch._dynamo.reset()
        yield torch.compile(module, fullgraph=fullgraph, backend=graphs), graphs
    torch._dynamo.reset()


LENGTHS = (5, 8, 1, 13)  # a compiled layer is called with


def check_compiles(
    module: nn.Module,
    inputs_of: Callable[[int], dict[str, Tensor]],
) -> None:
    """Require at most one graph for the first length, one for all others, and one for a single token.

    `inputs_of` returns the arguments of the layer for a number of tokens.
    """
    module = module.float()
    with compiled(module, fullgraph=True) as (run, graphs):
        for length in LENGTHS:
            inputs = inputs_of(length)
            inputs["x"] = inputs["x"].float()
            require_options(module.forward, *inputs)
            expected = module(**inputs)
            error = 64 * torch.finfo(torch.float32).eps * largest(expected)
            check_close(f"{length} tokens", run(**inputs), expected, error)
    got = graphs.frame_count
    assert got <= 3, f"{got} graphs for {LENGTHS} tokens, expected at most 3"


# Construction.


def check_weight_names(module: nn.Module, *names: str) -> None:
    """Require these keys of the state dict, and no others."""
    keys = set(module.state_dict())
    others = ", ".join(sorted(keys - set(names)))
    missing = ", ".join(sorted(set(names) - keys))
    differences = []
    if others:
        differences.append(f"has the other keys {others}")
    if missing:
        differences.append(f"lacks {missing}")
    assert not differences, f"the state dict {' and '.join(differences)}"


def check_placement(layer: Any, name: str, *arguments: Any, **options: Any) -> None:
    """Require parameters of the dtype and on the device that are passed, and tables on the device.

    Boolean tables may be anywhere.
    """
    if any(True for _ in construct(layer, name, *arguments, **options).parameters()):
        options["dtype"] = torch.bfloat16
    module = construct(layer, name, *arguments, device="meta", **options)
    for key, parameter in module.named_parameters():
        assert parameter.is_meta, f"{key} is on {parameter.device}, expected meta"
        dtype = parameter.dtype
        assert dtype == torch.bfloat16, f"{key} is {dtype}, expected torch.bfloat16"
    for key, table in module.named_buffers():
        is_placed = table.is_meta or table.dtype == torch.bool
        assert is_placed, f"{key} is on {table.device}, expected meta"


def check_matrix_sizes(name: str, module: nn.Module, expected: int) -> None:
    """Require this number of components in all matrices of a layer, which `name` describes."""
    matrices = [weight for weight in module.parameters() if weight.ndim > 1]
    got = sum(matrix.numel() for matrix in matrices)
    assert got == expected, (
        f"the matrices of {name} have {got} components, expected {expected}"
    )


def check_initial_weights(module: nn.Module, gain: float = 1.0) -> None:
    """Require one value of all gains, and matrices from a normal of variance 2 / (d_in + d_out).

    The normal is cut at three deviations. The same holds after `reset_parameters`,
    where every parameter was NaN.
    """
    for name, _ in module.named_parameters():
        if name.rpartition(".")[2] != "weight":  # for example, a bias
            pytest.skip(OTHER_WEIGHTS)
    for name, parameter in module.named_parameters():
        check_initial(name, parameter, gain)
    for parameter in module.parameters():
        parameter.data.fill_(math.nan)
    find(module, "reset_parameters")()
    for name, parameter in module.named_parameters():
        check_initial(f"{name} after reset", parameter, gain)


DEVIATION = 0.98658  # of a normal of deviation 1 that is cut at 3


def check_initial(name: str, parameter: nn.Parameter, gain: float) -> None:
    """Require a gain, or a matrix, to have the initial values of its kind."""
    weight = parameter.detach().double()
    if weight.ndim == 1:
        check_close(name, weight, torch.full_like(weight, gain), 0)
        return
    d_in_and_out = sum(weight.shape)
    unit = weight / math.sqrt(2 / d_in_and_out)
    # Five standard errors are allowed. The one of a deviation is 0.67 / sqrt(n) for a kurtosis of 2.83.
    error = 5 / math.sqrt(weight.numel())
    check_close(f"mean of {name}", unit.mean(), torch.tensor(0.0), error)
    expected = torch.tensor(DEVIATION)
    check_close(f"deviation of {name}", unit.std(), expected, 0.67 * error)
    furthest = largest(unit)
    assert furthest <= 3 + 1e-6, f"{name}: got {furthest} deviations, expected 3"


# Rejections.


def show(value: Any) -> str:
    if isinstance(value, Tensor):
        numbers = f"{value.tolist()} of " if value.numel() <= 8 else ""
        return f"{numbers}{value.dtype} of shape {tuple(value.shape)}"
    return str(getattr(value, "__name__", value))


def show_call(function: Any, arguments: dict[str, Any]) -> str:
    """Return a call as text, such as `compiled SwiGLU(x=torch.float32 of shape (2, 5))`."""
    called = function
    prefix = ""
    if hasattr(function, "_orig_mod"):  # a compiled layer has this attribute
        called = function._orig_mod
        prefix = "compiled "
    if isinstance(called, nn.Module):
        called = type(called)
    shown = [f"{option}={show(value)}" for option, value in arguments.items()]
    return f"{prefix}{called.__name__}({', '.join(shown)})"


def message_of(
    errors: tuple[type[Exception], ...], function: Any, arguments: dict[str, Any]
) -> str | None:
    """Return the message of the error that a call raises, or None."""
    try:
        function(**arguments)
    except errors as error:
        return str(error)
    return None


def check_rejects(
    function: Any,
    value: Any,
    arguments: dict[str, Any],
    errors: tuple[type[Exception], ...] = (ValueError,),
) -> None:
    """Require an error, a ValueError by default, whose message has a value, unless that is None."""
    call = show_call(function, arguments)
    message = message_of(errors, function, arguments)
    assert message is not None, f"{call} was accepted, expected an error"
    if value is not None:
        number = rf"(?<![\w.]){re.escape(str(value))}(?!\w|\.\d)"
        is_named = re.search(number, message)
        assert is_named, f"{call} raised {message!r}, expected {value} in the message"


def check_rejects_option(
    layer: Any, name: str, valid: dict[str, Any], option: str, value: Any
) -> None:
    """Require a layer's constructor to reject a value in place of a valid one, and to name it."""
    cls = find(layer, name)
    require_options(cls, option)
    check_rejects(cls, value, {**valid, option: value})


def check_rejects_input(
    module: nn.Module, value: Any, inputs: dict[str, Tensor], by_torch: bool = False
) -> None:
    """Require a layer to reject an input and to name a value, also where it is compiled.

    `by_torch`: the compiled layer may raise torch's own error.
    """
    require_options(module.forward, *inputs)
    check_rejects(module, value, inputs)
    with compiled(module, fullgraph=False) as (run, _), torch.no_grad():
        if by_torch:
            errors = (RuntimeError, IndexError, ValueError)
            check_rejects(run, None, inputs, errors)
        else:
            check_rejects(run, value, inputs)


# Layers over a sequence.


def first_tokens(inputs: Inputs, count: int) -> Inputs:
    """Return the inputs of the first tokens of a sequence."""
    tokens = slice(count)
    first = {}
    for name, tensor in inputs.items():
        if name == "mask":
            first[name] = tensor[..., tokens, tokens]
        else:
            first[name] = tensor[..., tokens]
    return first


def check_same(name: str, actual: Tensor, expected: Tensor) -> None:
    """Compare two results of one layer in float64."""
    allowed = UNITS[torch.float64] * torch.finfo(torch.float64).eps * largest(expected)
    check_close(name, actual, expected, allowed)


def check_causality(module: nn.Module, x: Tensor, **inputs: Tensor) -> None:
    """Require the result for the first tokens not to depend on later tokens."""
    turn_off_dropout(module, x, inputs)
    result = module(x, **inputs)
    length = x.shape[-2]
    for count in range(1, length):
        with_later = result[..., :count, :]
        alone = module(x[..., :count, :], **first_tokens(inputs, count))
        check_same(f"the first {count} tokens with later ones", with_later, alone)


def check_masks(module: nn.Module, x: Tensor, **inputs: Tensor) -> None:
    """Require a mask of True to change nothing, and a mask to hide what keys contain."""
    require_options(module.forward, "mask")
    turn_off_dropout(module, x, inputs)
    check_mask_of_true(module, x, inputs)
    check_hidden_tokens(module, x, inputs)


def check_mask_of_true(module: nn.Module, x: Tensor, inputs: Inputs) -> None:
    """Require a mask that hides nothing to have no effect."""
    length = x.shape[-2]
    everything = torch.ones(length, length, dtype=torch.bool)
    with_mask = module(x, mask=everything, **inputs)
    without_mask = module(x, **inputs)
    check_same("with a mask of True", with_mask, without_mask)


def check_hidden_tokens(module: nn.Module, x: Tensor, inputs: Inputs) -> None:
    """Hide the first two tokens from all queries; their content must not change any other result."""
    hidden = slice(2)
    others = slice(2, None)
    mask = torch.ones(1, x.shape[-2], dtype=torch.bool)  # one row for all queries
    mask[:, hidden] = False
    changed = x.clone()
    changed[..., hidden, :] = randn(*changed[..., hidden, :].shape, seed=7)
    expected = module(x, mask=mask, **inputs)[..., others, :]
    actual = module(changed, mask=mask, **inputs)[..., others, :]
    check_same("after a change of two hidden tokens", actual, expected)


def check_relative_positions(module: nn.Module, x: Tensor) -> None:
    """Require a layer with RoPE to give the same result for positions that are all 150 further on."""
    require_options(module.forward, "token_positions")
    turn_off_dropout(module, x, {})
    length = x.shape[-2]
    further_on = module(x, token_positions=torch.arange(length) + 150)
    check_same("150 positions further on", further_on, module(x))
