"""The profiler as users run it, on tiny sizes."""

import json
import os
import pty
import signal
import subprocess
import sys
from collections import OrderedDict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import profile_block
import pytest
import torch
from torch import nn

HERE = str(Path(__file__).parent)

TINY = ["--seq-len", "16", "--d-model", "32", "--num-heads", "2"]


@pytest.fixture
def run(capsys):
    """Return a function that runs the command on a CPU, and returns its output."""

    def run(*options):
        typed = ["--device", "cpu", "--rounds", "2", *map(str, options)]
        with torch.random.fork_rng():
            profile_block.main(typed)
        return capsys.readouterr().out

    return run


def table_of(text):
    """Return the lines of the table of parts."""
    assert "\npart " in text, text
    return text.partition("\npart ")[2].partition("\n\n")[0].splitlines()


PARTS = ["ln1", "attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.rope", "attn"]
PARTS += ["attn.output_proj", "ln2", "ffn.w1", "ffn.w3", "ffn", "ffn.w2", "sums"]


def test_all_outputs_of_a_training_step_agree(run, tmp_path):
    pytest.importorskip("matplotlib", reason="requires the extra dev")
    files = [tmp_path / name for name in ("figures.json", "plot.png", "run.trace")]
    outputs = [*("--json", files[0]), *("--plot", files[1]), *("--trace", files[2])]
    printed = run(*TINY, "--mode", "step", *outputs)
    assert "\nBlock, 2 heads: 1 x 16 tokens, d_model 32; float32, step" in printed
    names = [line.split()[0] for line in table_of(printed)[1:]]
    assert names == [*PARTS, "AdamW", "rest", "total"]

    profile = json.loads(files[0].read_text())
    whole, rows = profile["whole"], {row["name"]: row for row in profile["rows"]}
    assert list(rows) == names[:-1]
    assert sum(row["total_s"] for row in rows.values()) == pytest.approx(
        whole["total_s"]
    )
    assert profile["samples_per_s"] == pytest.approx(16 / profile["took_s"]["median"])
    compute = whole["flops"]["float32"] / profile["rates"]["flops_per_s"]["float32"]
    assert profile["mfu"] == pytest.approx(compute / whole["total_s"])
    # For each head, query, and key that is not later, in each of three passes: two products.
    assert rows["attn"]["flops"] == {"float32": 3 * 2 * 2 * 2 * (16 * 17 // 2) * 16}
    assert rows["attn.q_proj"]["flops"] == {"float32": 3 * 2 * 16 * 32 * 32}

    assert files[1].read_bytes().startswith(b"\x89PNG")

    events = json.loads(files[2].read_text())["traceEvents"]
    spans = [event for event in events if event.get("cat") == "user_annotation"]
    assert {*PARTS, "AdamW"} <= {span["name"] for span in spans}
    [forward, _] = [span for span in spans if span["name"] == "attn.q_proj"]
    inside = [
        event["name"]
        for event in events
        if event.get("cat") == "cpu_op"
        and forward["ts"] <= event["ts"] <= forward["ts"] + forward["dur"]
    ]
    assert "aten::mm" in inside


def one_product():
    """Return a model that compiles without a C++ compiler."""
    return nn.Sequential(nn.Linear(32, 32, bias=False))


def test_compiled_model_reports_graphs_and_its_trace_has_no_parts(run, tmp_path):
    file = tmp_path / "run.trace"
    options = ["--block", f"{__name__}:one_product", "--d-model", 32, "--trace", file]
    text = run(*options, "--compile", "--mode", "forward")
    assert ", forward, compiled, eval mode\n" in text
    note = "graphs: 1, breaks: none. The parts were measured in eager mode."
    assert note in " ".join(text.split())
    names = {event["name"] for event in json.loads(file.read_text())["traceEvents"]}
    assert "aten::mm" in names
    assert "*" not in names  # naming parts would run them in eager mode


def test_parts_add_up_to_the_whole(run, tmp_path):
    """The only test of real times."""
    file = tmp_path / "figures.json"
    for _ in range(5):
        run("--d-model", 256, "--seq-len", 256, "--rounds", 5, "--json", file)
        profile = json.loads(file.read_text())
        rest = profile["rows"][-1]["total_s"] / profile["whole"]["total_s"]
        if abs(rest) < 0.25:
            break
    else:
        pytest.fail(f"rest is {rest:.0%} of the total in five runs")


def test_shape_checks_are_off_for_the_own_block_and_not_for_others(tmp_path):
    """In programs of their own, because jaxtyping reads the choice as it is imported."""
    (tmp_path / "beartype.py").write_text("raise ModuleNotFoundError('beartype')")
    tiny = [*TINY[:4], "--rounds", "1", "--device", "cpu", "--mode", "forward"]
    users = ["--block", "stacks:build"]
    # The own block works without beartype.
    for folder, options, expected in ((tmp_path, [], "off"), (HERE, users, "on")):
        done = subprocess.run(
            [sys.executable, profile_block.__file__, *tiny, *options],
            env=os.environ | {"JAXTYPING_DISABLE": "0", "PYTHONPATH": str(folder)},
            capture_output=True,
            text=True,
        )
        assert f"\nShape checks: {expected} (" in done.stdout, done.stderr


def test_progress_and_interruption_at_a_terminal():
    """A program at a terminal says what it does, and ends at Ctrl-C with one line."""
    terminal, programs_end = pty.openpty()
    command = [sys.executable, profile_block.__file__, *TINY, "--device", "cpu"]
    with subprocess.Popen(
        [*command, "--rounds", "100000"],
        stderr=programs_end,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as program:
        os.close(programs_end)
        said = b""
        while b"round 2 of 100000" not in said:
            said += os.read(terminal, 1000)
        program.send_signal(signal.SIGINT)
        assert program.wait() == 130
        said += os.read(terminal, 1000)
        assert program.stdout.read() == b""
    os.close(terminal)
    assert b"building the model" in said
    assert said.replace(b"\r\n", b"\n").endswith(b"\nInterrupted.\n")
    assert b"Traceback" not in said


# --- Models ---------------------------------------------------------------------------


def long_name():
    """Return a model with a name that would not fit beside the other columns."""
    encoder = nn.TransformerEncoderLayer(32, 2, 48, batch_first=True)
    layers = {"long" * 25: nn.Linear(32, 32), "layer": encoder}
    return nn.Sequential(OrderedDict(layers))


def test_block_of_the_users_own_in_a_dtype(run):
    own = f"{__name__}:long_name"
    text = run("--block", own, "--seq-len", 16, "--d-model", 32, "--dtype", "bfloat16")
    title = f"{own}: 1 x 16 tokens, d_model 32; bfloat16, train"
    assert f"\n{title}, eager, training mode\n" in text
    table = table_of(text)
    assert any(line.startswith("layer.self_attn ") for line in table)
    assert any("..." in line for line in table)
    assert max(map(len, table)) <= 120


def with_inputs():
    inputs = {"ids": torch.arange(6).view(2, 3), "weight": torch.ones(3, 4)}
    model: Any = nn.Linear(4, 4)
    model.forward = lambda ids, weight: (
        nn.functional.linear(weight, model.weight) * ids.sum()
    )
    return model, inputs


def test_inputs_of_a_users_model_have_its_dtype(run, tmp_path):
    own = f"{__name__}:with_inputs"
    text = run("--block", own, "--dtype", "bfloat16", "--mode", "forward")
    assert f"\n{own}: ids 2 x 3, weight 3 x 4; bfloat16, forward" in text
    assert " tokens/s, " in text
    with pytest.raises(SystemExit, match="must be used without --seq-len, --d-model"):
        run("--block", own, "--seq-len", 3, "--d-model", 4)


def no_module():
    return lambda x: x


def my_own_error():
    raise ValueError("my own")


def test_errors_of_a_users_function_are_shown_as_they_are(run):
    with pytest.raises(TypeError, match="or one with its inputs, got function; put"):
        run("--block", f"{__name__}:no_module")
    with pytest.raises(ValueError, match=r"^my own$"):
        run("--block", f"{__name__}:my_own_error")


def test_missing_package_of_a_users_module_is_shown_as_it_is(run):
    if find_spec("tensorboard"):
        pytest.skip("requires a module that imports what is missing")
    with pytest.raises(ModuleNotFoundError, match="No module named 'tensorboard'"):
        run("--block", "torch.utils.tensorboard:SummaryWriter")


# --- Options --------------------------------------------------------------------------


def test_typed_sizes_replace_those_of_the_preset():
    typed = ["--preset", "llama-3.1-8b", "--seq-len", "7", "--d-model", "64"]
    size = profile_block.size_of(profile_block.options().parse_args(typed))
    preset = "Block, 32 heads (8 KV heads), d_ff 14336"
    assert size.title == f"{preset}: 1 x 7 tokens, d_model 64"


BAD_OPTIONS = {
    "--rounds: invalid positive value: '0'": "--rounds 0",
    "--device: torch sees no GPU; ": "--device cuda",
    "--preset: invalid choice: 'gpt5'": "--preset gpt5",
    "without --preset, --num-heads, --num-kv-heads, --d-head, --d-ff, --num-layers": (
        "--block torch.nn:Linear --preset small --num-heads 2 --num-kv-heads 2 "
        "--d-head 2 --d-ff 2 --num-layers 2"
    ),
    "got no_module:f, but no module no_module is on PYTHONPATH": (
        "--block no_module:f"
    ),
    "got torch.none:f, but no module torch.none is on PYTHONPATH": (
        "--block torch.none:f"
    ),
    "nn/__init__.py has no f": "--block torch.nn:f",
    "must be MODULE:FUNCTION, got torch.nn": "--block torch.nn",
    "d_model must be a multiple of num_heads": "--d-model 33 --num-heads 2",
    "--json: FILE must be in a folder that exists": "--json no/file",
    "--trace: FILE must be in a folder that exists": "--trace no/file",
    "--plot: FILE must end with .": "--plot file.txt",
    "can be written, got .": "--json .",
}


def test_bad_options_end_with_one_line_before_anything_is_measured(capsys):
    pytest.importorskip("matplotlib", reason="requires the extra dev")
    for message, typed in BAD_OPTIONS.items():
        with pytest.raises(SystemExit, match="2"):
            profile_block.main(typed.split())
        usage, error = capsys.readouterr().err.splitlines()
        assert usage.startswith("usage: ")
        assert message in error, typed
