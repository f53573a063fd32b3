"""What holds for every layer. The page of a layer derives its class, which pytest collects.

A test loops over the cases of the page. Its failure begins with the title of the first
case that fails. The mark `numbers` is on what every correct layer does, whoever wrote it;
the other tests are promises of tinyblock.
"""

import contextlib
import copy
import math
import pickle
import re
from typing import Any

import pytest
import torch

from .checks import (
    CUT,
    UNITS,
    check_close,
    fail,
    for_each,
    gradients_of,
    name_of,
    unit_of,
)
from .target import is_foreign

numbers = pytest.mark.numbers
# Every correct layer computes in float32.
DTYPES = [
    pytest.param(
        dtype, id=name_of(dtype), marks=numbers if dtype == torch.float32 else ()
    )
    for dtype in UNITS
]


class EveryLayer:
    cases: dict[str, Any] = {}
    typical: list[str] = []  # the titles of one case or more for each class
    rejected: dict[str, tuple[Any, ...]] = {}  # wrong values of each option

    def every(self):
        """Return the cases, or those that every correct layer takes if it is no copy."""
        return {
            title: case
            for title, case in self.cases.items()
            if case.is_common or not is_foreign(case.layer)
        }

    def each_typical(self):
        return {title: self.cases[title] for title in self.typical}

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_equation(self, dtype, device):
        """The result and all gradients are those of the formula in float64."""

        def check(case):
            case.check(*case.run(device, dtype), dtype)

        for_each(self.every(), check, must_run=True)

    @numbers
    def test_gradient_of_x(self):
        """There is one. Otherwise, none is tested: an adapter may cut the graph."""

        def check(case):
            result, _, x = case.run()
            if gradients_of(result, x, {})["x"] is None:
                fail(f"x has no gradient: {CUT}")

        for_each(self.every(), check)

    @pytest.mark.filterwarnings("error")
    def test_equation_under_autocast(self, device):
        """A layer in float32 is as exact as one in bfloat16, and does not warn."""

        def check(case):
            with torch.autocast(device, torch.bfloat16):
                ran = case.run(device)
            case.check_numbers(*ran, torch.bfloat16)

        for_each(self.every(), check)

    @numbers
    def test_earlier_calls_change_nothing(self):
        """A layer keeps nothing of its first call, such as a mask of that call's size."""
        for_each(self.every(), check_after_another_call)

    @numbers
    def test_calls_change_nothing(self):
        """A call and its backward pass change neither the inputs nor the next call."""

        def check(case):
            module = case.build(dtype=torch.float32)
            x, inputs = case.arguments(dtype=torch.float32)
            before = copy.deepcopy({"x": x, **inputs})
            first = module(x, **inputs)
            if first.requires_grad:
                first.sum().backward()
            for name, tensor in {"x": x, **inputs}.items():
                check_same(f"after the call, {name}", tensor, before[name])
            module.train()  # dropout fails only here: -k "not calls_change_nothing"
            check_same("the second result", module(x, **inputs), first)

        for_each(self.every(), check)

    def test_any_strides(self, device):
        """The result is the same for an x that is not contiguous."""

        def check(case):
            module = case.build(device, torch.float32)
            x, inputs = case.arguments(device, torch.float32)
            turned = x.detach().movedim(0, -1).contiguous().movedim(-1, 0)
            turned.requires_grad_()
            case.check(module(turned, **inputs), module, turned, torch.float32)

        for_each(self.every(), check)

    def test_reset_parameters(self):
        """A walk over the modules makes all weights and tables new."""

        def check(case):
            torch.manual_seed(0)
            module = case.construct()
            for tensor in (*module.parameters(), *module.buffers()):
                tensor.data.fill_(math.nan)
            initialize(module)
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                if not tensor.isfinite().all():
                    fail(f"reset_parameters must fill {name}")
            check_initial_weights(module)

        for_each(self.each_typical(), check)

    def test_rejects_options(self):
        """The message has the value."""

        def check(case):
            for option, values in self.rejected.items():
                for value in values:
                    check_rejected(case, option, value)

        for_each(self.each_typical(), check)

    def test_built_on_meta(self, device):
        """After to_empty and pickle, the layer computes what its state dict says."""

        def check(case):
            expected = case.build(device, torch.float32)
            state = expected.state_dict()
            names = list(dict(expected.named_parameters()))
            if list(state) != names:
                fail(f"the state dict must have {names}, got {list(state)}")
            with torch.device("meta"):
                require_weights(case.construct(), "meta, torch.float32")
            options = {"dtype": torch.bfloat16} if state else {}
            module = case.construct(device="meta", **options)
            require_weights(module, "meta, torch.bfloat16")
            x, inputs = case.arguments("meta", torch.bfloat16)
            result = module(x, **inputs)
            if not result.is_meta:
                fail(f"the result must be on meta, got {result.device}")
            module = module.to_empty(device=device).float()
            initialize(module)
            # By the protocol of copy.deepcopy.
            module = pickle.loads(pickle.dumps(module.cpu())).to(device)
            module.load_state_dict(state)
            x, inputs = case.arguments(device, torch.float32)
            check_same("result", module(x, **inputs), expected(x, **inputs))

        for_each(self.each_typical(), check)

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own imports
    def test_compiles_to_one_graph(self):
        """One graph for a single token, and one for all other lengths."""
        from torch._dynamo.testing import CompileCounter

        def check(case):
            module = case.build(dtype=torch.float32)
            graphs = CompileCounter()
            torch._dynamo.reset()
            compiled = torch.compile(module, fullgraph=True, backend=graphs)
            # torch takes the length for a constant in the first graph, then for a variable.
            for length in (1, 7, 4):
                x, inputs = case.first(length)
                expected = module(x, **inputs).detach().double()
                name = f"compiled result for {length} tokens"
                result = compiled(x, **inputs)
                check_close(name, result, expected, 1e-5 * expected.norm())
            if graphs.frame_count != 2:
                fail(f"torch.compile must make 2 graphs, got {graphs.frame_count}")

        for_each(self.each_typical(), check)

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own imports
    def test_compiles_in_half_precision(self):
        """Compiled code returns the dtype of x, with the numbers of eager code."""

        def check(case):
            module = case.build(dtype=torch.bfloat16)
            x, inputs = case.arguments(dtype=torch.bfloat16)
            expected = module(x, **inputs).detach()
            torch._dynamo.reset()
            compiled = torch.compile(module, fullgraph=True, backend="eager")
            result = compiled(x, **inputs)
            case.check_dtype(result, torch.bfloat16)
            allowed = unit_of(torch.bfloat16) * expected.double().norm()
            check_close("compiled result", result, expected.double(), allowed)

        for_each(self.each_typical(), check)

    def test_initial_weights(self):
        """Norm weights are 1; matrices are normal of variance 2 / (d_in + d_out), cut."""

        def check(case):
            torch.manual_seed(0)
            check_initial_weights(case.construct())

        for_each(self.each_typical(), check)


