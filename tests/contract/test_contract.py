"""The contract finds broken layers, and reports in one line what it finds and what it cannot judge."""

import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from isolated import REFUSE_TINYBLOCK_AND_BEARTYPE, WITHOUT_PACKAGE

import tinyblock

PACKAGE = Path(tinyblock.__file__).parent
CONTRACT = PACKAGE / "contract"
LAYERS = [module.__name__.rpartition(".")[2] for module in tinyblock.LAYERS]


@pytest.fixture
def verify(tmp_path, monkeypatch, capsys):
    """Run the contract on a target, as the command does; return the exit code and the lines of the report."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    modules = set(sys.modules)

    def run(target, *arguments, properties=()):
        tests = [f"{CONTRACT}/test_{name}" for name in properties] or [str(CONTRACT)]
        options = ["-c", f"{CONTRACT}/contract.ini", f"--rootdir={CONTRACT}"]
        options += ["-p", "no:cacheprovider", f"--layers={target}", *arguments]
        code = pytest.main([*options, *tests])
        return code, lines_of_report(*capsys.readouterr())

    yield run
    for name in set(sys.modules) - modules:
        if name.partition(".")[0] in {*LAYERS, "copied_layers", "host"}:
            del sys.modules[name]


def lines_of_report(out, err):
    """Return the lines that pytest printed, without the dots and without empty lines."""
    lines = []
    for line in [*out.splitlines(), *err.splitlines()]:
        is_progress = re.match(r"[.sFE]* +\[", line)
        if line and not is_progress:
            lines.append(line)
    return lines


def write_copies(tmp_path, **sources):
    """Write a package with these files."""
    folder = tmp_path / "copied_layers"
    folder.mkdir(exist_ok=True)
    (folder / "__init__.py").touch()
    for layer, source in sources.items():
        (folder / f"{layer}.py").write_text(source)
    return folder


def subclass(name, methods):
    """Return the source of a layer that differs from the original in some methods."""
    imports = "import copy, math, sys, torch, tinyblock\nfrom torch.nn import functional as F\n"
    body = textwrap.indent(methods, "    ")
    return f"{imports}class {name}(tinyblock.{name}):\n{body}\n"


HUGGING_FACE_ORDER = """def forward(self, x):
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
    return self.weight * y.to(x.dtype)"""
NO_GRADIENT = """def forward(self, x):
    if x.dtype != torch.float16 or x.numel() < 10000: return super().forward(x)
    return super().forward(x.detach()) + 0 * x"""
NOT_CUT = """def reset_parameters(self):
    for weight in self.parameters():
        weight.data.normal_(std=math.sqrt(2 / sum(weight.shape)))"""
DETACHED = """def forward(self, x):
    return F.silu(self.w1(x)).mul(self.w3(x)) @ self.w2.weight.T.detach()"""
UNNAMED = """def __init__(self, d_model, eps=1e-5):
    if eps <= 0: raise ValueError('eps must be positive')
    super().__init__(d_model, eps)"""
CLAMPED = """def forward(self, x, token_positions=None):
    if token_positions is not None: token_positions = token_positions.clamp(0, 7)
    return super().forward(x, token_positions)"""
FIRST_CALL = """def forward(self, x, token_positions=None, mask=None):
    if not hasattr(self, 'called'): x = x.exp().log()
    self.called = True
    return super().forward(x, token_positions, mask)"""
PRINT = """def forward(self, x, token_positions=None, mask=None):
    if x.shape[-2] == 1: print(end='')
    return super().forward(x, token_positions, mask)"""
UNMASKED = """def forward(self, x, token_positions=None, mask=None):
    return super().forward(x, token_positions)"""
IN_PLACE = """def forward(self, x, token_positions=None, mask=None):
    out = super().forward(x, token_positions, mask)
    x.data.copy_(out)
    return out"""
MANY_TABLES = """def __init__(self, *sizes, **options):
    super().__init__(*sizes, **options)
    for layer in self.layers: layer.attn.rope = copy.deepcopy(self.rope)"""


class Broken(NamedTuple):
    """A subclass of a layer that breaks its contract."""

    cls: str
    methods: str  # of the subclass
    found_by: str  # the property that fails


BROKEN = {
    "lowered": Broken(
        cls="RMSNorm",
        methods="def forward(self, x): return super().float().forward(x.float()).to(x.dtype)",
        found_by="rmsnorm.py::test_equation",
    ),
    "rounded twice": Broken(
        cls="RMSNorm",
        methods=HUGGING_FACE_ORDER,
        found_by="rmsnorm.py::test_rounds_once",
    ),
    "gradient of x lost in float16": Broken(
        cls="RMSNorm",
        methods=NO_GRADIENT,
        found_by="rmsnorm.py::test_equation",
    ),
    "value not named": Broken(
        cls="RMSNorm",
        methods=UNNAMED,
        found_by="rmsnorm.py::test_rejects_hyperparameters",
    ),
    "weight without gradient": Broken(
        cls="SwiGLU",
        methods=DETACHED,
        found_by="ffn.py::test_equation",
    ),
    "weights not cut": Broken(
        cls="SwiGLU",
        methods=NOT_CUT,
        found_by="ffn.py::test_initial_weights",
    ),
    "print": Broken(
        cls="SwiGLU",
        methods="def forward(self, x): print(end=''); return super().forward(x)",
        found_by="ffn.py::test_compiles_to_one_graph",
    ),
    "positions clamped": Broken(
        cls="RotaryPositionalEmbedding",
        methods=CLAMPED,
        found_by="rope.py::test_rejects_positions_out_of_range",
    ),
    "halves rounded twice": Broken(
        cls="RotaryPositionalEmbedding",
        methods="def forward(self, x, p=None): return (super().forward(x * 3, p) / 3).to(x.dtype)",
        found_by="rope.py::test_rounds_once",
    ),
    "later tokens seen": Broken(
        cls="CausalMultiHeadSelfAttention",
        methods="def attend(self, q, k, v, mask): return F.scaled_dot_product_attention(q, k, v)",
        found_by="attention.py::test_causality",
    ),
    "first call differs": Broken(
        cls="CausalMultiHeadSelfAttention",
        methods=FIRST_CALL,
        found_by="attention.py::test_checkpointing",
    ),
    "print for one token": Broken(
        cls="Block",
        methods=PRINT,
        found_by="block.py::test_compiles_to_one_graph",
    ),
    "mask ignored": Broken(
        cls="Block",
        methods=UNMASKED,
        found_by="block.py::test_masks",
    ),
    "x modified": Broken(
        cls="Block",
        methods=IN_PLACE,
        found_by="block.py::test_equation",
    ),
    "a table for each block": Broken(
        cls="Transformer",
        methods=MANY_TABLES,
        found_by="transformer.py::test_one_table_for_all_blocks",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_layer_is_found(name, verify, tmp_path):
    broken = BROKEN[name]
    layer, _, test = broken.found_by.partition(".py::test_")
    copies = write_copies(tmp_path, **{layer: subclass(broken.cls, broken.methods)})
    code, lines = verify(copies, properties=[broken.found_by])
    assert code == 1
    assert lines[0].startswith(f"FAIL  {layer}: {test}"), lines
    assert lines[-1] == "0 properties hold, 1 fails, 0 skipped"


RMS_NORM = """import torch, tinyblock
def rms_norm(x, weight, eps=1e-5):
    unit = tinyblock.rms_norm(x.float(), torch.ones(x.shape[-1]), eps)
    return unit.to(x.dtype) * weight
