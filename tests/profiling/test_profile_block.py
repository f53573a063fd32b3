"""The profiler as users run it, on tiny sizes."""

import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from processes import run as run_in_processes
from profiling.kernels import record
from profiling.roofline import Rates
from profiling.rows import limit_of, remainder, seconds_of
from profiling.units import seconds, share, si
from profiling.work import Work

import tinyblock  # noqa: F401  before the script disables the shape checks

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
    arguments = [
        "--json",
        files["json"],
        "--plot",
        files["png"],
        "--trace",
        files["trace"],
    ]
    text = run(*TINY, "--num-heads", 2, "--mode", "step", *arguments)
    rows = table(text)
    whole = rows["the whole"]
    assert all(whole.values())
    assert whole["share"] == "100%"
    assert list(rows)[-3:] == ["AdamW", "rest", "the whole"]
    profile = json.loads(files["json"].read_text())
    *parts, total = profile["rows"]
    taken = sum(row["seconds"]["total"] for row in parts)
    noise = total["seconds"]["total"] * total["varies"] / 2
    rest_is_noise = parts[-1]["seconds"]["total"] == 0
    expected = pytest.approx(total["seconds"]["total"], 1e-9, noise * rest_is_noise)
    assert taken == expected
    assert sum(row["kept_bytes"] for row in parts) == total["kept_bytes"] > 0
    assert sum(row["work"]["flops"] for row in parts) == total["work"]["flops"]
    memory = profile["memory"]
    assert memory["AdamW"] == 2 * memory["parameters"] == 2 * memory["gradients"]
    least = memory["parameters"] + memory["AdamW"] + total["kept_bytes"]
    assert memory["peak"] > least + memory["gradients"] // 2
    assert "flash attention" in text
    events = {
        event.get("name")
        for event in json.loads(files["trace"].read_text())["traceEvents"]
    }
    assert {"ffn up forward", "rope backward", "the whole", "aten::mm"} <= events
    assert files["png"].read_bytes().startswith(b"\x89PNG")


def test_forward_of_a_stack_keeps_nothing(run):
    text = run(*TINY, "--num-heads", 2, "--num-layers", 2, "--mode", "forward")
    rows = table(text)
    assert "backward ms" not in rows["rope"]
    assert {row["kept"] for row in rows.values()} == {"0 B"}
    assert "gradients 0 B" in text
    assert "final norm" in rows


def test_block_of_the_users_own(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my_block.py").write_text(
        "from torch import nn\n"
        "def build():\n"
        "    return nn.TransformerEncoderLayer(32, 2, 48, batch_first=True)\n"
    )
    text = run(
        *TINY, "--block", "my_block:build", "--mode", "step", "--dtype", "bfloat16"
    )
    rows = table(text)
    modules = ["norm1", "norm2", "linear1", "linear2"]
    assert sorted(rows) == sorted([*modules, "AdamW", "rest", "the whole"])
    assert "my_block:build: 1 x 16 tokens, d_model 32; bfloat16, step" in text
    assert all(rows["the whole"].values())


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

    def measure(subject, *rest, **settings):
        seen["subject"] = subject
        raise KeyboardInterrupt

    monkeypatch.setattr("profile_block.measure", measure)
    for typed, expected in {
        (): "Block, 32 heads (8 of keys), d_ff 14336: 1 x 128 tokens, d_model 4096",
        (
            "--seq-len",
            7,
        ): "Block, 32 heads (8 of keys), d_ff 14336: 1 x 7 tokens, d_model 4096",
        ("--d-model", 64): "Block, 32 heads: 1 x 128 tokens, d_model 64",
    }.items():
        with pytest.raises(KeyboardInterrupt):
            run("--preset", "llama-3.1-8b", *typed)
        assert seen["subject"].title == expected


def test_units_follow_the_size_of_the_number():
    assert [si(3.11e6, "B"), si(999.6), si(0.0, "B")] == ["3.11 MB", "1.00 k", "0 B"]
    assert [seconds(2e-6), seconds(0.0123), seconds(1.5)] == [
        "2.00 us",
        "12.3 ms",
        "1.50 s",
    ]
    assert [share(0.042), share(1.5)] == ["4.2%", "150%"]


def test_rest_is_what_parts_leave_and_0_within_the_noise():
    samples = {"a forward": [3.0] * 5, "a train": [8.0, 9.0, 10.0, 11.0, 12.0]}
    parts = [{"forward": 1.0, "backward": 2.0, "total": 3.0}, {"total": 6.0}]
    rest = {"forward": 2.0, "backward": 5.0, "total": 1.0}
    # From p20 to p80, the total varies by 8.8 to 11.2.
    assert remainder(samples, "a", parts) == dict.fromkeys(rest, 0.0)
    parts[1]["total"] = 5.5
    assert remainder(samples, "a", parts) == rest | {"total": 1.5}


def test_seconds_are_medians_of_all_copies():
    samples = {"a forward": [1.0, 2.0, 9.0], "a train": [6.0, 5.0, 7.0]}
    assert seconds_of(samples, "a", 2) == {"forward": 4, "backward": 8, "total": 12}
    assert seconds_of({"a step": [3.0]}, "a") == {"total": 3.0}


def test_limit_is_what_takes_the_longest():
    rates = Rates(flops=100.0, bytes=10.0)
    assert limit_of(Work(500, 20), 3.0, rates) == "compute"
    assert limit_of(Work(100, 40), 3.0, rates) == "memory"
    assert limit_of(Work(100, 20), 3.0, rates) == "overhead"
    assert rates.seconds(Work(500, 20)) == 5.0


def test_recording_counts_the_peak_of_what_is_alive():
    def run():
        for _ in range(3):
            torch.ones(1000)
        kept = torch.ones(500)
        return torch.ones(1000) + kept[0]

    recording = record(run, with_memory=True)
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
