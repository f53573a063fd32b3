"""The profiler as users run it, on tiny sizes."""

import json
import re
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from processes import run as run_in_processes
from profiling.measure import Settings, measure
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

SCRIPT = Path(__file__).parents[2] / "scripts" / "profile_block.py"
TINY = ["--seq-len", "16", "--d-model", "32", "--rounds", "2", "--device", "cpu"]


@pytest.fixture
def run(monkeypatch, capsys):
    """Return a function that runs the script in this process, and returns its output."""
    monkeypatch.setenv("JAXTYPING_DISABLE", "")
    monkeypatch.setattr(sys, "path", list(sys.path))
    import profile_block

    # The copy of a measurement is large.
    rates = {"matmul": lambda: 1e-10, "memory copy": lambda: 1e-10}
    monkeypatch.setattr("profiling.measure.rate_samplers", lambda *_: rates)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["profile_block.py", *map(str, arguments)])
        with torch.random.fork_rng():
            profile_block.main()
        return capsys.readouterr().out

    return run


def test_parts_add_up_to_the_whole_and_files_are_written(run, tmp_path):
    """The only test of real times."""
    files = {name: tmp_path / f"profile.{name}" for name in ("json", "png", "trace")}
    options = ["--json", files["json"], "--plot", files["png"]]
    options += ["--trace", files["trace"], "--mode", "step", "--device", "cpu"]
    for _ in range(3):
        run(*options, "--d-model", 256, "--seq-len", 256)
        profile = json.loads(files["json"].read_text())
        rest = profile["rows"][-1]
        whole = profile["whole"]["total"]
        assert sum(row["total"] for row in profile["rows"]) == pytest.approx(whole)
        if abs(rest["total"]) < 0.2 * whole:
            break
    else:
        pytest.fail(f"rest is {rest['total'] / whole:.0%}")
    events = json.loads(files["trace"].read_text())["traceEvents"]
    names = {event.get("name") for event in events}
    assert {"nn.Module: SwiGLU_0", "aten::mm"} <= names
    assert files["png"].read_bytes().startswith(b"\x89PNG")


class Odd(nn.Module):
    """Experts without tokens, a convolution, a tuple, changes in place, keywords."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1, groups=8)
        self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        h = self.conv(self.norm(input=x).transpose(1, 2)).mT
        out = torch.zeros_like(h)
        chosen = torch.arange(x.shape[1]) % 2
        for index, expert in enumerate(self.experts):
            if (chosen == index).any():
                out[:, chosen == index] = expert(h[:, chosen == index])
        out = self.norm(self.frozen(out))
        out += 1
        more = checkpoint(self.experts[1], out, use_reentrant=False)
        return x + more, chosen


@pytest.mark.parametrize("mode", ["forward", "train"])
def test_any_model_has_its_modules_and_the_flops_that_torch_counts(mode, run):
    model = Odd()
    settings = Settings(torch.device("cpu"), torch.float32, mode, rounds=1)
    with torch.set_grad_enabled(settings.train):
        measured = measure((lambda *_: model, (2, 6, 8)), "odd", settings)
        x = torch.randn(2, 6, 8, requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            out, _ = model(x)
            if settings.train:
                out.sum().backward()
    assert measured.whole.flops == counter.get_total_flops()
    assert not [note for note in measured.notes if "no formula" in note]
    trained = [each for each in model.parameters() if each.grad is not None]
    assert measured.memory["gradients"] == sum(each.nbytes for each in trained)
    counts = {row.name: row.count for row in measured.rows}
    others = dict.fromkeys(["conv", "frozen", "norm", "sums", "rest"], 1)
    assert counts == {"experts.*": 3, **others}


def test_block_of_the_users_own(run, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(tmp_path)
    Path(tmp_path, "my_block.py").write_text(
        "from torch import nn\n"
        "def build():\n"
        "    return nn.TransformerEncoderLayer(32, 2, 48, batch_first=True)\n"
        "def fused():\n"
        "    return build().eval()\n"
    )
    text = run(*TINY, "--block", "my_block:build", "--dtype", "bfloat16")
    assert "| self_attn " in text
    assert "my_block:build: 1 x 16 tokens, d_model 32; bfloat16, train" in text
    assert "unknown for a block of your own" in text
    text = run(*TINY, "--block", "my_block:fused", "--mode", "forward")
    assert "FLOPs without aten._transformer_encoder_layer_fwd: no formula" in text
    with pytest.raises(SystemExit):
        run("--block", "my_block:build", "--d-model", "33")
    assert "(batch, seq, d_model) = (1, 128, 33), got " in capsys.readouterr().err


def test_wrapper_of_the_page_is_cut(run, tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    page = (SCRIPT.parents[1] / "docs" / "profile.md").read_text()
    code = page.split("```py\n")[1].split("```")[0]
    Path(tmp_path, "my_llama.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    text = run("--block", "my_llama:build", "--d-model", 256, "--rounds", 2)
    assert "| model.layers.*.self_attn " in text


def test_compiled_model_reports_graphs(run, monkeypatch):
    compile = partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", compile)
    text = run(*TINY, "--num-heads", 2, "--compile", "--mode", "forward")
    assert "graphs: 1, breaks: none" in text
    assert ", forward, compiled\n" in text


BAD_INPUT = {
    "--rounds: invalid positive value: '0'": ["--rounds", "0"],
    "--nproc-per-node 2": ["--tp", "2"],
    "without --preset, --num-heads": [
        "--block",
        "a:b",
        "--preset",
        "small",
        "--num-heads",
        "2",
    ],
    "got no_module:f: No module": ["--block", "no_module:f"],
    "got TypeError: Linear.__init__() missing": ["--block", "torch.nn:Linear"],
}


@pytest.mark.parametrize("message", BAD_INPUT)
def test_bad_input_ends_with_one_line(run, capsys, message):
    with pytest.raises(SystemExit) as ended:
        run(*BAD_INPUT[message])
    assert ended.value.code == 2
    _usage, error = capsys.readouterr().err.splitlines()
    assert message in error


def test_preset_yields_to_what_is_typed(run, monkeypatch):
    def measure(sized, title, *rest):
        raise ValueError(title)

    monkeypatch.setattr("profile_block.measure", measure)
    with pytest.raises(SystemExit) as ended:
        run("--preset", "llama-3.1-8b", "--seq-len", 7, "--d-model", 64)
    preset = "Block, 32 heads (8 KV heads), d_ff 14336"
    assert str(ended.value.__context__) == f"{preset}: 1 x 7 tokens, d_model 64"


def test_several_processes_report_time_and_collectives():
    failed, text = run_in_processes(SCRIPT, *TINY, "--dp", "2", "--num-heads", "2")
    assert not failed, text
    assert "2 processes" in text
    [found] = re.findall(r": ([\d.]+) ms .*, ([\d.]+ k?) ?tokens/s", text)
    taken, rate = (float(each.replace(" k", "e3")) for each in found)
    assert taken * rate == pytest.approx(2e3 * 16, rel=0.02)
    [calls] = [line for line in text.splitlines() if "Collectives" in line]
    for name in ("allgather", "reduce_scatter"):
        assert name in calls
