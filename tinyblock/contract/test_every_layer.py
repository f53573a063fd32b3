"""What holds for every layer, in the cases of all pages.

The tests that name one property come first, and the tests of all numbers after them.
The mark `numbers` is on what every right layer does, whoever wrote it.
"""

import copy
import importlib
import math
import pickle
import re
from typing import Any

import pytest
import torch
from torch import nn

from . import target
from .checks import HALVES, UNITS, Case, call

PAGES = {
    name: importlib.import_module(f".test_{name}", __package__) for name in target.found
}
CASES = {}
LAYERS: dict[str, Case] = {}
REJECTED: list[Any] = []
for _name, _page in PAGES.items():
    LAYERS |= _page.LAYERS
    for _layer, _options in getattr(_page, "REJECTED", {}).items():
        for _option, _values in _options.items():
            for _value in _values:
                _id = f"{_layer}-{_option}-{_value}"
                REJECTED.append(pytest.param(LAYERS[_layer], _option, _value, id=_id))
    for _title, _case in _page.CASES.items():
        CASES[f"{_name}, {_title}"] = _case
ROUND_ONCE = {name: case for name, case in CASES.items() if case.rounds_once}
# The mean and standard deviation of a normal variable that is cut at 3 sigma.
MOMENTS = torch.tensor([0, 0.987])
numbers = pytest.mark.numbers


def parameters(cases, dtypes):
    """Return cases with dtypes. Every right layer computes the common ones."""
    found = []
    for dtype in dtypes:
        for name, case in cases.items():
            # Only a norm must be exact in a half precision, built and called in it.
            is_norm = case.layer.startswith("rmsnorm") and dtype in HALVES
            is_common = case.is_common and (dtype == torch.float32 or is_norm)
            marks = [numbers] if is_common else []
            short = str(dtype).removeprefix("torch.")
            found.append(pytest.param(case, dtype, id=f"{name}, {short}", marks=marks))
    return found


every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
every_case_and_dtype = pytest.mark.parametrize(
    ("case", "dtype"), parameters(CASES, UNITS)
)
every_layer = pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)


@numbers
@pytest.mark.parametrize("page", PAGES)
def test_layer_is_defined(page):
    names = {layer.layer.partition(".")[2] for layer in PAGES[page].LAYERS.values()}
    defined = [name for name in vars(target.load(page)) if not name.startswith("_")]
    expected = " or ".join(names)
    assert names & set(defined), f"{page}.py must define {expected}, got {defined}"


@every_layer
def test_state_dict_has_the_weights_only(layer):
    module = layer.construct()
    assert module.state_dict().keys() == dict(module.named_parameters()).keys()


@every_layer
def test_device_and_dtype(layer, device):
    """A layer built on meta computes, after to_empty, what its weights say."""
    expected = layer.build(device, torch.float32)
    options = {"dtype": torch.bfloat16} if expected.state_dict() else {}
    module = layer.construct(device="meta", **options)
    for name, weight in module.named_parameters():
        assert (weight.device.type, weight.dtype) == ("meta", torch.bfloat16), name
    assert call(module, layer.arguments("meta", torch.bfloat16)).is_meta
    module = module.to_empty(device=device).float()
    module.reset_parameters()
    module.load_state_dict(expected.state_dict())
    arguments = layer.arguments(device, torch.float32)
    assert torch.equal(call(module, arguments), call(expected, arguments))


@every_layer
def test_initial_weights(layer):
    """Gains are 1, and matrices are normal, of variance 2 / (d_in + d_out), up to 3 sigma.

    This includes layers that a subclass adds. Biases are 0.
    """
    torch.manual_seed(0)
    module = layer.construct()
    check_initial_weights(module)
    if list(module.children()):
        added = nn.Sequential(nn.Linear(24, 96), nn.LayerNorm(96))
        module.added = nn.ModuleList([added])
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data.fill_(math.nan)
    module.reset_parameters()
    check_initial_weights(module)
    for name, table in module.named_buffers():
        assert table.isfinite().all(), f"reset_parameters must fill {name}"


