"""Wrong layers fail, and right ones do not."""

import ast
import importlib
import inspect
import os
import shutil
from pathlib import Path

import mutants
import pytest
import torch
from edits import replace
from forked import verify

from tinyblock import copies
from tinyblock.contract import target
from tinyblock.verify import LAYERS

SOLUTIONS = Path(__file__).parent / "solutions"
# A value for each parameter of a test of the contract.
VALUES = {
    "device": "cpu",
    "dtype": torch.float32,
    "half": torch.float16,
    "of_gains": torch.bfloat16,
}


def page_of(layer):
    """Return the module of a layer's page, its test file in the contract, and its class."""
    page = importlib.import_module(f"tinyblock.contract.test_{layer}")
    [tests] = (each for name, each in vars(page).items() if name.startswith("Test"))
    return page, tests


def failure_of(layer, test, folder):
    """Return the failure of a test of the contract for a layer in a folder, or None."""
    page, tests = page_of(layer)
    function = getattr(tests(), test, None) or getattr(page, test)
    values = {name: VALUES[name] for name in inspect.signature(function).parameters}
    os.environ[target.VARIABLE] = str(folder)
    try:
        function(**values)
    except pytest.fail.Exception as failure:
        if isinstance(failure.__cause__, NameError | SyntaxError):
            raise  # the wrong layer is not Python
        return failure
    finally:
        del os.environ[target.VARIABLE]


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("real_tables", ["rmsnorm", "ffn", "rope", "attention", "block"]),
        ("torch_functions", ["rope", "attention"]),
    ],
)
def test_a_right_solution_has_no_failures(name, layers):
    code, report = verify(SOLUTIONS / name)
    assert code == 0, report
    assert f"\nRIGHT {', '.join(layers)}\n" in report


@pytest.mark.parametrize("layer", LAYERS)
def test_no_two_cases_of_a_page_are_the_same(layer):
    _, tests = page_of(layer)
    cases = [repr(case) for case in tests.cases.values()]
    assert len(set(cases)) == len(cases)


@pytest.mark.parametrize("layer", ["rmsnorm", "ffn", "rope", "attention", "block"])
def test_each_change_of_a_right_solution_in_one_place_fails(layer, tmp_path):
    """As scripts/mutants.py changes code. A wrong layer also makes the block fail."""
    tests = [
        (layer, "test_equation"),
        (layer, "test_initial_weights"),
        ("block", "test_equation"),
    ]
    if layer == "attention":
        tests.append((layer, "test_large_scores_do_not_overflow"))
    source = (SOLUTIONS / "real_tables" / f"{layer}.py").read_text()
    nodes = mutants.code(ast.parse(source))
    changes = [change for node in nodes for change in mutants.changes(node)]
    assert not any(failure_of(*test, SOLUTIONS / "real_tables") for test in tests)
    for number, (old, new) in enumerate(changes):
        folder = tmp_path / str(number)
        shutil.copytree(SOLUTIONS / "real_tables", folder)
        (folder / f"{layer}.py").write_text(mutants.replace(source, old, new))
        noticed = any(failure_of(*test, folder) for test in tests)
        assert noticed, f"{ast.unparse(old)} -> {ast.unparse(new)}"


# A layer, an expression of a right solution, the wrong one, and the test that must fail.
WRONG = [
    ("attention", "k, v, causal", "k, v.detach(), causal", "test_equation"),
    (  # for one batch axis and heads only
        "attention",
        '"... q d, ... k d -> ... q k"',
        '"b h q d, b h k d -> b h q k"',
        "test_equation",
    ),
    ("block", "self.attn", "self.mha", "test_equation"),
    ("ffn", "self.w3", "self.v", "test_equation"),
    ("rmsnorm", "class RMSNorm", "class Norm", "test_equation"),
    (
        "ffn",
        "w2 = Linear(d_ff, d_model)",
        "w2 = Linear(d_ff, d_model).requires_grad_(False)",
        "test_equation",
    ),
    (  # a weight that is not in the equation
        "rmsnorm",
        "self.eps = eps",
        "self.eps, self.b = eps, nn.Parameter(torch.ones(1))",
        "test_equation",
    ),
    (  # another d_ff than the one that is passed
        "ffn",
        "Linear(d_model, d_ff)",
        "Linear(d_model, d_ff // 64 * 64)",
        "test_equation",
    ),
    (  # exp overflows for a gate far below 0
        "ffn",
        "gate * torch.sigmoid(gate)",
        "gate / (1 + torch.exp(-gate))",
        "test_equation",
    ),
    (
        "rmsnorm",
        "x / rms * self.weight",
        "(x / rms).to(in_dtype) * self.weight",
        "test_rounds_once",
    ),
    ("rmsnorm", "x.to(torch.float32)", "x", "test_rounds_once"),
    ("rmsnorm", "to(in_dtype)", "to(self.weight.dtype)", "test_gains_of_another_dtype"),
    ("rmsnorm", "= x.to(", "= x.detach().to(", "test_gradient_of_x"),
    ("rope", "return rotated", "return rotated.detach()", "test_gradient_of_x"),
    ("rmsnorm", "x.to(torch.float32)", "x.data.mul_(2)", "test_calls_change_nothing"),
    (
        "ffn",
        "return",
        "return (1 + 1e-6 * self.training) *",
        "test_calls_change_nothing",
    ),
    (
        "rope",
        "angles.cos()",
        "globals().setdefault(f'{theta} {d_k}', angles).cos()",
        "test_each_instance_has_its_own_table",
    ),
    (
        "rope",
        "angles.cos()",
        "vars(nn).setdefault('angles', angles).cos()",
        "test_each_instance_has_its_own_table",
    ),
    (
        "attention",
        "v, causal)",
        "v, vars(self).setdefault('mask', causal)[: len(causal), : len(causal)])",
        "test_earlier_calls_change_nothing",
    ),
    (
        "attention",
        "token_positions.unsqueeze",
        "vars(self).setdefault(x.shape, token_positions).unsqueeze",
        "test_earlier_calls_change_nothing",
    ),
    (
        "rope",
        "self.cos[",
        "vars(self).setdefault('table', self.cos.to(x))[",
        "test_earlier_calls_change_nothing",
    ),
    (
        "rmsnorm",
        "* self.weight",
        "* vars(self).setdefault('scale', self.weight * 1)",
        "test_earlier_calls_change_nothing",
    ),
    (
        "attention",
        "self.rope is not None",
        "token_positions is not None",
        "test_positions_are_0_1_2_if_none_are_passed",
    ),
    ("attention", 'float("-inf")', "-1e4", "test_large_scores_do_not_overflow"),
    # A window of 1,024 tokens.
    ("attention", ".tril()", ".tril().triu(-1023)", "test_long_sequence"),
    (  # of the same standard deviation
        "ffn",
        "trunc_normal_(self.weight, std=std, a=-3 * std, b=3 * std)",
        "uniform_(self.weight, -1.71 * std, 1.71 * std)",
        "test_initial_weights",
    ),
    ("ffn", "a=-3 * std, b=3 * std", "", "test_initial_weights"),
    ("rmsnorm", "torch.ones(", "torch.linspace(1, 2, ", "test_initial_weights"),
]


