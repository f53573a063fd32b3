"""The profiler as users run it, on tiny sizes."""

import json
import os
import runpy
import sys
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lab.sizes import PRESETS
from pages import block_with
from profiling.subject import Settings

SCRIPT = Path(__file__).parents[2] / "scripts" / "profile_block.py"
PAGE = SCRIPT.parents[1] / "docs" / "profile.md"
TINY = ["--seq-len", "16", "--d-model", "32", "--rounds", "2", "--device", "cpu"]


def run_in_this_process(patch, rates, *arguments):
    patch.setenv("JAXTYPING_DISABLE", "")
    patch.setattr(sys, "path", list(sys.path))
    import profile_block

    rates(patch)  # the copy of a measurement is large
    patch.setattr(sys, "argv", ["profile_block.py", *map(str, arguments)])
    with torch.random.fork_rng():
        profile_block.main()


@pytest.fixture
def run(monkeypatch, capsys, rates):
    """Return a function that runs the script, and returns its output."""

    def run(*arguments):
        run_in_this_process(monkeypatch, rates, *arguments)
        return capsys.readouterr().out

    return run


@pytest.fixture
def my_block(tmp_path, monkeypatch):
    """Return a function that writes the module of a user."""

    def write(code, name="my_block"):
        Path(tmp_path, f"{name}.py").write_text(code)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, name, raising=False)

    return write


# --- Outputs --------------------------------------------------------------------------


@pytest.fixture
def json_of(run, tmp_path):
    """Return a function that runs the script, and returns what --json writes."""

    def json_of(*options):
        file = tmp_path / "profile.json"
        run(*options, "--json", file)
        return json.loads(file.read_text())

    return json_of


def row_of(profile, name):
    rows = {row["name"]: row for row in profile["rows"]}
    assert name in rows, f"no row {name}, only {list(rows)}"
    return rows[name]


def test_figures_in_json_agree_with_each_other(json_of):
    profile = json_of(*TINY, "--num-heads", 2)
    whole = profile["whole"]
    assert profile["tokens_per_s"] == pytest.approx(16 / profile["took_s"]["median"])
    compute = whole["flops"]["float32"] / profile["rates"]["flops_per_s"]["float32"]
    assert profile["mfu"] == pytest.approx(compute / whole["total_s"])
    total = sum(row["total_s"] for row in profile["rows"])
    assert total == pytest.approx(whole["total_s"])
    assert profile["memory"]["parameter_bytes"] == 4 * whole["parameters"]


def test_json_has_the_operations_of_a_part(json_of):
    projection = row_of(json_of(*TINY, "--num-heads", 2), "attn.q_proj")
    assert projection["parameters"] == 32 * 32
    assert projection["calls"] == projection["modules"] == 1
    [mm] = [each for each in projection["operations"] if each["name"] == "mm"]
    assert mm["calls"] == 3  # one in forward, two in backward
    assert mm["total_s"] > 0


def table_of(text):
    """Return the lines of the table of parts."""
    assert "\npart " in text, text
    return text.partition("\npart ")[2].partition("\n\n")[0].splitlines()


@pytest.fixture(scope="module")
def traced(tmp_path_factory, rates):
    """Return what a run with --trace prints, the trace's events, and the parts' spans."""
    file = tmp_path_factory.mktemp("trace") / "profile.trace"
    options = [*TINY, "--num-heads", 2, "--mode", "step", "--trace", file]
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as printed:
        run_in_this_process(patch, rates, *options)
    events = json.loads(file.read_text())["traceEvents"]
    spans = [event for event in events if event.get("cat") == "user_annotation"]
    return printed.getvalue(), events, spans


def test_trace_names_the_parts_as_the_table_does(traced):
    text, _, spans = traced
    rows = {line.split()[0] for line in table_of(text)[2:]} - {"rest", "total"}
    assert "attn.q_proj" in rows
    assert rows - {span["name"] for span in spans} == set()


def test_trace_has_each_part_in_forward_and_in_backward(traced):
    _, _, spans = traced
    assert sum(span["name"] == "attn.q_proj" for span in spans) == 2


def test_span_of_a_part_encloses_its_operations(traced):
    _, events, spans = traced
    [forward, *_] = [span for span in spans if span["name"] == "attn.q_proj"]
    inside = [
        event["name"]
        for event in events
        if event.get("cat") == "cpu_op"
        and forward["ts"] <= event["ts"] <= forward["ts"] + forward["dur"]
    ]
    assert "aten::mm" in inside


def test_trace_of_a_compiled_model_has_no_parts(run, tmp_path, monkeypatch):
    # To compile would only take time: the option alone leaves the parts out.
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    file = tmp_path / "profile.trace"
    run(*TINY, "--num-heads", 2, "--mode", "forward", "--compile", "--trace", file)
    names = {event["name"] for event in json.loads(file.read_text())["traceEvents"]}
    assert "aten::mm" in names
    assert "attn.q_proj" not in names  # naming parts would run them in eager mode


