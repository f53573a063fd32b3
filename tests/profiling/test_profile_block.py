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
from profiling.record import record
from profiling.units import seconds, share, si
from torch import nn
from torch.utils.checkpoint import checkpoint

import tinyblock

SCRIPT = Path(__file__).parents[2] / "scripts" / "profile_block.py"
TINY = ["--seq-len", "16", "--d-model", "32", "--rounds", "2", "--device", "cpu"]


@pytest.fixture
def run(monkeypatch, capsys):
    """Return a function that runs the script in this process, and returns its output."""
    monkeypatch.setenv("JAXTYPING_DISABLE", "")
    monkeypatch.setattr(sys, "path", list(sys.path))
    import profile_block

    # A smaller copy than that of a measurement.
    monkeypatch.setattr(
        "profiling.roofline._copy_sampler", lambda device: lambda: 1e-10
    )

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["profile_block.py", *map(str, arguments)])
        with torch.random.fork_rng():
            profile_block.main()
        return capsys.readouterr().out

    return run


def table(text):
    """Return the rows of the report's first table, by name and column."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    columns, _, *rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in lines
    ]
    return {row[0]: dict(zip(columns, row, strict=True)) for row in rows}


def test_report_adds_up_and_writes_its_files(run, tmp_path):
    files = {name: tmp_path / f"profile.{name}" for name in ("json", "png", "trace")}
    options = ["--json", files["json"], "--plot", files["png"]]
    text = run(
        *TINY, "--num-heads", 2, "--mode", "step", *options, "--trace", files["trace"]
    )
    rows = table(text)
    assert list(rows)[-3:] == ["AdamW", "rest", "the whole"]
    profile = json.loads(files["json"].read_text())
    taken = sum(row["total"] for row in profile["rows"])
    assert taken == pytest.approx(profile["whole"]["total"])
    assert "flash attention" in text
    events = json.loads(files["trace"].read_text())["traceEvents"]
    names = {event.get("name") for event in events}
    assert {"ffn.w1 forward", "attn.rope backward", "the whole", "aten::mm"} <= names
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


MODELS: dict[str, Callable[[], nn.Module]] = {
    "odd": Odd,
    "encoder": lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True),
    "stack": lambda: tinyblock.Transformer(2, 8, 2, max_seq_len=6, qk_norm=True),
}


@pytest.mark.parametrize("name", MODELS)
def test_stretches_compute_what_the_model_computes(name):
    model = MODELS[name]()
    x = torch.randn(2, 6, 8, requires_grad=True)
    stretches = record(model, x)
    found = {}
    for stretch in stretches:
        results = stretch.forward()
        for result, expected in zip(results, stretch.results.values(), strict=True):
            if name != "odd":  # its tensors change after they are recorded
                torch.testing.assert_close(result, expected)
        leaves = [each for each in stretch.inputs if each.requires_grad]
        for leaf, gradient in zip(leaves, stretch.backward(results), strict=False):
            if gradient is not None:
                found[id(leaf)] = gradient
    weights = [each for each in model.parameters() if each.requires_grad]
    used = [each for each in weights if id(each) in found]
    assert len(weights) - len(used) == (4 if name == "odd" else 0)  # idle and unused
    assert not any(module._forward_hooks for module in model.modules())


def test_block_of_the_users_own(run, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    Path(tmp_path, "my_block.py").write_text(
        "from torch import nn\n"
        "def build():\n"
        "    return nn.TransformerEncoderLayer(32, 2, 48, batch_first=True)\n"
        "built = build()\n"
    )
    text = run(*TINY, "--block", "my_block:build", "--dtype", "bfloat16")
    assert next(iter(table(text))) == "self_attn"
    assert "my_block:build: 1 x 16 tokens, d_model 32; bfloat16, train" in text


def test_compiled_parts_report_graphs(run, monkeypatch):
    compile = partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", compile)
    text = run(*TINY, "--num-heads", 2, "--compile", "--mode", "forward")
    assert "graphs: 1, breaks: none" in text
    assert ", forward, compiled;" in text


BAD_INPUT = {
    "num_heads=5": ["--d-model", "32", "--num-heads", "5"],
    "--rounds: invalid positive value: '0'": ["--rounds", "0"],
    "must end in .png, .svg or .pdf, got a.txt": ["--plot", "a.txt"],
    "cannot write": ["--json", "no/such/folder/profile.json"],
    "--nproc-per-node 2": ["--tp", "2"],
    "without --preset, --num-heads": [
        *("--block", "a:b", "--preset", "small", "--num-heads", "2")
    ],
    "must be MODULE:FUNCTION, got torch": ["--block", "torch"],
    "add the folder of no_module to PYTHONPATH": ["--block", "no_module:f"],
    "torch has no function nothing": ["--block", "torch:nothing"],
    "got a class": ["--block", "torch.nn:Linear"],
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


def test_too_little_memory_ends_with_one_line(run, capsys, monkeypatch):
    def fail(*arguments, **settings):
        torch.empty(2**60, dtype=torch.uint8)

    monkeypatch.setattr("profile_block.measure", fail)
    with pytest.raises(SystemExit):
        run(*TINY, "--num-heads", 2)
    assert "too little memory" in capsys.readouterr().err.splitlines()[1]


def test_preset_yields_to_what_is_typed(run, monkeypatch):
    seen = {}

    def measure(build, shape, title, *rest):
        seen["title"] = title
        raise KeyboardInterrupt

    monkeypatch.setattr("profile_block.measure", measure)
    preset = "Block, 32 heads (8 KV heads), d_ff 14336"
    for typed, expected in {
        (): f"{preset}: 1 x 128 tokens, d_model 4096",
        ("--seq-len", 7): f"{preset}: 1 x 7 tokens, d_model 4096",
        ("--num-heads", 32): f"{preset}: 1 x 128 tokens, d_model 4096",
        ("--d-model", 64): "Block, 32 heads: 1 x 128 tokens, d_model 64",
    }.items():
        with pytest.raises(KeyboardInterrupt):
            run("--preset", "llama-3.1-8b", *typed)
        assert seen["title"] == expected


def test_units_follow_the_size_of_the_number():
    assert [si(3.11e6, "B"), si(999.6), si(0.0, "B")] == ["3.11 MB", "1.00 k", "0 B"]
    assert [seconds(2e-6), seconds(0.0123), seconds(1.5)] == [
        "2.00 us",
        "12.3 ms",
        "1.50 s",
    ]
    assert [share(0.042), share(1.5)] == ["4.2%", "150%"]


def test_recording_counts_the_peak_of_what_is_alive():
    def run():
        for _ in range(3):
            torch.ones(1000)
        kept = torch.ones(500)
        return torch.ones(1000) + kept[0]

    recording = record_run(run, with_memory=True)
    # Two tensors of 1,000 and one of 500; the small ones are scalars.
    assert 10_000 <= recording.peak_added_bytes <= 10_300
    assert recording.attention is None
    assert recording.kernels == []


def test_several_processes_report_time_and_collectives():
    failed, text = run_in_processes(SCRIPT, *TINY, "--tp", "2", "--num-heads", "2")
    assert not failed, text
    assert "2 processes" in text
    assert text.count("tokens/s") == 1
    [calls] = [line for line in text.splitlines() if "Collectives" in line]
    for name in ("allgather", "reduce_scatter"):
        assert name in calls