@pytest.mark.parametrize(("layer", "right", "wrong", "test"), WRONG)
def test_a_wrong_solution_fails(layer, right, wrong, test, tmp_path):
    assert failure_of(layer, test, SOLUTIONS / "real_tables") is None
    folder = shutil.copytree(SOLUTIONS / "real_tables", tmp_path / "layers")
    replace(folder / f"{layer}.py", right, wrong)
    failure = failure_of(layer, test, folder)
    assert failure
    # pytest shows the traceback of a layer's error, and none of the contract's own code.
    assert failure.pytrace == bool(failure.__cause__)


# The same for tinyblock's layers, and what it promises beyond the equation.
BROKEN = [
    (
        "rmsnorm",
        "F.rms_norm(x",
        "F.rms_norm(torch.compiler.disable(torch.abs)(x)",
        "test_compiles_to_one_graph",
    ),
    (  # x again, by as many operations as tokens, so with a graph for each length
        "rmsnorm",
        "F.rms_norm(x",
        "F.rms_norm(sum(x / x.shape[-2] for _ in range(x.shape[-2]))",
        "test_compiles_to_one_graph",
    ),
    (  # wrong when it is compiled, for more than one token
        "rmsnorm",
        "return F.rms_norm(x",
        "return (1 + 1e-4 * (x.shape[-2] > 1) * torch.compiler.is_compiling()) * F.rms_norm(x",
        "test_compiles_to_one_graph",
    ),
    (  # in float32, where it is compiled
        "rope",
        ".type_as(x)",
        ".to(torch.float32 if torch.compiler.is_compiling() else x.dtype)",
        "test_compiles_in_half_precision",
    ),
    ("rope", "persistent=False", "persistent=True", "test_built_on_meta"),
    ("rmsnorm", "device=device,", "device=device or 'cpu',", "test_built_on_meta"),
    (
        "ffn",
        "self.activation = activation",
        "self.activation = lambda x: activation(x)",
        "test_built_on_meta",
    ),
    (
        "attention",
        "q_width, bias=False, **factory",
        "q_width, bias=False, device=device",
        "test_built_on_meta",
    ),
    ("rmsnorm", "0 < eps < math.inf", "0 < eps", "test_rejects_options"),
    ("attention", "1e-5, got {eps}", "1e-5", "test_rejects_options"),
    # Gains that require no gradient.
    ("rmsnorm", "dtype=dtype))", "dtype=dtype), False)", "test_initial_weights"),
    (
        "rope",
        "self.cos_sin.copy_(self._compute_table())",
        "self.cos_sin",
        "test_reset_parameters",
    ),
    (  # where strides forbid a complex view
        "rope",
        "torch.complex(*pairs.unbind(-1))",
        "torch.complex(*pairs.unbind(-1)).conj()",
        "test_any_strides",
    ),
    (
        "attention",
        "F.rms_norm(x.to(wide), ",
        "F.rms_norm(x, ",
        "test_equation_under_autocast",
    ),
    (
        "rope",
        "angles.cos(), angles.sin()",
        "angles.float().cos(), angles.float().sin()",
        "test_table_is_exact_at_far_positions",
    ),
    (  # rejects positions in int32
        "rope",
        "F.embedding(token_positions",
        "F.embedding(token_positions.view(torch.int64)",
        "test_equation",
    ),
]


@pytest.mark.parametrize(("layer", "right", "wrong", "test"), BROKEN)
def test_a_broken_promise_fails(layer, right, wrong, test, tmp_path):
    assert failure_of(layer, test, target.ABOVE) is None
    assert copies.main(["add", layer, "--to", str(tmp_path)]) == 0
    replace(tmp_path / f"{layer}.py", right, wrong)
    assert failure_of(layer, test, tmp_path)