def test_plot_is_a_picture(run, tmp_path):
    pytest.importorskip("matplotlib", reason="requires the extra dev")
    file = tmp_path / "profile.png"
    run(*TINY, "--num-heads", 2, "--mode", "step", "--plot", file)
    assert file.read_bytes().startswith(b"\x89PNG")


def test_table_fits_a_terminal(run, my_block):
    """The name of 100 letters would not fit beside the other columns."""
    my_block(
        "from torch import nn\n"
        "def build():\n"
        "    model = nn.Sequential(nn.ReLU())\n"
        f"    model.add_module('{'long' * 25}', nn.Linear(32, 32))\n"
        "    return model\n"
    )
    text = run(*TINY, "--block", "my_block:build")
    table = table_of(text)
    assert max(map(len, table)) <= 120
    assert any("..." in line for line in table), table


def test_parts_add_up_to_the_whole(json_of):
    """The only test of real times."""
    size = ["--d-model", 256, "--seq-len", 256, "--rounds", 5]
    for _ in range(5):
        profile = json_of("--device", "cpu", *size)
        rest = profile["rows"][-1]["total_s"] / profile["whole"]["total_s"]
        if abs(rest) < 0.25:
            break
    else:
        pytest.fail(f"rest is {rest:.0%} of the total in five runs")


# --- Models ---------------------------------------------------------------------------


def test_block_of_the_users_own(run, my_block):
    my_block(
        "from torch import nn\n"
        "def build():\n"
        "    return nn.TransformerEncoderLayer(32, 2, 48, batch_first=True)\n"
    )
    text = run(*TINY, "--block", "my_block:build", "--dtype", "bfloat16")
    assert "\nself_attn " in text
    title = "my_block:build: 1 x 16 tokens, d_model 32; bfloat16, train"
    assert f"\n{title}, eager, training mode\n" in text


def test_model_of_the_page_is_split_into_its_layers(run, my_block):
    pytest.importorskip("transformers", reason="requires the extra examples")
    my_block(block_with(PAGE, "class Decoder("), "my_llama")
    size = ["--d-model", 256, "--seq-len", 8]
    text = run("--block", "my_llama:build", *size, "--rounds", 2)
    assert "\nmodel.layers.*.self_attn " in text


def test_language_model_of_the_page_has_embedding_head_and_loss(json_of, my_block):
    pytest.importorskip("transformers", reason="requires the extra examples")
    example = block_with(PAGE, "class Training(")
    assert example.count("32000") == 2  # the vocabulary; a smaller one is faster
    my_block(example.replace("32000", "1000"), "my_training")
    options = ["--seq-len", 8, "--rounds", 2, "--mode", "step"]
    profile = json_of("--block", "my_training:build", *options)
    # In each of three passes: 2 FLOPs, 8 tokens, a matrix of d_model x vocabulary.
    flops = {"float32": 3 * 2 * 8 * 256 * 1000}
    assert row_of(profile, "model.lm_head")["flops"] == flops
    assert row_of(profile, "model.model.embed_tokens")["parameters"] == 256 * 1000
    names = [each["name"] for each in row_of(profile, "sums")["operations"]]
    assert "_log_softmax" in names
    assert row_of(profile, "AdamW")["total_s"] > 0


def test_compiled_model_reports_graphs(run, monkeypatch):
    compile = partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", compile)
    text = run(*TINY, "--num-heads", 2, "--compile", "--mode", "forward")
    assert ", forward, compiled, eval mode\n" in text
    note = "graphs: 1, breaks: none. The parts were measured in eager mode."
    assert note in " ".join(text.split())


# --- Options --------------------------------------------------------------------------


@pytest.fixture
def asked(run, monkeypatch):
    """Return a function that runs the script, and returns what it would measure."""

    def asked(*options):
        found = []

        def measure(build, shape, title, settings, trace):
            found.append(
                SimpleNamespace(
                    build=build,
                    shape=shape,
                    title=title,
                    settings=settings,
                    trace=trace,
                    gradients=torch.is_grad_enabled(),
                )
            )
            raise InterruptedError

        monkeypatch.setattr("profile_block.measure", measure)
        with pytest.raises(InterruptedError):
            run(*options)
        return found[0]

    return asked


def test_typed_sizes_replace_those_of_the_preset(asked):
    typed = asked("--preset", "llama-3.1-8b", "--seq-len", 7, "--d-model", 64)
    preset = "Block, 32 heads (8 KV heads), d_ff 14336"
    assert typed.title == f"{preset}: 1 x 7 tokens, d_model 64"


def test_defaults(asked):
    default = asked("--device", "cpu")
    assert default.shape == (1, 128, 512)
    assert default.settings == Settings(torch.device("cpu"), torch.float32, "train")
    assert (default.settings.compile, default.settings.rounds) == (False, 15)
    assert default.trace is None


@pytest.mark.parametrize("name", PRESETS)
def test_help_lists_the_presets_with_their_sizes(name, run, capsys):
    with pytest.raises(SystemExit, match="0"):
        run("--help")
    size = PRESETS[name]
    line = f"\n  {name}: d_model {size.d_model}, {size.num_heads} heads\n"
    assert line in capsys.readouterr().out