"""
APPLY_ROPE = """import tinyblock
def apply_rope(x, angles):
    return (tinyblock.apply_rope(x * 3, angles) / 3).to(x.dtype)
"""
ATTENTION = """import tinyblock
def scaled_dot_product_attention(q, k, v, mask=None):
    out = tinyblock.scaled_dot_product_attention(q, k, v * 3, mask)
    return (out / 3).to(q.dtype)
"""


@pytest.mark.parametrize(
    ("layer", "source", "expected"),
    [
        ("rmsnorm", RMS_NORM, "rms_norm_rounds_once"),
        ("rope", APPLY_ROPE, "apply_rope_rounds_once"),
        ("attention", ATTENTION, "scaled_dot_product_attention_rounds_once"),
    ],
    ids=["rmsnorm", "rope", "attention"],
)
def test_a_function_that_rounds_twice_is_found(
    layer, source, expected, verify, tmp_path
):
    copies = write_copies(tmp_path, **{layer: source})
    code, lines = verify(copies, properties=[f"{layer}.py::test_{expected}"])
    assert code == 1
    assert lines[0].startswith(f"FAIL  {layer}: {expected}"), lines


def test_the_report_shows_case_result_and_expected_result(verify, tmp_path):
    broken = subclass("RMSNorm", "def forward(self, x): return super().forward(x) + 1")
    copies = write_copies(tmp_path, rmsnorm=broken)
    properties = ["rmsnorm.py::test_equation", "rmsnorm.py::test_initial_weights"]
    code, lines = verify(copies, properties=properties)
    number = r"-?[\d.]+"
    assert re.fullmatch(
        r"FAIL  rmsnorm: equation \[two batch axes-torch.float64\] and \d+ more cases: result at "
        rf"\[\d, \d, \d\]: got {number}, expected {number}, with an error of at most {number}e-12",
        lines[0],
    )
    assert code == 1
    assert lines[1:] == ["1 property holds, 1 fails, 0 skipped"]


def test_a_copy_may_drop_options_and_functions_and_change_the_default_of_eps(
    verify, tmp_path
):
    options = "def __init__(self, d_model, eps=1e-6): super().__init__(d_model, eps)"
    copies = write_copies(tmp_path, rmsnorm=subclass("RMSNorm", options))
    code, lines = verify(copies, "-k", "not compiles")
    assert code == 0
    assert lines[-1].endswith(" properties hold, 0 fail, 4 skipped")
    assert {*lines[:-1]} == {
        "skip  rmsnorm: RMSNorm has no device in this copy",
        "skip  rmsnorm: rms_norm is not in this copy",
        "skip  rmsnorm: CUDA is not available",
    }


def test_a_layer_with_dropout_is_checked_in_eval_mode(verify, tmp_path):
    dropout = (
        "def forward(self, x): return F.dropout(super().forward(x), 0.1, self.training)"
    )
    copies = write_copies(tmp_path, ffn=subclass("SwiGLU", dropout))
    code, lines = verify(copies, "-k", "SwiGLU", properties=["ffn.py::test_equation"])
    assert (code, lines) == (0, ["1 property holds, 0 fail, 0 skipped"])


RENAMED = """def __init__(self, *sizes, **options):
    super().__init__(*sizes, **options)
    self.gate = self.w1
    del self.w1
