"""`tinyblock verify` judges layers that are not copies of tinyblock's."""

import functools
import re
import shutil
from pathlib import Path

import pytest
from defects import Defect
from forked import verify
from pages import block_with

from tinyblock.contract import conftest, target
from tinyblock.contract.report import Report

SOLUTIONS = Path(__file__).parent / "solutions"
README = Path(__file__).parents[2] / "README.md"


@functools.cache
def verify_solution(name):
    """Return the exit code and the report for a right solution."""
    return verify(SOLUTIONS / name, "-vv", "-rs")


@pytest.mark.parametrize("name", ["real_tables", "complex_tables", "torch_functions"])
def test_right_solutions_have_no_failures(name):
    code, report = verify_solution(name)
    assert code == 0, report
    for layer in ("rmsnorm", "ffn", "rope", "attention", "block"):
        passed = re.findall(rf"test_{layer}\.py::test_equation.* PASSED", report)
        assert passed, f"{layer}: {report}"


def test_the_readme_shows_the_counts_of_a_right_solution():
    shown = block_with(README, "tests/contract/solutions/torch_functions").splitlines()
    _, report = verify_solution("torch_functions")
    assert shown[-1] in report.splitlines()[-1]


SCORES = 'einsum(Q, K, "... q d, ... k d -> ... q k") / math.sqrt(Q.shape[-1])'
DEFECTS = {
    "a row of NaN": Defect(
        1,
        "rmsnorm",
        "return result.to(in_dtype)",
        "return result.to(in_dtype).index_fill(-2, torch.tensor(1), torch.nan)",
        r"test_equation, .* at \[\d, 1, \d+\]: got nan, expected -?\d",
    ),
    "noise of 1e-4": Defect(
        1,
        "ffn",
        "gate = self.w1(x)",
        "gate = self.w1(x) + 1e-4 * torch.sin(1000 * x).sum(-1, keepdim=True)",
        r"test_equation, 2 of 2, first \[SwiGLU, float32\]: result in float32 at .* got",
    ),
    "a table of the last instance": Defect(
        1,
        "rope",
        "self.register_buffer(",
        "(lambda name, table, **_: setattr(RotaryPositionalEmbedding, name, table))(",
        r"test_each_instance_has_its_own_table, 1 of 3, first \[theta\]: theta is not",
    ),
    "detached v": Defect(
        1,
        "attention",
        "v = rearrange(self.v_proj(x)",
        "v = rearrange(self.v_proj(x).detach()",
        r"test_equation, .* first \[one token, float32\]: gradient of \S+ in float32 at",
    ),
    "two roundings": Defect(
        2,
        "rmsnorm",
        "result = x / rms * self.weight",
        "result = (x / rms).to(in_dtype) * self.weight",
        r"test_rounds_once, 6 of 6, .*: 22 of 84 components are rounded twice, "
        r"the first: got \S+, expected ",
    ),
    "a wrong name of a weight": Defect(
        2,
        "ffn",
        "self.w3",
        "self.v",
        r"test_equation, 2 of 2, .*: the layer must have the weight w3.weight, got w1",
    ),
    "an axis for heads that must be there": Defect(
        2,
        "attention",
        '"... q d, ... k d -> ... q k"',
        '"b h q d, b h k d -> b h q k"',
        r"test_equation, 1 of 10, first \[function, one batch axis, float32\]: RuntimeErr",
    ),
    "positions that are written": Defect(
        2,
        "rope",
        "        cos, sin = ",
        "        token_positions.add_(1).sub_(1)\n        token_positions[..., -1] = 0\n"
        "        cos, sin = ",
        r"test_calls_change_nothing, .*: after the call, token_positions must be the",
    ),
    "a softmax without the maximum": Defect(
        2,
        "attention",
        "return exponentials / exponentials.sum(dim, keepdim=True)",
        "return (x.double().exp() / x.double().exp().sum(dim, keepdim=True)).float()",
        r"test_large_scores_do_not_overflow, 1 of 1: result at .*: got nan",
    ),
    "a result in float32": Defect(
        3,
        "rmsnorm",
        "return result.to(in_dtype)",
        "return result",
        r"test_equation, .*: the result must have the dtype of x, \w+, got float32",
    ),
    "dropout": Defect(
        3,
        "ffn",
        "return self.w2(",
        "return nn.functional.dropout(torch.tensor(1.0), 0.5, self.training) * self.w2(",
        r"test_calls_change_nothing, .*: the second result must be the same",
    ),
    "a kept axis": Defect(
        3,
        "rope",
        "return rotated.flatten(-2)",
        "return rotated.flatten(-2)[None]",
        r"test_equation, .*: result in float32 has the shape \(1, 2, 7, 8\), expected",
    ),
    "a mask that shows the next token": Defect(
        3,
        "attention",
        ".tril()",
        ".tril(1)",
        r"test_later_tokens_change_nothing, 1 of 1, first \[plain\]: result for 1 of 7",
    ),
    "squares in float16": Defect(
        5,
        "rmsnorm",
        "x = x.to(torch.float32)",
        "x = x.to(self.weight.dtype)",
        r"test_equation, .* \[squares beyond float16, float16\]: result in float16 at",
    ),
    "a gradient that is 1% too large": Defect(
        5,
        "ffn",
        "self.w3(x)",
        "(self.w3(x) + 0.01 * (self.w3(x) - self.w3(x).detach()))",
        r"test_equation, 1 of 2, .*: gradient of \S+ in float32 at .*: got .*, expected",
    ),
    "a sigmoid that overflows": Defect(
        5,
        "ffn",
        "gate * torch.sigmoid(gate)",
        "gate * gate.exp() / (1 + gate.exp())",
        r"test_equation, 1 of 2, first \[SwiGLU, gates of up to 100, .*: got nan, expect",
    ),
    "a cache that ignores max_seq_len": Defect(
        5,
        "rope",
        '        self.register_buffer("cos"',
        "        tables = RotaryPositionalEmbedding.__dict__.get('tables', {})\n"
        "        RotaryPositionalEmbedding.tables = tables\n"
        "        angles = tables.setdefault((theta, d_k), angles)\n"
        '        self.register_buffer("cos"',
        r"test_each_instance_has_its_own_table, 1 of 3, first \[max_seq_len\]: IndexError",
    ),
    "no rotation without positions": Defect(
        5,
        "attention",
        "if self.rope is not None:",
        "if self.rope is not None and token_positions is not None:",
        r"test_positions_are_0_1_2_if_none_are_passed, 1 of 1: RoPE is missing: result",
    ),
    "scores that are cut": Defect(
        5,
        "attention",
        "x - x.amax(dim, keepdim=True)",
        "x.clamp(-50, 50)",
        r"test_large_scores_do_not_overflow, 1 of 1: result at .*: got -?\d\S+, expected",
    ),
    "an input that is overwritten": Defect(
        6,
        "rmsnorm",
        "x = x.to(torch.float32)",
        "x, inputs = x.to(torch.float32, copy=True), x\n        inputs.data.zero_()",
        r"test_calls_change_nothing, .*: after the call, x must be the same",
    ),
    "an operation that torch lacks": Defect(
        6,
        "ffn",
        "gate = self.w1(x)",
        "gate = self.w1(x)\n        (x > 0).logcumsumexp(0)",
        r"test_equation, 2 of 2, .*: NotImplementedError: .logcumsumexp_out_cpu. not",
    ),
    "a backward pass that writes into positions": Defect(
        6,
        "rope",
        "        cos, sin = ",
        "        if x.requires_grad:\n"
        "            x.register_hook(lambda gradient: (token_positions.zero_(), gradient)[1])\n"
        "        cos, sin = ",
        r"test_calls_change_nothing, .*: after the call, token_positions must be the",
    ),
    "a window of 64 tokens": Defect(
        6,
        "attention",
        ".tril()",
        ".tril().triu(-63)",
        r"test_equation, 1 of 10, first \[80 tokens, float32\]: result in float32 at",
    ),
    "a masked score that is not the least": Defect(
        6,
        "attention",
        'float("-inf")',
        "-1e4",
        r"test_large_scores_do_not_overflow, 1 of 1: result at .*: got -?\d\S+, expected",
    ),
    "a class of another name": Defect(
        7,
        "rmsnorm",
        "class RMSNorm",
        "class Norm",
        r"test_layer_is_defined, 1 of 1: rmsnorm.py must define RMSNorm",
    ),
    "a result without a gradient": Defect(
        7,
        "ffn",
        "gate = self.w1(x)",
        "return self.w2(torch.sigmoid(self.w1(x)) * self.w1(x) * self.w3(x)).detach()",
        r"test_equation, 2 of 2, .*: the result has no gradient: detach, .data, or no_g",
    ),
    "an x that must have a batch axis": Defect(
        7,
        "rope",
        "        cos, sin = ",
        "        batch, *_, seq, d_k = x.shape\n        cos, sin = ",
        r"test_equation, 2 of 8, first \[one pair, .*: ValueError: not enough values to",
    ),
    "positions that meet the heads": Defect(
        7,
        "attention",
        "token_positions = token_positions.unsqueeze(-2)",
        "pass",
        r"test_equation, 1 of 10, .*: positions of a sequence rotate a head; pass token_",
    ),
    "a mask that is required": Defect(
        7,
        "attention",
        "if mask is not None:",
        "if True:",
        r"test_equation, 1 of 10, first \[function, no mask, float32\]: TypeError: bad op",
    ),
    "a missing residual": Defect(
        8,
        "block",
        "return x + self.ffn(",
        "return self.ffn(",
        r"test_equation, 3 of 3, first \[RoPE, float32\]: the residual of ffn is missing",
    ),
}
NOT_INITIAL = {
    "gains": Defect(
        4,
        "rmsnorm",
        "torch.ones(",
        "torch.zeros(",
        r"test_initial_weights, 1 of 1, .*: weight must start at 1, got \[0.0, ",
    ),
    "a uniform variable": Defect(
        4,
        "ffn",
        "nn.init.trunc_normal_(self.weight, std=std, a=-3 * std, b=3 * std)",
        "nn.init.uniform_(self.weight, -1.71 * std, 1.71 * std)",
        r"test_initial_weights, .*: w1.weight must start as a normal variable",
    ),
    "another standard deviation": Defect(
        4,
        "attention",
        "self.num_heads = num_heads",
        "self.num_heads = num_heads\n        nn.init.normal_(self.q_proj.weight, std=0.1)",
        r"test_initial_weights, .*: q_proj.weight must start with the standard dev",
    ),
    "gains that differ": Defect(
        9,
        "rmsnorm",
        "torch.ones(d_model",
        "torch.linspace(1, 2, d_model",
        r"test_initial_weights, 1 of 1, .*: weight must start at 1, got \[1.0, 1.2",
    ),
    "a normal variable that is not cut": Defect(
        9,
        "ffn",
        "nn.init.trunc_normal_(self.weight, std=std, a=-3 * std, b=3 * std)",
        "nn.init.normal_(self.weight, std=std)",
        r"test_initial_weights, .* cut at 3 sigma, got [34].\d+ sigma as the largest of",
    ),
}
INITIAL = ["-m", "not numbers", "-k", "initial_weights"]
OPTIONS_OF_RUNS = {4: INITIAL, 8: ["block"], 9: INITIAL}


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Return a function that returns the report of a run, which it starts once."""

    @functools.cache
    def report_of(run):
        folder = tmp_path_factory.mktemp("solution") / "layers"
        shutil.copytree(SOLUTIONS / "real_tables", folder)
        defects = [d for d in (DEFECTS | NOT_INITIAL).values() if d.run == run]
        for defect in defects:
            defect.put_into(folder)
        if "block" not in [defect.layer for defect in defects]:
            (folder / "block.py").unlink()  # it fails with the layers in it
        _, report = verify(folder, *OPTIONS_OF_RUNS.get(run, []))
        return report

    return report_of


@pytest.mark.parametrize("name", DEFECTS)
def test_the_report_names_a_defect(name, reports):
    DEFECTS[name].require_in(reports(DEFECTS[name].run))


def test_norms_come_before_the_layers_that_contain_them(reports):
    layers = re.findall(r"^FAILED (\w+):", reports(1), re.MULTILINE)
    assert list(dict.fromkeys(layers)) == ["rmsnorm", "ffn", "rope", "attention"]


def test_a_layer_with_dropout_fails_one_test_only(reports):
    """As docs/verify.md says, which deselects this test."""
    tests = re.findall(r"^FAILED ffn: (\w+)", reports(3), re.MULTILINE)
    assert tests == ["test_calls_change_nothing"]


def test_failures_that_differ_in_numbers_only_share_a_line():
    """Each of the first three kinds has a line, and how many of the cases it is."""
    found = Report(config=None)
    test = ("rope", "test_equation")
    found.ran[test] = 9
    for case, message in enumerate(["at [1]", "at [2, nan]", "shape", "dtype", "mask"]):
        found.failed[test].append((f"case {case}", message))
    lines = []
    found.show_failures(test, lines.append)
    assert lines == [
        "FAILED rope: test_equation, 2 of 9, first [case 0]: at [1]",
        "FAILED rope: test_equation, 1 of 9, first [case 2]: shape",
        "FAILED rope: test_equation, 1 of 9, first [case 3]: dtype",
    ]


def test_a_long_message_is_cut():
    found = Report(config=None)
    found.failed["rope", "test_equation"].append(("one token", "number " * 100))
    lines = []
    found.show_failures(("rope", "test_equation"), lines.append)
    assert lines[0].endswith("number [...]")
    assert len(lines[0]) < 320


def test_a_layer_without_tests_is_an_error(monkeypatch):
    monkeypatch.setattr("tinyblock.contract.report.found", {"mixer": "layers.mixer"})
    [error] = Report(config=None).errors()
    assert error.startswith(
        "ERROR mixer: its tests are not beside it; `tinyblock add m"
    )


def test_a_wrong_result_is_not_called_rounded(reports):
    line = "rmsnorm: test_rounds_once, .*: result in float16 at"
    assert re.search(line, reports(5)), reports(5)


def test_other_tests_are_mentioned_only_if_all_passed(reports):
    """Below failures, the notice would hide them."""
    _, passed = verify_solution("torch_functions")
    assert "Only the tests marked numbers ran" in passed
    assert "Only the tests marked numbers ran" not in reports(1)
    assert "docs/verify.md" in reports(1)


def test_tests_selected_by_their_mark_are_not_explained(reports):
    assert "docs/verify.md" not in reports(4)


def test_cases_that_layers_cannot_take_are_counted():
    _, report = verify_solution("torch_functions")
    [explained] = re.findall(r"^(\d+) skipped: the layers lack", report, re.MULTILINE)
    assert f"{explained} skipped" in report.splitlines()[-1]
    reason = (
        "Attention takes other arguments: got an unexpected keyword argument 'mask'"
    )
    assert reason in report


@pytest.mark.parametrize("name", NOT_INITIAL)
def test_initial_weights_are_tested_without_reset_parameters(name, reports):
    NOT_INITIAL[name].require_in(reports(NOT_INITIAL[name].run))


def test_what_is_not_written_is_no_defect(tmp_path):
    (tmp_path / "rmsnorm.py").write_text(
        "class RMSNorm:\n"
        "    def __init__(self, d_model, eps):\n"
        "        __import__('warnings').warn('not listed')\n"
        "        raise NotImplementedError('TODO')\n"
        "    def forward(self, x): ...\n"
    )
    code, report = verify(tmp_path)
    assert code == 1, report
    assert re.search(r"^NOT WRITTEN rmsnorm: test_equation, 9 ended in", report, re.M)
    assert "FAILED" not in report
    assert "ERROR" not in report
    assert "not listed" not in report
    assert "Only the tests marked numbers ran" not in report


def test_a_layer_of_which_nothing_can_be_tested_is_an_error(tmp_path):
    (tmp_path / "rmsnorm.py").write_text("class RMSNorm:\n    'No arguments.'\n")
    code, report = verify(tmp_path)
    assert code == 2, report
    assert "ERROR rmsnorm: no case of the equation" in report


@pytest.fixture
def import_rope(tmp_path, monkeypatch):
    """Return a function that imports a student's rope.py of these lines."""
    monkeypatch.setattr(target, "found", {})
    monkeypatch.setattr(target, "foreign", set())

    def import_rope(text, folder=tmp_path):
        (folder / "rope.py").write_text(text)
        target.select(folder)
        with pytest.raises(pytest.UsageError) as error:
            conftest.import_foreign("rope")
        return str(error.value)

    return import_rope


