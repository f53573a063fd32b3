"""What holds for every layer, in the cases of all files.

The tests that name one property come first, and the tests of all numbers after them.
The mark `numbers` is on what every correct layer does, whoever wrote it.
"""

import copy
import importlib
import math
import pickle
import re

import pytest
import torch
from torch import nn

from . import target
from .checks import HALVES, UNITS, Case

PAGES = {
    name: importlib.import_module(f".test_{name}", __package__) for name in target.found
}
CASES: dict[str, Case] = {}
LAYERS: dict[str, Case] = {}  # a case for each class
REJECTED: list[tuple[str, str, float]] = []  # a case, an option, and a wrong value
for _page, _tests in PAGES.items():
    for _title, _case in _tests.CASES.items():
        CASES[f"{_page}, {_title}"] = _case
    for _title, _options in _tests.LAYERS.items():
        _name = f"{_page}, {_title}"
        LAYERS[_name] = CASES[_name]
        for _option, _values in _options.items():
            REJECTED.extend((_name, _option, _value) for _value in _values)
ROUND_ONCE = {name: case for name, case in CASES.items() if case.rounds_once}
numbers = pytest.mark.numbers


def for_each(cases, dtypes):
    """Parametrize a test. Every correct layer computes the common cases."""
    found = []
    for dtype in dtypes:
        for name, case in cases.items():
            # Only a norm must be exact in a half precision, built and called in it.
            is_norm = case.layer.startswith("rmsnorm") and dtype in HALVES
            is_common = case.is_common and (dtype == torch.float32 or is_norm)
            marks = [numbers] if is_common else []
            short = str(dtype).removeprefix("torch.")
            found.append(pytest.param(case, dtype, id=f"{name}, {short}", marks=marks))
    return pytest.mark.parametrize(("case", "dtype"), found)


every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
every_layer = pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)


@numbers
@pytest.mark.parametrize("page", PAGES)
def test_layer_is_defined(page):
    cases = PAGES[page].CASES
    names = {cases[title].layer.partition(".")[2] for title in PAGES[page].LAYERS}
    defined = [name for name in vars(target.load(page)) if not name.startswith("_")]
    expected = " or ".join(names)
    assert names & set(defined), f"{page}.py must define {expected}, got {defined}"


@every_layer
def test_built_on_meta(layer, device):
    """After to_empty and pickle, the layer computes what its state dict says."""
    expected = layer.build(device, torch.float32)
    state = expected.state_dict()
    assert list(state) == list(dict(expected.named_parameters()))
    options = {"dtype": torch.bfloat16} if state else {}
    module = layer.construct(device="meta", **options)
    for name, weight in module.named_parameters():
        assert (weight.device.type, weight.dtype) == ("meta", torch.bfloat16), name
    x, inputs = layer.arguments("meta", torch.bfloat16)
    assert module(x, **inputs).is_meta
    module = module.to_empty(device=device).float()
    module.reset_parameters()
    # By the protocol of copy.deepcopy.
    module = pickle.loads(pickle.dumps(module.cpu())).to(device)
    module.load_state_dict(state)
    x, inputs = layer.arguments(device, torch.float32)
    assert torch.equal(module(x, **inputs), expected(x, **inputs))


@every_layer
def test_initial_weights(layer):
    """Gains are 1, and matrices are normal of variance 2 / (d_in + d_out), up to 3 sigma.

    `reset_parameters` also reaches layers that a subclass adds.
    """
    torch.manual_seed(0)
    module = layer.construct()
    check_initial_weights(module)
    if list(module.children()):
        added = nn.Sequential(nn.Linear(96, 96), nn.LayerNorm(96))
        module.added = nn.ModuleList([added])
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data.fill_(math.nan)
    module.reset_parameters()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        assert tensor.isfinite().all(), f"reset_parameters must fill {name}"
    module.added = None  # its layers initialize themselves as torch does
    check_initial_weights(module)


