"""The profiler as users run it, on tiny sizes."""

import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "scripts" / "profile_block.py"
PAGE = SCRIPT.parents[1] / "docs" / "profile.md"
TINY = ["--seq-len", "16", "--d-model", "32", "--rounds", "2", "--device", "cpu"]


@pytest.fixture
def run(monkeypatch, capsys, rates):
    """Return a function that runs the script in this process, and returns its output."""
    monkeypatch.setenv("JAXTYPING_DISABLE", "")
    monkeypatch.setattr(sys, "path", list(sys.path))
    import profile_block

    rates(monkeypatch)  # the copy of a measurement is large

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["profile_block.py", *map(str, arguments)])
        with torch.random.fork_rng():
            profile_block.main()
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


def test_json_has_figures_with_units(run, tmp_path):
    file = tmp_path / "profile.json"
    run(*TINY, "--num-heads", 2, "--json", file)
    profile = json.loads(file.read_text())
    assert profile["tokens_per_s"] == pytest.approx(16 / profile["took_s"]["median"])
    whole = profile["whole"]
    compute = whole["flops"]["float32"] / profile["rates"]["flops_per_s"]["float32"]
    assert profile["mfu"] == pytest.approx(compute / whole["total_s"])
    rows = profile["rows"]
    assert sum(row["total_s"] for row in rows) == pytest.approx(whole["total_s"])
    projection = next(row for row in rows if row["name"] == "attn.q_proj")
    assert projection["parameters"] == 32 * 32
    assert projection["calls"] == projection["modules"] == 1
    [mm] = [each for each in projection["operations"] if each["name"] == "mm"]
    assert mm["calls"] == 3
    assert mm["total_s"] > 0
    assert profile["memory"]["parameter_bytes"] == 4 * whole["parameters"]


def test_trace_names_the_parts_as_the_table_does(run, tmp_path):
    file = tmp_path / "profile.trace"
    text = run(*TINY, "--num-heads", 2, "--mode", "step", "--trace", file)
    events = json.loads(file.read_text())["traceEvents"]
    spans = [event for event in events if event.get("cat") == "user_annotation"]
    names = [span["name"] for span in spans]
    table = text[text.index("\npart ") :].split("\n\n")[0]
    rows = [line.split()[0] for line in table.splitlines()[2:]]
    for name in set(rows) - {"rest", "total"}:
        assert name in names, name
    assert names.count("attn.q_proj") >= 2  # in forward and in backward
    # A span encloses the operations of its part.
    [forward, *_] = [span for span in spans if span["name"] == "attn.q_proj"]
    inside = [
        event["name"]
        for event in events
        if event.get("cat") == "cpu_op"
        and forward["ts"] <= event["ts"] <= forward["ts"] + forward["dur"]
    ]
    assert "aten::mm" in inside


def test_trace_of_a_compiled_model_has_no_parts(run, tmp_path, monkeypatch):
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
    my_block(
        "from torch import nn\n"
        "def build():\n"
        "    model = nn.Sequential(nn.Linear(32, 32))\n"
        "    for name in ['a_long_name_of_a_layer', 'another_long_name', 'the_third_one']:\n"
        "        model = nn.Sequential(model, nn.Sequential())\n"
        "        model.add_module(name, nn.Linear(32, 32))\n"
        "    return model\n"
    )
    text = run(*TINY, "--block", "my_block:build")
    assert max(map(len, text.split("\n\n")[3].splitlines())) <= 120


def test_parts_add_up_to_the_whole(run, tmp_path):
    """The only test of real times."""
    file = tmp_path / "profile.json"
    size = ["--d-model", 256, "--seq-len", 256, "--rounds", 5]
    for _ in range(5):
        run("--device", "cpu", *size, "--json", file)
        profile = json.loads(file.read_text())
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


def example(number):
    """Return an example of the page in Python."""
    return PAGE.read_text().split("```py\n")[number].split("```")[0]


def test_wrapper_of_the_page_is_cut(run, my_block):
    pytest.importorskip("transformers", reason="requires the extra examples")
    my_block(example(1), "my_llama")
    size = ["--d-model", 256, "--seq-len", 8]
    text = run("--block", "my_llama:build", *size, "--rounds", 2)
    assert "\nmodel.layers.*.self_attn " in text


def test_language_model_of_the_page_has_embedding_head_and_loss(
    run, my_block, tmp_path
):
    pytest.importorskip("transformers", reason="requires the extra examples")
    my_block(example(2).replace("32000", "1000"), "my_training")  # which is faster
    file = tmp_path / "profile.json"
    options = ["--seq-len", 8, "--rounds", 2, "--mode", "step", "--json", file]
    run("--block", "my_training:build", *options)
    rows = {row["name"]: row for row in json.loads(file.read_text())["rows"]}
    head = rows["model.lm_head"]
    assert head["flops"] == {"float32": 3 * 2 * 8 * 256 * 1000}
    assert rows["model.model.embed_tokens"]["parameters"] == 256 * 1000
    names = [each["name"] for each in rows["sums"]["operations"]]
    assert "_log_softmax" in names
    assert rows["AdamW"]["total_s"] > 0


def test_compiled_model_reports_graphs(run, monkeypatch):
    compile = partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", compile)
    text = run(*TINY, "--num-heads", 2, "--compile", "--mode", "forward")
    assert ", forward, compiled, eval mode\n" in text
    note = "graphs: 1, breaks: none. The parts were measured in eager mode."
    assert note in " ".join(text.split())


# --- Errors ---------------------------------------------------------------------------

BAD_OPTIONS = {
    "--rounds: invalid positive value: '0'": ["--rounds", "0"],
    "must be used without --preset, --num-heads": [
        "--block",
        "torch.nn:Linear",
        "--preset",
        "small",
        "--num-heads",
        "2",
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


@pytest.mark.parametrize("message", BAD_OPTIONS)
def test_bad_options_end_with_one_line_before_anything_is_measured(
    run, capsys, monkeypatch, message
):
    if "--plot" in BAD_OPTIONS[message]:
        pytest.importorskip("matplotlib", reason="requires the extra dev")
    monkeypatch.setattr("profile_block.measure", pytest.fail)
    with pytest.raises(SystemExit) as ended:
        run(*BAD_OPTIONS[message])
    assert ended.value.code == 2
    _usage, error = capsys.readouterr().err.splitlines()
    assert message in error


def test_plot_without_matplotlib_names_the_repair(run, capsys, monkeypatch):
    monkeypatch.setattr("profile_block.measure", pytest.fail)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit):
        run("--plot", "file.png")
    assert "--plot: matplotlib must be installed: " in capsys.readouterr().err


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


def test_preset_yields_to_what_is_typed(run, monkeypatch):
    def measure(build, shape, title, *rest):
        raise RuntimeError(title)

    monkeypatch.setattr("profile_block.measure", measure)
    preset = "Block, 32 heads (8 KV heads), d_ff 14336"
    with pytest.raises(RuntimeError) as ended:
        run("--preset", "llama-3.1-8b", "--seq-len", 7, "--d-model", 64)
    assert str(ended.value) == f"{preset}: 1 x 7 tokens, d_model 64"
