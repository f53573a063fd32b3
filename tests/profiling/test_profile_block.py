"""The command as users run it, on tiny sizes."""

import json
import os
import pty
from contextlib import redirect_stderr
from importlib.util import find_spec

import forked
import profile_block
import pytest
import torch
from torch import nn


@pytest.fixture
def run(capsys):
    """Return a function that runs the command on a CPU, and returns its output."""

    def run(*options):
        typed = ["--device", "cpu", "--rounds", "2", *map(str, options)]
        with torch.random.fork_rng():
            profile_block.main(typed)
        return capsys.readouterr().out

    return run


def events_of(file):
    return json.loads(file.read_text())["traceEvents"]


PARTS = ["ln1", "attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.rope", "attn"]
PARTS += ["attn.output_proj", "ln2", "ffn.w1", "ffn.w3", "ffn", "ffn.w2", "sums"]


def test_all_outputs_of_a_training_step_agree(run, tmp_path):
    pytest.importorskip("matplotlib", reason="requires the extra dev")
    figures, picture, trace = tmp_path / "a.json", tmp_path / "a.png", tmp_path / "a"
    outputs = ["--json", figures, "--plot", picture, "--trace", trace, "--all-parts"]
    sizes = ["--preset", "small", "--d-model", 128, "--num-heads", 2]
    for _ in range(5):  # the only test of real times, which a busy machine disturbs
        printed = run(*sizes, "--mode", "step", *outputs)
        profile = json.loads(figures.read_text())
        whole, rows = profile["whole"], {row["name"]: row for row in profile["rows"]}
        if abs(rows["rest"]["total_s"]) < 0.25 * whole["total_s"]:
            break
    else:
        pytest.fail("rest is more than 25% of the total in five runs")
    # The width of the FFN is that of the preset.
    title = "Block, 2 heads, d_ff 3072: 1 x 128 tokens, d_model 128; float32, step"
    assert f"\n{title}, eager, training mode\n" in printed
    table = printed.partition("\npart ")[2].partition("\n\n")[0].splitlines()[1:]
    names = [line.split()[0] for line in table]
    assert names == [*PARTS, "AdamW", "rest", "total"]

    assert list(rows) == names[:-1]
    sums = sum(row["total_s"] for row in rows.values())
    assert sums == pytest.approx(whole["total_s"])
    # For each head, query, and key that is not later, in each of three passes: two products.
    assert rows["attn"]["flops"] == {"float32": 3 * 2 * 2 * 2 * (128 * 129 // 2) * 64}
    assert picture.read_bytes().startswith(b"\x89PNG")
    labels = {
        event["name"]
        for event in events_of(trace)
        if event.get("cat") == "user_annotation"
    }
    assert {*PARTS, "AdamW"} <= labels


class Projects(nn.Module):
    """A product, which compiles without a C++ compiler, of one of its inputs."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(4, 4, bias=False)

    def forward(self, ids, weight):
        return self.project(weight)


def with_inputs():
    return Projects(), {"ids": torch.arange(6).view(2, 3), "weight": torch.ones(3, 4)}


def test_compiled_model_with_inputs_of_its_own_in_a_dtype(run, tmp_path):
    file = tmp_path / "run.trace"
    own = ["--block", f"{__name__}:with_inputs"]
    options = ["--dtype", "bfloat16", "--mode", "forward", "--trace", file]
    text = run(*own, *options, "--compile", "--explain")
    assert f"\n{own[1]}: ids 2 x 3, weight 3 x 4; bfloat16, forward, compiled" in text
    # Ids stay integers, so a run has their tokens.
    assert " tokens/s, " in text
    note = "graphs: 1, breaks: none. The parts were measured in eager mode."
    assert note in " ".join(text.split())
    assert text.endswith("--json has more.\n")
    names = {event["name"] for event in events_of(file)}
    assert "aten::mm" in names
    assert "project" not in names  # naming parts would run them in eager mode
    with pytest.raises(SystemExit, match="must be used without --seq-len, --d-model"):
        run(*own, "--seq-len", 3, "--d-model", 4)


def test_shape_checks_are_off_for_the_own_block_and_not_for_others(tmp_path):
    """In programs of their own, because jaxtyping reads the choice as it is imported."""
    (tmp_path / "users.py").write_text(
        "from tinyblock import RMSNorm\n\ndef build():\n    return RMSNorm(32)\n"
    )
    beartype = tmp_path / "beartype.py"  # without which the own block works
    beartype.write_text("raise ModuleNotFoundError('beartype')")
    typed = ["--device", "cpu", "--rounds", 1, "--seq-len", 8, "--d-model", 32]
    for options, expected in (([], "off"), (["--block", "users:build"], "on")):
        command = [profile_block.__file__, *typed, *options]
        _, text = forked.run_program(*command, folder=tmp_path)
        assert f"\nShape checks: {expected} (" in text, text
        beartype.unlink(missing_ok=True)


# --- Models ---------------------------------------------------------------------------


def interrupted():
    raise KeyboardInterrupt


def test_progress_and_interruption_at_a_terminal(capsys):
    """At a terminal, the command says what it does, and ends at Ctrl-C with one line."""
    terminal, end = pty.openpty()
    command = ["--device", "cpu", "--block", f"{__name__}:interrupted"]
    exits = pytest.raises(SystemExit, match="130")
    with exits, open(end, "w") as stream, redirect_stderr(stream):
        profile_block.main(command)
    said = os.read(terminal, 1000)
    os.close(terminal)
    assert said.startswith(b"\r\x1b[Kbuilding the model, and running it twice")
    with pytest.raises(SystemExit, match="130"):
        profile_block.main(command)
    assert capsys.readouterr().err == "\nInterrupted.\n"


def my_own_error():
    raise ValueError("my own")


def no_module():
    return lambda x: x


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


BAD_OPTIONS = {
    "--rounds: invalid positive value: '0'": "--rounds 0",
    "--device: torch sees no GPU; ": "--device cuda",
    "--preset: invalid choice: 'gpt5'": "--preset gpt5",
    "without --preset, --num-heads, --num-kv-heads, --d-head, --d-ff, --num-layers": (
        "--block torch.nn:Linear --preset small --num-heads 2 --num-kv-heads 2 "
        "--d-head 2 --d-ff 2 --num-layers 2"
    ),
    "got no_module:f, but no module no_module is on PYTHONPATH": "--block no_module:f",
    "got torch.none:f, but no module torch.none is on PYTHONPATH": "--block torch.none:f",
    "nn/__init__.py has no f": "--block torch.nn:f",
    "must be MODULE:FUNCTION, got :f": "--block :f",
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
