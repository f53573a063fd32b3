"""The profiler as users run it, on tiny sizes."""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from processes import run as run_in_processes
from profiling.kernels import record_run
from profiling.measure import Settings, measure
from profiling.parts import tensors_in
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import tinyblock

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


def test_report_adds_up_and_writes_its_files(run, tmp_path):
    files = {name: tmp_path / f"profile.{name}" for name in ("json", "png", "trace")}
    options = ["--json", files["json"], "--plot", files["png"]]
    options += ["--trace", files["trace"], "--num-heads", 2, "--mode", "step"]
    assert "flash attention" in run(*TINY, *options)
    profile = json.loads(files["json"].read_text())
    assert [row["name"] for row in profile["rows"][-2:]] == ["AdamW", "rest"]
    taken = sum(row["total"] for row in profile["rows"])
    assert taken == pytest.approx(profile["whole"]["total"])
    events = json.loads(files["trace"].read_text())["traceEvents"]
    names = {event.get("name") for event in events}
    assert {"nn.Module: SwiGLU_0", "aten::mm"} <= names
    assert files["png"].read_bytes().startswith(b"\x89PNG")


def test_parts_of_a_block_add_up_to_the_whole(run, tmp_path):
    """The only test of real times."""
    path = tmp_path / "profile.json"
    for _ in range(3):
        run("--device", "cpu", "--d-model", 256, "--seq-len", 256, "--json", path)
        profile = json.loads(path.read_text())
        rest = next(row for row in profile["rows"] if row["name"] == "rest")
        if abs(rest["total"]) < 0.2 * profile["whole"]["total"]:
            return
    pytest.fail(f"rest is {rest['total'] / profile['whole']['total']:.0%}")


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
        with torch.no_grad():
            scale = self.frozen.weight.mean()
        out += scale
        more = checkpoint(self.experts[1], out, use_reentrant=False)
        return x + more, chosen


def encoder():
    return nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)


def stack():
    return tinyblock.Transformer(2, 8, 2, max_seq_len=6, qk_norm=True)


# The FLOPs of attention in forward, which torch does not count on a CPU.
MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "odd": (Odd, 0),
    "encoder": (encoder, 4 * 2 * 2 * 36 * 4),
    "stack": (stack, 2 * 4 * 2 * 2 * 21 * 4),
    "no weights": (nn.Identity, 0),
}