def initialize(module):
    """Let each layer in a module initialize itself, as FSDP2's documentation does."""
    for layer in module.modules():
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()


def check_after_another_call(case):
    for first, (x, inputs, context) in first_calls(case).items():
        module = case.build(dtype=torch.float32)
        with context:
            try:
                module(x, **inputs)
            except Exception as error:  # a layer need not take this call
                if isinstance(error, Warning):  # torch gives some only once
                    raise
        try:
            case.check(*case.run(module=module), torch.float32)
        except pytest.fail.Exception as failure:
            fail(f"after a first call with {first}, {failure.msg}")


def first_calls(case):
    """Return x, the other inputs, and a context for calls that differ from the next one."""
    x, inputs = case.arguments(dtype=torch.float32)
    turned = {name: tensor.flip(-1) for name, tensor in inputs.items()}
    plain = contextlib.nullcontext()
    return {
        "one token": (*case.first(1), torch.no_grad()),
        "other positions": (x, turned, torch.autocast("cpu", torch.bfloat16)),
        "x in bfloat16": (x.bfloat16(), inputs, plain),
    }


def require_weights(module, expected):
    """Require the device and the dtype of all weights."""
    for name, weight in module.named_parameters():
        got = f"{weight.device}, {weight.dtype}"
        if got != expected:
            fail(f"{name} must be on {expected}, got {got}")


def check_rounds_once(case, half, device):
    """In a half precision, each component must be the exact one, rounded."""
    result, module, x = case.run(device, half)
    case.check(result, module, x, half)
    exact = case.exact(module, x)
    result = result.detach().cpu().double()
    precision = torch.finfo(half).eps
    check_close(f"result in {name_of(half)}", result, exact, precision * exact.norm())
    rounding = (exact.to(half).double() - exact).abs()
    largest = exact.abs().amax(dim=-1, keepdim=True)
    in_float32 = 16 * torch.finfo(torch.float32).eps * largest
    twice = (result - exact).abs() > rounding + in_float32
    if twice.any():
        first = f"got {result[twice][0]:.9g}, expected {exact[twice][0]:.9g}"
        fail(
            f"{int(twice.sum())} of {twice.numel()} components are rounded twice, the "
            f"first: {first}; compute in float32, and round once, at the end"
        )


def check_rejected(case, option, value):
    """The constructor must raise a ValueError whose message has the value."""
    try:
        case.construct(**{option: value})
    except ValueError as error:
        if not re.search(rf"(?<![\w.]){re.escape(str(value))}\b", str(error)):
            fail(f"the error of {option}={value} must have the value: {error}")
    else:
        fail(f"{option}={value} must be a ValueError")


def check_initial_weights(module):
    for name, weight in module.named_parameters():
        if not weight.requires_grad:
            fail(f"{name} must require a gradient")
        if weight.ndim == 1:
            if not (weight == 1).all():
                fail(f"{name} must start at 1, got {weight.tolist()}")
            continue
        sigma = math.sqrt(2 / sum(weight.shape))
        units = weight.detach() / sigma
        # Of a normal variable that is cut at 3 sigma, within 5 standard errors.
        size = float(units.square().mean().sqrt())
        has_size = abs(size - 0.987) <= 5 / math.sqrt(2 * weight.numel())
        largest = float(units.abs().max())  # a uniform variable ends at 1.7 sigma
        if not (has_size and 2 < largest <= 3.001):
            fail(
                f"{name} must start as a normal variable of the standard deviation sigma = "
                f"sqrt(2 / (d_in + d_out)) = {sigma:.3g}, cut at 3 sigma, got one of "
                f"{size:.3g} sigma, whose largest of {weight.numel()} is {largest:.3g} sigma"
            )


def check_same(name, actual, expected):
    """Require the same numbers to the last bit."""
    try:
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    except AssertionError as error:
        fail(f"{name} must be the same: {error}")