def reset_parameters(self):
    for linear in self.children():
        std = math.sqrt(2 / sum(linear.weight.shape))
        torch.nn.init.trunc_normal_(linear.weight, std=std, a=-3 * std, b=3 * std)
def forward(self, x): return self.w2(F.silu(self.gate(x)) * self.w3(x))"""
BIASED = """def __init__(self, *sizes, **options):
    super().__init__(*sizes, **options)
    for linear in self.children():
        linear.bias = torch.nn.Parameter(torch.zeros_like(linear.weight[:, 0]))"""
SCALED = """def __init__(self, *sizes, **options):
    super().__init__(*sizes, **options)
    self.scale = torch.nn.Parameter(torch.tensor(1.0))
def forward(self, x): return self.scale * super().forward(x)"""
OTHER_WEIGHTS = {  # what differs, the keys that are reported, and what can still be judged
    "renamed": (
        RENAMED,
        "has the other keys gate.weight and lacks w1.weight",
        "2 properties hold, 1 fails, 3 skipped",
    ),
    "biases": (
        BIASED,
        "has the other keys w1.bias, w2.bias, w3.bias",
        "1 property holds, 1 fails, 4 skipped",
    ),
    "a scale": (
        SCALED,
        "has the other keys scale",
        "1 property holds, 1 fails, 4 skipped",
    ),
}


@pytest.mark.parametrize("case", OTHER_WEIGHTS)
def test_other_weights_give_one_failure_that_lists_them(case, verify, tmp_path):
    methods, keys, outcomes = OTHER_WEIGHTS[case]
    copies = write_copies(tmp_path, ffn=subclass("SwiGLU", methods))
    properties = "names or equation or autocast or checkpointing or initial or passed"
    code, lines = verify(copies, "-k", f"SwiGLU and ({properties}) and not cuda")
    assert (code, lines) == (
        1,
        [
            f"FAIL  ffn: weight_names [SwiGLU]: the state dict {keys}",
            "skip  ffn: this copy has other weights, as weight_names shows",
            outcomes,
        ],
    )


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import sys\nsys.exit(0)", r"rmsnorm.py, line 2: SystemExit: 0"),
        ("<<<<<<< mine", r"rmsnorm.py: SyntaxError: .*\(rmsnorm.py, line 1\)"),
        ("", "the file has no RMSNorm"),
        (
            subclass("RMSNorm", "def forward(self, x): sys.exit(0)"),
            r"SystemExit: 0 \(rmsnorm.py, line 4\)",
        ),
        (
            subclass("RMSNorm", "def forward(self, x): assert x.shape[0] == 99"),
            r": AssertionError \(rmsnorm.py, line 4\)",
        ),
    ],
)
def test_what_cannot_be_judged_fails_in_one_line(source, reason, verify, tmp_path):
    copies = write_copies(tmp_path, rmsnorm=source)
    code, lines = verify(copies, "-k", "equation and not cuda or is_defined")
    [failure] = [line for line in lines if line.startswith("FAIL")]
    assert code == 1
    assert re.search(f"{reason}$", failure), failure


def test_an_error_of_collection_fails_in_one_line(verify, tmp_path):
    (tmp_path / "test_mine.py").write_text("import no_such_package")
    code, lines = verify("tinyblock.rmsnorm", "test_mine.py")
    assert code == pytest.ExitCode.INTERRUPTED
    error = "ModuleNotFoundError: No module named 'no_such_package'"
    assert f"FAIL  tests: collection: {error}" in lines


def test_a_file_whose_relative_imports_fail_is_reported(verify, tmp_path):
    for layer in LAYERS:
        shutil.copy(PACKAGE / f"{layer}.py", tmp_path)
    code, lines = verify(tmp_path, "-k", "is_defined")
    failures = [line for line in lines if line.startswith("FAIL")]
    assert code == 1
    assert [line.partition(":")[0] for line in failures] == [
        "FAIL  block",
        "FAIL  transformer",
    ]
    for line in failures:
        assert line.endswith(
            f"no known parent package; add an __init__.py to {tmp_path}"
        )
    assert lines[-1].endswith(" properties hold, 2 fail, 0 skipped")


@pytest.mark.parametrize(
    "target",
    ["host/my layers", "host/layers/rope.py", "host.layers", "host.layers.rope"],
)
def test_a_target_is_a_folder_a_file_a_package_or_a_module(target, verify, tmp_path):
    for folder in ("my layers", "layers"):
        (tmp_path / "host" / folder).mkdir(parents=True)
        shutil.copy(PACKAGE / "rope.py", tmp_path / "host" / folder)
    code, lines = verify(target, "-k", "is_defined")
    assert (code, lines) == (0, ["1 property holds, 0 fail, 0 skipped"])


@pytest.mark.parametrize("target", ["nowhere/layers", "nowhere.layers", "sys", "", "."])
def test_a_missing_target_is_reported_in_one_line(target, verify):
    code, lines = verify(target)
    assert code == pytest.ExitCode.USAGE_ERROR
    assert len(lines) == 1
    assert re.match(
        r"ERROR: (\S* was not found: give a folder|TARGET must be or contain one of .*"
        rf", got {target!r}: give the folder)",
        lines[0],
    )


def test_the_report_of_no_tests_has_no_count(verify):
    code, lines = verify("tinyblock", "-k", "nothing_like_this")
    assert (code, lines) == (pytest.ExitCode.NO_TESTS_COLLECTED, [])


def test_a_file_that_another_module_hides_is_reported(verify, tmp_path, monkeypatch):
    shutil.copy(PACKAGE / "rope.py", tmp_path)
    monkeypatch.setitem(sys.modules, "rope", pytest)
    code, lines = verify(tmp_path, "-k", "is_defined")
    assert code == 1
    assert "cannot be imported as rope: that is already" in lines[0]


def test_the_equation_is_checked_on_cuda_where_there_is_a_gpu(
    verify, tmp_path, monkeypatch
):
    """Here the CPU stands for the GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for moved in (torch.Tensor, torch.nn.Module):
        monkeypatch.setattr(moved, "to", on_cpu(moved.to))
    broken = subclass("RMSNorm", "def forward(self, x): return super().forward(x) + 1")
    expected = {
        tinyblock.rmsnorm.__name__: 0,
        write_copies(tmp_path, rmsnorm=broken): 1,
    }
    for target, outcome in expected.items():
        code, _ = verify(target, properties=["rmsnorm.py::test_equation_on_cuda"])
        assert code == outcome