def test_a_missing_package_is_one_line_with_the_file_and_the_repair(
    import_rope, tmp_path
):
    message = import_rope("import math\nimport no_such_package\n")
    assert message.startswith(f"{tmp_path / 'rope.py'}, line 2: No module named 'no_")
    assert message.endswith("pip install --no-deps -e PATH")


def test_a_missing_package_is_shown_where_it_is_imported(import_rope, tmp_path):
    """The solution may be a package within packages."""
    folder = tmp_path / "course" / "solution" / "layers"
    folder.mkdir(parents=True)
    for package in (folder, *folder.parents[:2]):
        (package / "__init__.py").touch()
    shared = tmp_path / "course" / "shared.py"
    shared.write_text("\nimport no_such_package\n")
    message = import_rope("from ...shared import Table\n", folder)
    assert message.startswith(f"{shared}, line 2: No module named")


def test_missing_adapters_are_repaired_by_the_folder_or_pythonpath(import_rope):
    message = import_rope("from tests.no_such_adapters import run_rope\n")
    assert message.endswith("in the folder of the solution, or set PYTHONPATH to it")


def test_missing_metadata_is_one_line_with_the_file_and_the_repair(
    import_rope, tmp_path
):
    """As in the course's __init__.py, which reads its own version."""
    text = "import importlib.metadata\nimportlib.metadata.version('no_such_package')\n"
    message = import_rope(text)
    assert message.startswith(f"{tmp_path / 'rope.py'}, line 2: No package metadata")
    assert message.endswith("pip install --no-deps -e PATH")


def test_another_error_keeps_the_traceback_that_ends_in_the_file(
    import_rope, tmp_path, capsys
):
    assert import_rope("def f():\n    1 / 0\nf()\n") == "rope.py cannot be imported"
    shown = capsys.readouterr().err
    files = re.findall(r'File "(.*)", line (\d+)', shown)
    assert files == [(str(tmp_path / "rope.py"), "3"), (str(tmp_path / "rope.py"), "2")]
    assert shown.rstrip().endswith("ZeroDivisionError: division by zero")