def check_initial_weights(module):
    for name, weight in module.named_parameters():
        if weight.ndim == 1:
            assert (weight == 1).all(), f"{name} must start at 1, got {weight}"
            continue
        units = weight.detach() / math.sqrt(2 / sum(weight.shape))
        found = f"{name} / sqrt(2 / (d_in + d_out)) must"
        largest = float(units.abs().max())
        assert largest <= 3.001, f"{found} be at most 3, got {largest}"
        size = float(units.square().mean().sqrt())
        # The size of a normal variable that is cut at 3 sigma, and 5 standard errors.
        is_normal = abs(size - 0.987) <= 5 / math.sqrt(2 * weight.numel())
        assert is_normal, f"{found} have the root mean square 0.987, got {size}"


@pytest.mark.parametrize(("name", "option", "value"), REJECTED)
def test_rejects_option(name, option, value):
    """The message has the value."""
    shown = rf"(?<![\w.]){re.escape(str(value))}\b"
    with pytest.raises(ValueError, match=shown):
        LAYERS[name].construct(**{option: value})


@numbers
@every_layer
def test_later_tokens_change_nothing(layer):
    module = layer.build(dtype=torch.float32)
    x, inputs = layer.first(7)
    result = module(x, **inputs)
    for count in range(1, 7):
        x, inputs = layer.first(count)
        alone = module(x, **inputs)
        torch.testing.assert_close(alone, result[..., :count, :])


@for_each(CASES, [torch.float32])
def test_calls_change_nothing(case, dtype):
    """A call and its backward pass change neither the inputs nor the next call."""
    module = case.build(dtype=dtype)
    x, inputs = case.arguments(dtype=dtype)
    before = copy.deepcopy({"x": x, **inputs})
    first = module(x, **inputs)
    if first.requires_grad:
        first.sum().backward()
    module.train()  # a layer with dropout fails here: -k "not calls_change_nothing"
    again = {"result": module(x, **inputs), "x": x, **inputs}
    expected = {"result": first, **before}
    torch.testing.assert_close(again, expected, rtol=0, atol=0, equal_nan=True)


@every_case
def test_any_strides(case, device):
    """The result is the same for an x that is not contiguous."""
    module = case.build(device, torch.float32)
    x, inputs = case.arguments(device, torch.float32)
    every_other = torch.stack((x, x), dim=-1)[..., 0]
    result = module(every_other, **inputs)
    torch.testing.assert_close(result, module(x, **inputs))


@for_each(CASES, UNITS)
def test_equation(case, dtype, device):
    """The result and all gradients are those of the formula in float64."""
    module = case.build(device, dtype)
    x, inputs = case.arguments(device, dtype)
    result = module(x, **inputs)
    assert result.dtype == dtype, f"the result must be in {dtype}, got {result.dtype}"
    case.check(result, module, x, dtype)


@every_case
@pytest.mark.filterwarnings("error")
def test_equation_under_autocast(case, device):
    """A layer in float32 is as exact as one in bfloat16, and does not warn."""
    module = case.build(device, torch.float32)
    x, inputs = case.arguments(device, torch.float32)
    with torch.autocast(device, torch.bfloat16):
        result = module(x, **inputs)
    case.check(result, module, x, torch.bfloat16)


@for_each(ROUND_ONCE, HALVES)
def test_rounds_once(case, dtype, device):
    """In a half precision, each component is the exact one, rounded."""
    module = case.build(device, dtype)
    x, inputs = case.arguments(device, dtype)
    exact, _ = case.exact(module, x)
    rounding = (exact.to(dtype).double() - exact).abs()
    largest = exact.abs().amax(dim=-1, keepdim=True)
    in_float32 = 16 * torch.finfo(torch.float32).eps * largest
    result = module(x, **inputs).cpu().double()
    twice = (result - exact).abs() > rounding + in_float32
    if twice.any():
        first = f"{result[twice][0]:.9g} in place of {exact[twice][0]:.9g}"
        pytest.fail(
            f"{int(twice.sum())} of {twice.numel()} components are rounded twice, for "
            f"instance {first}: compute in float32, and round once",
            pytrace=False,
        )


@every_layer
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own imports
def test_compiles_to_one_graph(layer):
    """A graph for the first length, one for all others, and one for a single token."""
    from torch._dynamo.testing import CompileCounter

    module = layer.build(dtype=torch.float32)
    graphs = CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend=graphs)
    for length in (5, 7, 1, 4):
        x, inputs = layer.first(length)
        expected = module(x, **inputs)
        torch.testing.assert_close(compiled(x, **inputs), expected)
    assert graphs.frame_count <= 3
