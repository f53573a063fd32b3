"""The command as users run it, on tiny sizes."""

import json
from collections import UserDict
from contextlib import redirect_stderr
from io import StringIO

import forked
import profile_block
import pytest
import torch
from torch import nn

ON_A_CPU = ["--device", "cpu", "--rounds", "1"]
PARTS = ["ln1", "attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.rope", "attn"]
PARTS += ["attn.output_proj", "ln2", "ffn.w1", "ffn.w3", "ffn", "ffn.w2"]
PARTS = [f"layers.*.{name}" for name in PARTS] + ["layers.*", "ln_final", "AdamW"]


def labels_of(trace):
    """Return the names of operations and of labels in a trace."""
    return {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}


def test_report_json_and_trace_of_a_stack_have_the_same_parts(tmp_path):
    """In a program of its own, without beartype, which the own layers do not need."""
    (tmp_path / "beartype.py").write_text("raise ModuleNotFoundError('beartype')")
    figures, trace = tmp_path / "figures.json", tmp_path / "trace.json"
    sizes = ["--preset=small", "--d-model=128", "--num-layers=2"]
    sizes += ["--num-heads=2", "--num-kv-heads=1"]
    outputs = ["--json", figures, "--trace", trace, "--all-parts"]
    command = [profile_block.__file__, *ON_A_CPU, *sizes, "--mode", "step", *outputs]
    exit_code, text = forked.run_program(*command, folder=tmp_path)
    assert exit_code == 0, text
    # The width of the FFN is that of the preset.
    model = "Transformer of 2, 2 heads (1 KV heads), d_ff 3072"
    size = "1 x 128 tokens, d_model 128; float32, step, eager, training mode"
    assert f"\n{model}: {size}\n" in text
    assert "\nShape checks: off (" in text
    table = text.partition("\npart ")[2].partition("\n\n")[0].splitlines()[1:]
    assert [line.split()[0] for line in table] == [*PARTS, "rest", "total"]
    profile = json.loads(figures.read_text())
    rows = {row["name"]: row for row in profile["rows"]}
    assert list(rows) == [*PARTS, "rest"]
    seconds = sum(row["total_s"] for row in rows.values())
    assert seconds == pytest.approx(profile["whole"]["total_s"])
    # In both layers and heads, for each query and key that is not later, two products of
    # width 64 in each of three passes.
    pairs = 2 * 2 * (128 * 129 // 2)
    assert rows["layers.*.attn"]["flops"] == {"float32": 3 * 2 * 2 * pairs * 64}
    assert set(PARTS) <= labels_of(trace)


def test_shape_checks_of_another_block_are_on_unless_the_user_turns_them_off(tmp_path):
    (tmp_path / "users.py").write_text(
        "import jaxtyping\n\ndef build():\n"
        "    raise SystemExit(f'off: {jaxtyping.config.jaxtyping_disable}')\n"
    )
    command = [profile_block.__file__, *ON_A_CPU, "--block", "users:build"]
    exit_code, text = forked.run_program(*command, folder=tmp_path)
    assert (exit_code, text.splitlines()[-1]) == (1, "off: False")


class Projects(nn.Module):
    """A product, which compiles without a C++ compiler, of one of its inputs."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(4, 4, bias=False)

    def forward(self, ids, weight):
        return self.project(weight)


def with_inputs():
    return Projects(), {"ids": torch.arange(6).view(2, 3), "weight": torch.ones(3, 4)}


def test_compiled_model_with_inputs_of_its_own_in_a_dtype(capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="requires the extra dev")
    trace, picture = tmp_path / "run.trace", tmp_path / "picture.png"
    own = [*ON_A_CPU, "--block", f"{__name__}:with_inputs", "--mode", "forward"]
    outputs = ["--explain", "--trace", str(trace), "--plot", str(picture)]
    profile_block.main([*own, "--dtype", "bfloat16", "--compile", *outputs])
    text = capsys.readouterr().out
    assert ": ids 2 x 3, weight 3 x 4; bfloat16, forward, compiled, eval mode\n" in text
    # Ids stay integers, so a run has their tokens.
    assert " tokens/s. " in text
    note = "graphs: 1, breaks: none. The parts were measured in eager mode."
    assert note in " ".join(text.split())
    assert text.endswith("--json has more.\n")
    labels = labels_of(trace)
    assert "aten::mm" in labels
    assert "project" not in labels  # naming parts would run them in eager mode
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit, match="must be used without --seq-len, --d-model"):
        profile_block.main([*own, "--seq-len", "3", "--d-model", "4"])


def as_a_tokenizer_returns_them():
    return Projects(), UserDict(with_inputs()[1])


def test_inputs_may_be_any_mapping():
    build = profile_block.users_build(f"{__name__}:as_a_tokenizer_returns_them")
    built = build(torch.device("meta"), torch.bfloat16)
    assert isinstance(built, tuple)
    inputs = built[1]
    assert isinstance(inputs, dict)
    kinds = {name: (x.device.type, x.dtype) for name, x in inputs.items()}
    assert kinds == {
        "ids": ("meta", torch.int64),
        "weight": ("meta", torch.bfloat16),
    }


WRONG = {
    r"got Tensor; return model, \(x,\)": (nn.ReLU(), torch.ones(3)),
    r"got list; return model, \(x,\)": (nn.ReLU(), [torch.ones(3)]),
    r"a tuple of 3; return model, \(x, y\)": (nn.ReLU(), torch.ones(3), torch.ones(3)),
    "got method; put the call into the forward": nn.ReLU().forward,
    "got Tensor$": (torch.ones(3), nn.ReLU()),
    "got list$": [nn.ReLU(), torch.ones(3)],
}


def test_what_a_function_must_return_is_shown():
    for message, built in WRONG.items():
        with pytest.raises(TypeError, match=message):
            profile_block.model_and_inputs("users:build", built)


def interrupted():
    raise KeyboardInterrupt


class Terminal(StringIO):
    def isatty(self):
        return True


def test_command_says_what_it_does_and_ends_at_ctrl_c_with_one_line():
    line = "building the model, and running it twice"
    replaced = f"\r\x1b[K{line}\r\x1b[K"
    for stream, progress in (Terminal(), replaced), (StringIO(), f"{line}\n"):
        with pytest.raises(SystemExit, match="130"), redirect_stderr(stream):
            profile_block.main([*ON_A_CPU, "--block", f"{__name__}:interrupted"])
        assert stream.getvalue() == f"{progress}\nInterrupted.\n"


BAD_OPTIONS = {
    "--rounds: invalid positive value: '0'": "--rounds 0",
    "--device: torch sees no GPU; ": "--device cuda",
    "must be used without --preset, --num-heads": (
        "--block torch.nn:Linear --preset small --num-heads 2"
    ),
    "no module torch.none is on PYTHONPATH": "--block torch.none:f",
    "nn/__init__.py has no f": "--block torch.nn:f",
    "must be MODULE:FUNCTION, got :f": "--block :f",
    "d_model must be a multiple of num_heads": "--d-model 33 --num-heads 2",
    "--trace: FILE must be in a folder that exists": "--trace no/file",
    "can be written, got .": "--json .",
    "--plot: FILE must end with .": "--plot file.txt",
}


def test_bad_options_end_with_one_line_before_anything_is_measured(capsys):
    pytest.importorskip("matplotlib", reason="requires the extra dev")
    for message, typed in BAD_OPTIONS.items():
        with pytest.raises(SystemExit, match="2"):
            profile_block.main(typed.split())
        usage, error = capsys.readouterr().err.splitlines()
        assert usage.startswith("usage: ")
        assert message in error, typed