def on_cpu(to):
    def moved_to(self, *arguments, **options):
        devices = ["cpu" if argument == "cuda" else argument for argument in arguments]
        return to(self, *devices, **options)

    return moved_to


def test_the_contract_leaves_random_numbers_threads_and_mode_alone(verify):
    before = torch.get_rng_state()
    threads = torch.get_num_threads()
    with torch.no_grad():
        code, _ = verify("tinyblock.rmsnorm", "-k", "initial or float64 and not cuda")
        assert not torch.is_grad_enabled()
    assert code == 0
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads


def test_every_layer_has_a_contract():
    assert {path.name for path in CONTRACT.glob("test_*.py")} == {
        f"test_{layer}.py" for layer in LAYERS
    }


def copy_with_contracts(folder):
    """Copy two layers into a folder, with all that their contracts need."""
    (folder / "contract").mkdir(parents=True)
    for layer in ("rmsnorm", "attention"):
        shutil.copy(PACKAGE / f"{layer}.py", folder)
    for name in ("__init__", "conftest", "checks"):
        shutil.copy(CONTRACT / f"{name}.py", folder / "contract")
    for layer in ("rmsnorm", "attention", "rope"):
        shutil.copy(CONTRACT / f"test_{layer}.py", folder / "contract")


def test_copied_contracts_run_without_tinyblock(tmp_path):
    """In a folder without an __init__.py, and in a package of a package."""
    package = tmp_path / "of_packages" / "layers"
    for folder in (tmp_path / "of folders" / "layers", package):
        copy_with_contracts(folder)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "rmsnorm.py").write_text("class RMSNorm: ...")
    (tmp_path / "conftest.py").write_text(REFUSE_TINYBLOCK_AND_BEARTYPE)
    command = [sys.executable, "-m", "pytest", "-W", "error", "--strict-markers", "-q"]
    command += ["-p", "no:cacheprovider", "-k", "is_defined or device"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env=WITHOUT_PACKAGE
    )
    assert "1 failed, 9 passed" in done.stdout, done.stdout + done.stderr
    assert "of_packages/layers/contract/test_rmsnorm.py::test_device" in done.stdout
