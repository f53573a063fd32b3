"""What holds for every layer: tests that the page of each layer imports.

pytest collects them in the page, such as test_rope.py, and conftest.py passes them
arguments from the page's tables:

    CASES     `case`, each input with its options, by a title; with `dtype` in each dtype,
              with `half` in each half precision if the result is rounded once
    TYPICAL   `typical`, the titles of one case or more for each class
    REJECTED  `option` and `value`, the wrong values of each option

So `test_rope.py::test_equation[one token, float16]` runs test_equation with a case of
that page. The mark `numbers` is on what every correct layer does, whoever wrote it.
conftest.py sets it on the cases that every correct layer takes.
"""

import copy
import math
import pickle
import re

import pytest
import torch
from torch import nn

from .checks import check_close, fail, name_of

numbers = pytest.mark.numbers


@numbers
def test_layer_is_defined(request):
    page = request.module
    cases = [page.CASES[title] for title in page.TYPICAL]
    names = " or ".join(dict.fromkeys(case.name for case in cases))
    if not any(case.find() for case in cases):
        fail(f"{cases[0].layer}.py must define {names}")


def test_equation(case, dtype, device):
    """The result and all gradients are those of the formula in float64."""
    module = case.build(device, dtype)
    x, inputs = case.arguments(device, dtype)
    result = module(x, **inputs)
    if result.dtype != dtype:
        got = name_of(result.dtype)
        fail(f"the result must have the dtype of x, {name_of(dtype)}, got {got}")
    case.check(result, module, x, dtype)


def test_rounds_once(case, half, device):
    """In a half precision, each component is the exact one, rounded."""
    module = case.build(device, half)
    x, inputs = case.arguments(device, half)
    exact = case.exact(module, x)
    result = module(x, **inputs).cpu().double()
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


@pytest.mark.filterwarnings("error")
def test_equation_under_autocast(case, device):
    """A layer in float32 is as exact as one in bfloat16, and does not warn."""
    module = case.build(device, torch.float32)
    x, inputs = case.arguments(device, torch.float32)
    with torch.autocast(device, torch.bfloat16):
        result = module(x, **inputs)
    case.check(result, module, x, torch.bfloat16)


@numbers
def test_later_tokens_change_nothing(typical):
    """The result for a token is the same without the tokens after it."""
    module = typical.build(dtype=torch.float32)
    x, inputs = typical.first(7)
    result = module(x, **inputs)
    for count in range(1, 7):
        x, inputs = typical.first(count)
        expected = result[..., :count, :].double()
        name = f"result for {count} of 7 tokens"
        check_close(name, module(x, **inputs), expected, 1e-5 * expected.norm())


def test_calls_change_nothing(case, dtype):
    """A call and its backward pass change neither the inputs nor the next call."""
    module = case.build(dtype=dtype)
    x, inputs = case.arguments(dtype=dtype)
    before = copy.deepcopy({"x": x, **inputs})
    first = module(x, **inputs)
    if first.requires_grad:
        first.sum().backward()
    for name, tensor in {"x": x, **inputs}.items():
        check_same(f"after the call, {name}", tensor, before[name])
    module.train()  # a layer with dropout fails here: -k "not calls_change_nothing"
    check_same("the second result", module(x, **inputs), first)


def test_any_strides(case, device):
    """The result is the same for an x that is not contiguous."""
    module = case.build(device, torch.float32)
    x, inputs = case.arguments(device, torch.float32)
    every_other = torch.stack((x, x), dim=-1)[..., 0]
    expected = module(x, **inputs).detach().cpu().double()
    name = "result for an x that is not contiguous"
    result = module(every_other, **inputs)
    check_close(name, result, expected, 1e-5 * expected.norm())


def test_initial_weights(typical):
    """Gains are 1, and matrices are normal of variance 2 / (d_in + d_out), up to 3 sigma."""
    torch.manual_seed(0)
    check_initial_weights(typical.construct())