@pytest.mark.parametrize("mode", ["forward", "train"])
@pytest.mark.parametrize("name", MODELS)
def test_any_model_is_cut_and_has_the_flops_that_torch_counts(name, mode, run):
    build, attention = MODELS[name]
    model = build()
    settings = Settings(torch.device("cpu"), torch.float32, mode, rounds=1)
    with torch.set_grad_enabled(settings.train):
        measured = measure((lambda *_: model, (2, 6, 8)), name, settings)
        x = torch.randn(2, 6, 8, requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            out = tensors_in(model(x))[0]
            if settings.train:
                out.sum().backward()
    counted = counter.get_total_flops() + attention * (3 if settings.train else 1)
    assert measured.whole.flops == counted
    assert measured.notes == [] or "NOISY" in measured.notes[0]
    if name == "odd":
        names = ["norm", "conv", "experts.*", "frozen", "sums", "rest"]
        assert sorted(row.name for row in measured.rows) == sorted(names)


def test_fused_encoder_is_one_row_whose_operation_is_named(run):
    settings = Settings(torch.device("cpu"), torch.float32, "forward", rounds=1)
    with torch.no_grad():
        build = encoder().eval
        measured = measure((lambda *_: build(), (2, 6, 8)), "encoder", settings)
    assert [row.name for row in measured.rows] == ["sums", "rest"]
    assert "aten._transformer_encoder_layer_fwd: no formula" in measured.notes[0]


def test_block_of_the_users_own(run, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(tmp_path)
    Path(tmp_path, "my_block.py").write_text(
        "from torch import nn\n"
        "def build():\n"
        "    return nn.TransformerEncoderLayer(32, 2, 48, batch_first=True)\n"
    )
    text = run(*TINY, "--block", "my_block:build", "--dtype", "bfloat16")
    assert "| self_attn " in text
    assert "my_block:build: 1 x 16 tokens, d_model 32; bfloat16, train" in text
    with pytest.raises(SystemExit):
        run("--block", "my_block:build", "--d-model", "33")
    assert "accepts x of shape (1, 128, 33)" in capsys.readouterr().err


def test_wrapper_of_the_page_is_cut(run, tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    page = (SCRIPT.parents[1] / "docs" / "profile.md").read_text()
    code = page.split("```py\n")[1].split("```")[0]
    Path(tmp_path, "my_llama.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    text = run("--block", "my_llama:build", "--d-model", 256, "--rounds", 2)
    assert "| model.layers.*.self_attn " in text


def test_compiled_parts_report_graphs(run, monkeypatch):
    compile = partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", compile)
    text = run(*TINY, "--num-heads", 2, "--compile", "--mode", "forward")
    assert "graphs: 1, breaks: none" in text
    assert ", forward, compiled;" in text


BAD_INPUT = {
    "num_heads=5": ["--d-model", "32", "--num-heads", "5"],
    "--rounds: invalid positive value: '0'": ["--rounds", "0"],
    "--nproc-per-node 2": ["--tp", "2"],
    "without --preset, --num-heads": [
        *("--block", "a:b", "--preset", "small", "--num-heads", "2")
    ],
    "got torch:": ["--block", "torch"],
    "got no_module:f: No module": ["--block", "no_module:f"],
    "has no attribute 'nothing'": ["--block", "torch:nothing"],
    "a function without arguments": ["--block", "torch.nn:Linear"],
    "invalid choice: 'tpu'": ["--device", "tpu"],
}


@pytest.mark.parametrize("message", BAD_INPUT)
def test_bad_input_ends_with_one_line(run, capsys, message):
    with pytest.raises(SystemExit) as ended:
        run(*BAD_INPUT[message])
    assert ended.value.code == 2
    usage, error = capsys.readouterr().err.splitlines()
    assert usage.startswith("usage:")
    assert message in error


def test_preset_yields_to_what_is_typed(run, monkeypatch):
    seen = {}

    def measure(sized, title, *rest):
        seen["title"] = title
        raise KeyboardInterrupt

    monkeypatch.setattr("profile_block.measure", measure)
    preset = "Block, 32 heads (8 KV heads), d_ff 14336"
    for typed, expected in {
        (): f"{preset}: 1 x 128 tokens, d_model 4096",
        ("--seq-len", 7, "--num-heads", 32): f"{preset}: 1 x 7 tokens, d_model 4096",
        ("--d-model", 64): f"{preset}: 1 x 128 tokens, d_model 64",
    }.items():
        with pytest.raises(KeyboardInterrupt):
            run("--preset", "llama-3.1-8b", *typed)
        assert seen["title"] == expected


def test_recording_counts_the_peak_of_what_is_alive():
    def run():
        for _ in range(3):
            torch.ones(1000)
        kept = torch.ones(500)
        return torch.ones(1000) + kept[0]

    recording = record_run(run)
    # Two tensors of 1,000 and one of 500; the small ones are scalars.
    assert 10_000 <= recording.peak_added_bytes <= 10_300
    assert recording.attention == "no fused"
    assert recording.kernels == {}


def test_several_processes_report_time_and_collectives():
    failed, text = run_in_processes(SCRIPT, *TINY, "--tp", "2", "--num-heads", "2")
    assert not failed, text
    assert "2 processes" in text
    assert text.count("tokens/s") == 1
    [calls] = [line for line in text.splitlines() if "Collectives" in line]
    for name in ("allgather", "reduce_scatter"):
        assert name in calls