def check_initial_weights(module):
    for name, weight in module.named_parameters():
        if weight.ndim == 1:
            start = 0 if name.endswith("bias") else 1
            assert (weight == start).all(), (
                f"{name} must start at {start}, got {weight}"
            )
            continue
        unit = weight.detach() / math.sqrt(2 / sum(weight.shape))
        largest = float(unit.abs().max())
        found = f"{name} / sqrt(2 / (d_in + d_out)) must"
        assert largest <= 3.001, f"{found} be at most 3, got {largest}"
        moments = torch.stack((unit.mean(), unit.std()))
        five_standard_errors = 5 / math.sqrt(weight.numel())
        is_normal = (moments - MOMENTS).abs() <= five_standard_errors
        assert is_normal.all(), f"{found} have {MOMENTS}, got {moments}"


@pytest.mark.parametrize(("layer", "option", "value"), REJECTED)
def test_rejects_option(layer, option, value):
    """The message has the value."""
    shown = rf"(?<![\w.]){re.escape(str(value))}\b"
    with pytest.raises(ValueError, match=shown):
        layer.construct(**{option: value})


@every_layer
def test_survives_copy_and_pickle(layer):
    module = layer.build(dtype=torch.float32)
    inputs = layer.first(7)
    other = pickle.loads(pickle.dumps(module))  # by the same protocol as copy.deepcopy
    assert torch.equal(call(other, inputs), call(module, inputs))


@numbers
@every_layer
def test_later_tokens_change_nothing(layer):
    module = layer.build(dtype=torch.float32)
    result = call(module, layer.first(7))
    for count in range(1, 7):
        alone = call(module, layer.first(count))
        torch.testing.assert_close(alone, result[..., :count, :])


@pytest.mark.parametrize(("case", "dtype"), parameters(CASES, [torch.float32]))
def test_calls_change_nothing(case, dtype):
    """A call and its backward pass change neither the inputs nor the next call."""
    module = case.build(dtype=dtype)
    arguments = case.arguments(dtype=dtype)
    before = copy.deepcopy(arguments)
    first = call(module, arguments)
    if first.requires_grad:
        first.sum().backward()
    module.train()  # a layer with dropout fails here: -k "not calls_change_nothing"
    again = {"result": call(module, arguments), **arguments}
    expected = {"result": first, **before}
    torch.testing.assert_close(again, expected, rtol=0, atol=0, equal_nan=True)


@every_case
def test_any_strides(case, device):
    """The result is the same for an x that is not contiguous."""
    module = case.build(device, torch.float32)
    arguments = case.arguments(device, torch.float32)
    x = arguments.pop("x").detach()
    every_other = torch.stack((x, x), dim=-1)[..., 0]
    result = module(every_other, **arguments)
    torch.testing.assert_close(result, module(x, **arguments))


@every_case_and_dtype
def test_equation(case, dtype, device):
    """The result and all gradients are those of the formula in float64."""
    module = case.build(device, dtype)
    arguments = case.arguments(device, dtype)
    result = call(module, arguments)
    assert result.dtype == dtype, f"the result must be in {dtype}, got {result.dtype}"
    case.check(result, module, arguments["x"], dtype)


@every_case
@pytest.mark.filterwarnings("error")
def test_equation_under_autocast(case, device):
    """A layer in float32 is as exact as one in bfloat16, and does not warn."""
    module = case.build(device, torch.float32)
    arguments = case.arguments(device, torch.float32)
    with torch.autocast(device, torch.bfloat16):
        result = call(module, arguments)
    case.check(result, module, arguments["x"], torch.bfloat16)


@pytest.mark.parametrize(("case", "dtype"), parameters(ROUND_ONCE, HALVES))
def test_rounds_once(case, dtype, device):
    """In a half precision, each component is the exact one, rounded."""
    module = case.build(device, dtype)
    arguments = case.arguments(device, dtype)
    exact = case.exact(module, arguments["x"])["result"].detach()
    rounding = (exact.to(dtype).double() - exact).abs()
    largest = exact.abs().amax(dim=-1, keepdim=True)
    in_float32 = 16 * torch.finfo(torch.float32).eps * largest
    result = call(module, arguments).cpu().double()
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
        inputs = layer.first(length)
        torch.testing.assert_close(call(compiled, inputs), call(module, inputs))
    assert graphs.frame_count <= 3