def test_reset_parameters(typical):
    """All weights and tables are new, also in layers that a subclass adds."""
    torch.manual_seed(0)
    module = typical.construct()
    if list(module.children()):
        added = nn.Sequential(nn.Linear(96, 96), nn.LayerNorm(96))
        module.added = nn.ModuleList([added])
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data.fill_(math.nan)
    module.reset_parameters()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        assert tensor.isfinite().all(), f"reset_parameters must fill {name}"
    module.added = None  # these layers start as torch's own
    check_initial_weights(module)


def check_initial_weights(module):
    for name, weight in module.named_parameters():
        if not weight.requires_grad:
            fail(f"{name} must require a gradient")
        if weight.ndim == 1:
            if not (weight == 1).all():
                fail(f"{name} must start at 1, got {weight.tolist()}")
            continue
        sigma = math.sqrt(2 / sum(weight.shape))
        size = float(weight.detach().square().mean().sqrt())
        # The size of a normal variable that is cut at 3 sigma, and 5 standard errors.
        expected = 0.987 * sigma
        if not abs(size - expected) <= 5 * expected / math.sqrt(2 * weight.numel()):
            fail(
                f"{name} must start with the standard deviation sqrt(2 / (d_in + d_out)) "
                f"= {sigma:.3g}, cut at 3 sigma, so {expected:.3g}, got {size:.3g}"
            )
        largest = float(weight.detach().abs().max()) / sigma
        if not 2 < largest <= 3.001:  # a uniform variable ends at 1.7 sigma
            fail(
                f"{name} must start as a normal variable that is cut at 3 sigma, got "
                f"{largest:.3g} sigma as the largest of {weight.numel()}"
            )


def test_rejects_option(typical, option, value):
    """The message has the value."""
    shown = rf"(?<![\w.]){re.escape(str(value))}\b"
    with pytest.raises(ValueError, match=shown):
        typical.construct(**{option: value})


def test_built_on_meta(typical, device):
    """After to_empty and pickle, the layer computes what its state dict says."""
    expected = typical.build(device, torch.float32)
    state = expected.state_dict()
    names = list(dict(expected.named_parameters()))
    assert list(state) == names, f"the state dict must have {names}, got {list(state)}"
    options = {"dtype": torch.bfloat16} if state else {}
    module = typical.construct(device="meta", **options)
    for name, weight in module.named_parameters():
        got = f"{weight.device}, {weight.dtype}"
        assert got == "meta, torch.bfloat16", (
            f"{name} must be on meta, in bfloat16: {got}"
        )
    x, inputs = typical.arguments("meta", torch.bfloat16)
    result = module(x, **inputs)
    assert result.is_meta, f"the result must be on meta, got {result.device}"
    module = module.to_empty(device=device).float()
    module.reset_parameters()
    # By the protocol of copy.deepcopy.
    module = pickle.loads(pickle.dumps(module.cpu())).to(device)
    module.load_state_dict(state)
    x, inputs = typical.arguments(device, torch.float32)
    check_same("result", module(x, **inputs), expected(x, **inputs))


def test_built_on_the_default_device(typical):
    with torch.device("meta"):
        module = typical.construct()
    for name, weight in module.named_parameters():
        if not weight.is_meta:
            fail(f"{name} must be on torch's default device, got {weight.device}")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own imports
def test_compiles_to_one_graph(typical):
    """One graph for a single token, and one for all other lengths."""
    from torch._dynamo.testing import CompileCounter

    module = typical.build(dtype=torch.float32)
    graphs = CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend=graphs)
    # torch takes the length for a constant in the first graph, and then for a variable.
    for length in (1, 7, 4):
        x, inputs = typical.first(length)
        expected = module(x, **inputs).detach().double()
        name = f"compiled result for {length} tokens"
        check_close(name, compiled(x, **inputs), expected, 1e-5 * expected.norm())
    count = graphs.frame_count
    assert count in (1, 2), f"torch.compile must make 1 or 2 graphs, got {count}"


def check_same(name, actual, expected):
    """Require the same numbers to the last bit."""
    torch.testing.assert_close(
        actual,
        expected,
        rtol=0,
        atol=0,
        equal_nan=True,
        msg=lambda message: f"{name} must be the same: {message}",
    )