def test_options_reach_the_measurement(asked, tmp_path):
    sizes = ["--batch-size", 2, "--seq-len", 3, "--d-model", 64]
    settings = ["--device", "cpu", "--dtype", "float16", "--mode", "step"]
    path = tmp_path / "trace"
    typed = asked(*sizes, *settings, "--compile", "--rounds", 4, "--trace", path)
    assert typed.shape == (2, 3, 64)
    assert typed.settings == Settings(
        torch.device("cpu"), torch.float16, "step", compile=True, rounds=4
    )
    assert typed.trace == path


def test_default_with_a_gpu_is_bfloat16_on_it(asked, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    settings = asked().settings
    assert (settings.device.type, settings.dtype) == ("cuda", torch.bfloat16)
    assert asked("--device", "cpu").settings.dtype == torch.float32


def test_block_of_the_users_own_is_on_the_device_in_the_dtype(asked, my_block):
    my_block("from torch import nn\ndef build(): return nn.Linear(2, 2)\n")
    build = asked("--device", "cpu", "--block", "my_block:build").build
    for dtype in (torch.float32, torch.float16):
        weight = build(torch.device("meta"), dtype).weight
        assert (weight.device.type, weight.dtype) == ("meta", dtype)


@pytest.mark.parametrize("mode", ["forward", "train", "step"])
def test_gradients_are_enabled_in_the_modes_that_train(mode, asked):
    assert asked("--device", "cpu", "--mode", mode).gradients == (mode != "forward")


def test_script_disables_the_checks_that_need_beartype(monkeypatch):
    monkeypatch.setenv("JAXTYPING_DISABLE", "")
    monkeypatch.setattr(sys, "path", list(sys.path))
    runpy.run_path(str(SCRIPT))
    assert os.environ["JAXTYPING_DISABLE"] == "1"


# --- Errors ---------------------------------------------------------------------------

BAD_OPTIONS = {
    "--rounds: invalid positive value: '0'": ["--rounds", "0"],
    "--preset: invalid choice: 'gpt5'": ["--preset", "gpt5"],
    "without --preset, --num-heads, --num-kv-heads, --d-head, --d-ff, --num-layers": [
        *("--block", "torch.nn:Linear", "--preset", "small", "--num-heads", "2"),
        *("--num-kv-heads", "2", "--d-head", "2", "--d-ff", "2", "--num-layers", "2"),
    ],
    "got no_module:f, but no module no_module is on PYTHONPATH": [
        "--block",
        "no_module:f",
    ],
    "got torch.none:f, but no module torch.none is on PYTHONPATH": [
        "--block",
        "torch.none:f",
    ],
    "nn/__init__.py has no f": ["--block", "torch.nn:f"],
    "must be MODULE:FUNCTION, got torch.nn": ["--block", "torch.nn"],
    "d_model must be a multiple of num_heads": ["--d-model", "33", "--num-heads", "2"],
    "--json: FILE must be in a folder that exists": ["--json", "no/file"],
    "--trace: FILE must be in a folder that exists": ["--trace", "no/file"],
    "--plot: FILE must be in a folder that exists": ["--plot", "no/file.png"],
    "--plot: FILE must end with .": ["--plot", "file.txt"],
    "can be written, got .": ["--json", "."],
}


def must_not_run(*_):
    pytest.fail("a model was measured")


@pytest.mark.parametrize("message", BAD_OPTIONS)
def test_bad_options_end_with_one_line_before_anything_is_measured(
    run, capsys, monkeypatch, message
):
    if "--plot" in BAD_OPTIONS[message]:
        pytest.importorskip("matplotlib", reason="requires the extra dev")
    monkeypatch.setattr("profile_block.measure", must_not_run)
    with pytest.raises(SystemExit) as ended:
        run(*BAD_OPTIONS[message])
    assert ended.value.code == 2
    printed = capsys.readouterr().err.splitlines()
    assert len(printed) == 2, f"must be the usage and an error, got {printed}"
    assert message in printed[1]


def test_plot_without_matplotlib_names_the_repair(run, capsys, monkeypatch):
    monkeypatch.setattr("profile_block.measure", must_not_run)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit):
        run("--plot", "file.png")
    error = "--plot: matplotlib must be installed: python -m pip install matplotlib\n"
    assert capsys.readouterr().err.endswith(error)


def test_missing_package_of_a_users_module_is_shown_as_it_is(run, my_block):
    my_block("import a_missing_package\n")
    with pytest.raises(ModuleNotFoundError, match="a_missing_package"):
        run("--block", "my_block:build")


def test_error_in_a_users_function_is_shown_as_it_is(run, my_block):
    my_block("def build():\n    raise ValueError('my own')\n")
    with pytest.raises(ValueError, match=r"^my own$"):
        run("--block", "my_block:build")


def test_function_must_return_a_module(run, my_block):
    my_block("build = lambda: lambda x: x\n")
    with pytest.raises(TypeError, match="Module, got function; put"):
        run("--block", "my_block:build")
