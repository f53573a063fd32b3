"""The profiler as a program: every mode, every output, every refusal."""

import contextlib
import datetime
import gc
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from isolated import WITHOUT_PACKAGE, refuse
from lab.machine import Ceilings
from lab.timing import Spread
from profiling import cli, measure
from profiling.compare import compare

ROOT = Path(__file__).parents[2]
TINY = ["--device=cpu", "--batch-size=2", "--seq-len=6", "--d-model=16", "--num-heads=4", "--num-kv-heads=2"]
TINY += ["--d-ff=24", "--rounds=2"]
PARTS = ["ln1", "q/k/v projections", "rope", "attention", "output projection", "residual adds", "ln2", "ffn"]


def make_quick(patch):
    """Leave out what takes time and has tests of its own: measuring the ceilings, and repeating short calls."""
    ceilings = Ceilings(Spread(1e11, 1e11, 1e11, 7), Spread(1e10, 1e10, 1e10, 7), 1024, 2**27)
    patch.setattr(cli, "measure_ceilings", lambda device, dtype: ceilings)
    patch.setattr(measure, "_SAMPLE_SECONDS", 0.0)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    make_quick(monkeypatch)


def profile(tmp_path, *options, code=0):
    """Run the profiler in this process and return what it wrote as JSON."""
    path = tmp_path / "profile.json"
    assert cli.main([*TINY, *options, "--json", str(path)]) == code
    return json.loads(path.read_text())


def test_script_runs_in_a_checkout_with_torch_einops_and_jaxtyping_alone(tmp_path):
    path, script = tmp_path / "profile.json", ROOT / "scripts" / "profile_block.py"
    options = [str(script), *TINY, "--json", str(path)]
    # As Python runs a script: with its folder first on the path. Torch warns where numpy is missing, so that is there.
    code = refuse("beartype", "rich", "matplotlib")
    code += f"import runpy\nsys.argv[:] = {options}\nsys.path[0] = {str(script.parent)!r}\n"
    code += f"runpy.run_path({str(script)!r}, run_name='__main__')"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=WITHOUT_PACKAGE, cwd=tmp_path
    )
    assert run.returncode == 0, run.stderr
    assert "profile_block" not in run.stderr  # torch has warnings of its own, as on a CUDA build without a GPU
    document = json.loads(path.read_text())
    assert document["settings"]["shape_checks"] is False
    assert document["environment"]["command"].endswith(f"--json {path}")
    assert document["ceilings"]["flops_per_second"]["median"] > 1e6
    assert document["ceilings"]["bytes_per_second"]["median"] > 1e6
    assert run.stdout.isascii()
    assert all(re.search(rf"^\| {name} ", run.stdout, re.MULTILINE) for name in [*PARTS, "sum of the parts", "whole"])
    assert "datasheet n/a" in run.stdout
    assert "Kernels: n/a" in run.stdout


def test_profile_of_train_measures_every_part(tmp_path):
    document = profile(tmp_path)
    assert (document["schema"], document["status"]) == ("tinyblock.profile/1", "ok")
    (point,) = document["points"]
    assert [part["name"] for part in point["parts"]] == PARTS
    for record in (*point["parts"], point["whole"]):
        for pass_ in ("forward", "backward"):
            spread = record[pass_]["seconds"]
            assert spread["samples"] == 2
            assert spread["p20"] <= spread["median"] <= spread["p80"]
    assert all(point["whole"][name]["seconds"]["median"] > 0 for name in ("forward", "train"))
    memory = point["memory"]
    # Along the block, every saved storage is one part's; scalars aside, the parts save what the whole saves.
    assert sum(part["saved_bytes"] for part in memory["parts"]) == memory["saved_bytes"] > 0
    weights = 4 * (2 * 16 * 4 * 4 + 2 * 16 * 2 * 4 + 3 * 16 * 24 + 2 * 16)
    assert memory["parameters_bytes"] == memory["gradients_bytes"] == weights
    assert memory["peak_bytes"] >= weights + max(weights, memory["saved_bytes"])
    assert point["kernels"] is None
    assert point["compile"] is None
    assert point["overhead"]["share"] > 0


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    """Return what a training step of a stack with q/k norm wrote: its JSON, its text and its trace."""
    folder, text = tmp_path_factory.mktemp("step"), io.StringIO()
    options = ["--mode", "step", "--num-layers", "2", "--qk-norm", "--dtype", "bfloat16"]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(text):
        make_quick(patch)
        document = profile(folder, *options, "--trace", str(folder / "trace.json"))
    return document, text.getvalue(), json.loads((folder / "trace.json").read_text())["traceEvents"]


def test_profile_of_a_step_has_the_optimizer(step):
    document, text, _ = step
    (point,) = document["points"]
    memory = point["memory"]
    assert memory["optimizer_state_bytes"] == 2 * memory["parameters_bytes"] + 4 * 23  # two moments, and 23 step counts
    assert point["optimizer"]["seconds"]["median"] > 0
    assert min(point["whole"][name]["seconds"]["median"] for name in ("step", "train")) > 0
    assert [part["name"] for part in point["parts"] if part["count"] == 1] == ["final norm"]
    assert "q/k norm" in [part["name"] for part in point["parts"]]
    assert "AdamW" in text
    assert "the sum counts 2 times" in text
    number = "-?[0-9.]+"  # on a busy machine, a difference of two small times may be negative
    assert re.search(
        rf"^\| sum of the parts( +\| +{number} \| +{number}-{number} \| +100%){{2}} \|", text, re.MULTILINE
    )


def test_trace_has_the_parts_as_labels(step):
    names = {event.get("name") for event in step[2]}
    parts = [*PARTS, "q/k norm", "final norm", "whole"]
    assert names >= {f"{part} {pass_}" for part in parts for pass_ in ("forward", "backward")} | {"AdamW"}
    assert "aten::scaled_dot_product_attention" in names


def test_schema_names_every_key(step):
    page = (ROOT / "docs" / "profile_schema.md").read_text()
    documented = set(re.findall(r"`([a-z0-9_]+)`", page)) | set(re.findall(r'"([a-z0-9_]+)"', page))

    def keys(value):
        if isinstance(value, dict):
            yield from value
        for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            yield from keys(item)

    assert set(keys(step[0])) <= documented


def test_peak_of_a_step_begins_without_the_gradients_of_the_last(tmp_path, monkeypatch):
    gradients = []

    def peak(run, device):
        gradients[:] = [weight.grad for weight in run.__self__.part.weights] if run.__name__ == "step" else []
        return 0

    monkeypatch.setattr(measure, "peak_added_bytes", peak)
    profile(tmp_path, "--mode", "step")
    assert gradients == [None] * 9


def test_profile_compiles_the_whole_and_the_parts(tmp_path, monkeypatch, capsys):
    compiled = []

    def quick(function, **options):  # the real inductor takes a minute here
        compiled.append(getattr(function, "__name__", ""))
        return compile_(function, backend="eager", **options)

    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", quick)
    document = profile(tmp_path, "--compile")
    (point,) = document["points"]
    assert (point["compile"]["graphs"], point["compile"]["graph_breaks"]) == (1, 0)
    assert point["compile"]["seconds"] > 0
    assert len(compiled) == 1 + 2 + len(PARTS)  # the check, the whole and the smallest, the parts
    assert "1 graph, 0 breaks" in capsys.readouterr().out


def test_profile_ends_with_the_losses_and_the_doubts(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(measure.Watch, "shares", lambda watch: {"waited_share": 0.5, "others_share": 0.0})
    (point,) = profile(tmp_path)["points"]
    assert point["trust"]["waited_share"] == 0.5
    losses, doubts = capsys.readouterr().out.split("\n\n")[-2:]
    assert re.findall(r"^  ([^:]+):", losses, re.MULTILINE) == [loss["name"] for loss in point["losses"]]
    assert re.match(r"Do not trust these figures:\n  threads waited for a core, .*\n.*--rounds", doubts)
    (point,) = profile(tmp_path, "--sweep", "seq-len=6")["points"]
    out = capsys.readouterr().out
    assert re.search(rf"^\| 6 +\| +{point['losses'][0]['name']} [0-9.]+%", out, re.MULTILINE)
    assert "\n  seq-len 6: threads waited" in out


def test_profile_of_forward_has_no_backward_and_of_steady_rounds_no_doubts(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(measure, "interleave", lambda runs, *args: {name: [len(name) * 1e-3] * 3 for name in runs})
    monkeypatch.setattr(measure.Watch, "shares", lambda watch: {"waited_share": 0.0, "others_share": None})
    (point,) = profile(tmp_path, "--mode", "forward")["points"]
    assert list(point["whole"]) == ["forward"]
    assert point["memory"]["saved_bytes"] is None
    assert point["trust"]["doubts"] == []
    out = capsys.readouterr().out
    assert "backward ms" not in out
    assert "Do not trust" not in out


def test_attention_backend_is_used_alone_and_may_be_unable_to_run_one_token(tmp_path, monkeypatch, capsys):
    enabled = set()
    attend = torch.nn.functional.scaled_dot_product_attention

    def picky(q, *args, **options):
        enabled.add((torch.backends.cuda.math_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled()))
        if q.shape[-2] < 2:
            raise RuntimeError("No available kernel. Aborting execution.")
        return attend(q, *args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", picky)
    for options, shown in (([], "width 8: n/a, this"), (["--sweep", "seq-len=4"], " n/a ")):
        document = profile(tmp_path, "--attention-backend", "math", "--mode", "step", *options)
        assert document["settings"]["attention_backend"] == "math"
        assert document["points"][0]["overhead"] is None
        assert shown in capsys.readouterr().out
    assert enabled == {(True, False)}


@pytest.mark.parametrize("options", [[], ["--sweep", "seq-len=6"]])
def test_lack_of_memory_after_the_timings_keeps_them(tmp_path, monkeypatch, capsys, options):
    def exhausted(*args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(measure, "peak_added_bytes", exhausted)
    monkeypatch.setattr(measure.kernels, "kernel_report", exhausted)
    monkeypatch.setattr(measure.tracing, "write_trace", exhausted)
    trace = [] if options else ["--trace", str(tmp_path / "trace.json")]
    (point,) = profile(tmp_path, *options, *trace)["points"]
    assert point["status"] == "ok"
    assert point["whole"]["train"]["seconds"]["samples"] == 2
    assert (point["memory"], point["kernels"]) == (None, None)
    assert [note.split(":")[0] for note in point["notes"]] == ["memory", "kernels", *(["trace"] if trace else [])]
    assert "ot measured: memory: out of memory: CUDA out of memory." in capsys.readouterr().out


def test_measure_lets_go_of_everything(tmp_path, monkeypatch):
    weights = []
    build = measure.Size.build

    def watched(*args):
        model = build(*args)
        weights.extend(weakref.ref(weight) for weight in model.parameters())
        return model

    monkeypatch.setattr(measure.Size, "build", watched)
    profile(tmp_path, "--mode", "step")
    gc.collect()
    assert weights
    assert not any(ref() is not None for ref in weights)


def test_preset_gives_every_size_and_an_option_overrides_it():
    parser = cli._parser()

    def size(*options):
        return cli._size(parser.parse_args(options), {})

    qwen = size("--preset", "qwen3-8b", "--seq-len", "7")
    assert (qwen.d_model, qwen.num_heads, qwen.num_kv_heads, qwen.d_head, qwen.d_ff) == (4096, 32, 8, 128, 12288)
    assert (qwen.qk_norm, qwen.theta, qwen.eps, qwen.seq_len, qwen.num_layers) == (True, 1e6, 1e-6, 7, None)
    assert size("--preset", "qwen3-8b", "--d-ff", "64").d_ff == 64
    narrow = size("--preset", "llama-3.1-8b", "--d-model", "512")
    assert (narrow.d_head, narrow.d_ff, narrow.num_kv_heads) == (16, 1344, 8)
    single = size("--preset", "llama-3.1-8b", "--num-heads", "2")
    assert (single.num_kv_heads, single.d_head, single.d_ff) == (2, 2048, 14336)
    default = size()
    assert (default.d_model, default.num_heads, default.d_ff) == (512, 8, 1344)


def test_sweep_goes_on_after_a_point_without_memory(tmp_path, capsys):
    impossible = 2**43
    document = profile(tmp_path, "--mode", "forward", "--sweep", f"batch-size=1,{impossible},3")
    assert [point["status"] for point in document["points"]] == ["ok", "out of memory", "ok"]
    assert document["points"][1]["size"]["batch_size"] == impossible
    assert "parts" not in document["points"][1]
    assert re.search(rf"^\| {impossible} \| out of memory", capsys.readouterr().out, re.MULTILINE)


def test_single_size_without_memory_is_reported_and_fails(tmp_path, capsys):
    document = profile(tmp_path, "--mode", "forward", "--batch-size", str(2**43), code=1)
    assert [point["status"] for point in document["points"]] == ["out of memory"]
    assert "out of memory" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "options"),
    [("plot.png", ["--mode", "step"]), ("plot.svg", ["--mode", "forward", "--sweep", "seq-len=4,8"])],
)
def test_plot_writes_a_picture(tmp_path, name, options):
    pytest.importorskip("matplotlib")
    path = tmp_path / name
    profile(tmp_path, *options, "--plot", str(path))
    start = path.read_bytes()[:400]
    assert start.startswith(b"\x89PNG") if path.suffix == ".png" else b"<svg" in start
    assert sorted(p.name for p in tmp_path.iterdir()) == [path.name, "profile.json"]


def test_plot_says_what_was_measured_where_and_when(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *args, **options: figures.append(figure))
    monkeypatch.setattr(cli, "atomic", contextlib.nullcontext)
    # Times that leave some to every backward pass: what has none is not under the roofline.
    monkeypatch.setattr(measure, "interleave", lambda runs, *args: {name: [1 + ("train" in name)] for name in runs})
    cli.main([*TINY, "--plot", str(tmp_path / "plot.png")])
    [figure] = figures
    roofline, times = figure.axes
    assert "d_model 16" in figure.get_suptitle()
    assert f"torch {torch.__version__}; {datetime.datetime.now(datetime.UTC).date()}" in figure.get_supxlabel()
    assert [label.get_text() for label in times.get_yticklabels()] == PARTS
    legends = [[text.get_text() for text in axes.get_legend().get_texts()] for axes in (roofline, times)]
    assert legends == [
        ["100 GFLOP/s, 10.0 GB/s", "whole, forward", "whole, backward"],
        ["roofline", "forward", "backward"],
    ]


def test_plot_that_fails_does_not_lose_the_report(tmp_path, monkeypatch, capsys):
    plot = pytest.importorskip("profiling.plot", exc_type=ImportError)

    def broken(*args):
        raise ZeroDivisionError

    monkeypatch.setattr(plot, "plot", broken)
    with pytest.raises(ZeroDivisionError):
        profile(tmp_path, "--mode", "forward", "--plot", str(tmp_path / "plot.png"))
    assert "sum of the parts" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["profile.json"]


def test_plot_without_matplotlib_is_refused_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    assert "pip install matplotlib" in refusal(capsys, "--plot", str(tmp_path / "a.png"))


def test_compare_shows_ratios_with_their_spread(tmp_path, capsys):
    old = profile(tmp_path)
    profile(tmp_path, "--compare", str(tmp_path / "profile.json"))
    out = capsys.readouterr().out
    assert "New / old: Block" in out
    numbers = r"[0-9.]+ \| +[0-9.]+ \| +[0-9.]+ \| +[0-9.]+-[0-9.]+"
    assert re.search(rf"^\| whole +\| +train \| +{numbers} \| +(same|faster|slower)", out, re.MULTILINE)

    slow = json.loads(json.dumps(old))
    slow["settings"] |= {"dtype": "bfloat16", "float32_matmul_precision": "medium"}
    for document, factor in ((old, 1e-6), (slow, 3e-6)):
        seconds = {"median": 2 * factor, "p20": 1.9 * factor, "p80": 2.1 * factor}
        document["points"][0]["whole"] = {"forward": {"seconds": seconds}}
    changes = str(compare(slow, old)[0])
    assert "dtype: float32 then, bfloat16 now" in changes
    assert f"float32 matmul precision: {old['settings']['float32_matmul_precision']} then, medium now" in changes
    for new, earlier, cells in (
        (slow, old, ["2.00", "6.00", "3.00", "2.71-3.32", "slower"]),
        (old, slow, ["6.00", "2.00", "0.33", "0.30-0.37", "faster"]),
        (old, old, ["2.00", "2.00", "1.00", "0.90-1.11", "same"]),
    ):
        assert ["whole", "forward", *cells] in compare(new, earlier)[1].rows


@pytest.mark.parametrize(("complete", "statuses"), [(0, ["ok"]), (1, ["ok", "interrupted"])])
def test_interruption_writes_what_was_measured(tmp_path, monkeypatch, capsys, complete, statuses):
    sizes = []

    def interrupt_the_second(runs, rounds, seconds, warmup, on_sample, samples):
        sizes.append(runs)
        samples.update({name: [2e-3] * (complete + 1) for name in runs} | {"whole forward": [1e-3] * complete})
        if len(sizes) == 2:
            raise KeyboardInterrupt
        return {name: [1e-3, 2e-3] for name in runs}

    monkeypatch.setattr(measure, "interleave", interrupt_the_second)
    document = profile(tmp_path, "--mode", "forward", "--sweep", "seq-len=4,8,16", code=130)
    assert document["status"] == "interrupted"
    assert [point["status"] for point in document["points"]] == statuses
    samples = [point["parts"][0]["forward"]["seconds"]["samples"] for point in document["points"]]
    assert samples == [2, 1][: len(statuses)]  # complete rounds only
    assert "Interrupted" in capsys.readouterr().out


def test_error_that_is_no_lack_of_memory_is_raised(monkeypatch):
    def broken(*args):
        raise RuntimeError("something else")

    monkeypatch.setattr(measure, "cut", broken)
    with pytest.raises(RuntimeError, match="something else"):
        cli.main(TINY)


def refusal(capsys, *options):
    """Return the one line in which the profiler refuses these options, before anything is measured."""
    with pytest.raises(SystemExit) as raised:
        cli.main([*TINY, *options])
    captured = capsys.readouterr()
    assert raised.value.code == 2
    assert captured.out == ""
    assert captured.err.startswith("profile_block.py: error: ")
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--num-kv-heads", "3"], "num_heads=4 is not a multiple of num_kv_heads=3"),
        (["--d-head", "3"], "even d_k"),
        (["--seq-len", "0"], "seq_len must be at least 1, got 2 and 0"),
        (["--batch-size", "-1"], "batch_size"),
        (["--d-ff", "0"], "d_ff=0"),
        (["--num-layers", "0"], "num_layers"),
        (["--sweep", "d-model=16,17"], "d_model=17"),
        (["--sweep", "d-ff=16"], "--sweep takes one of seq-len, batch-size, d-model"),
        (["--sweep", "seq-len=8,x"], "'seq-len=8,x'"),
        (["--preset", "gpt-5"], "invalid choice: 'gpt-5'"),
        (["--dtype", "float8"], "invalid choice: 'float8'"),
        (["--device", "tpu0"], "unknown --device 'tpu0'"),
        (["--device", "meta"], "--device must be cpu, cuda or cuda:N, got 'meta'"),
        (["--rounds", "0"], "--rounds"),
        (["--json", "missing/folder/x.json"], "--json: cannot write"),
        (["--trace", "."], "--trace: cannot write"),
        (["--plot", "x.gif"], "--plot must end in .png, .svg, .pdf"),
        (["--json", "x", "--trace", "./x"], "two outputs have the same path"),
        (["--compare", "missing.json"], "--compare: cannot read missing.json"),
        (["--memory-snapshot", "x"], "--memory-snapshot needs CUDA"),
        (["--nvtx"], "--nvtx needs CUDA"),
        (["--attention-backend", "cudnn"], "--attention-backend cudnn cannot run on cpu in float32"),
        (["--sweep", "seq-len=4", "--trace", "x"], "leave --sweep out"),
        (["--d-model", "4" + "0" * 20], "impossible size: "),
        (["--seq-len", str(2**62)], "impossible size: "),
        (["--seed", "9" * 20], "--seed must fit into 64 bits"),
        (["--dtype", "float16", "--mode", "step"], "use bfloat16, or --mode train"),
        (["--json", "/dev/null"], "--json: cannot write /dev/null: it is not a regular file"),
        (["--tp", "2"], "tp=2 makes 2, and there are 1: start with torchrun --nproc-per-node 2 "),
        (["--dp", "4"], "a batch of 2 does not split over dp=4"),
        (["--predict", "tp=2"], "--predict needs --link"),
        (["--predict", "pp=2", "--link", "1e9"], "--predict takes meshes as in tp=8,dp=64, got 'pp=2'"),
        (["--predict", "tp=4", "--link", "1e9"], "num_kv_heads=2 is not a multiple of tp=4"),
        (["--predict", "tp=2", "--link", "1e9,0"], "--link takes bytes/s"),
        (["--predict", "tp=2", "--link", "1e9", "--ceilings", "h100"], "invalid choice: 'h100'"),
        (["--predict", "tp=2", "--link", "1e9", "--trace", "x"], "leave --predict out"),
        (["--predict", "tp=2", "--link", "1e9", "--plot", "x.png"], "add --sweep"),
        (["--link", "1e9"], "are for --predict"),
        (["--frobnicate"], "unrecognized arguments: --frobnicate"),
        (["--batch", "3"], "unrecognized arguments: --batch"),
    ],
)
def test_refusals_name_what_is_wrong(options, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in refusal(capsys, *options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is there")
def test_cuda_where_there_is_none_is_refused(capsys):
    assert "has no CUDA" in refusal(capsys, "--device", "cuda")


def test_files_that_are_no_profile_are_refused(tmp_path, capsys):
    path = tmp_path / "old.json"
    for text, message in (("{", "is not JSON"), ("[]", "is no profile"), ('{"schema": "x"}', "is no profile")):
        path.write_text(text)
        assert message in refusal(capsys, "--compare", str(path))
    path.write_text('{"schema": "tinyblock.profile/1", "points": []}')
    assert "none of the sizes" in refusal(capsys, "--compare", str(path))


def test_compiler_that_does_not_work_is_refused(capsys, monkeypatch):
    def missing(function):
        raise RuntimeError("Failed to find C++ compiler. Please specify via CXX.\nMore lines")

    monkeypatch.setattr(torch, "compile", missing)
    assert "torch.compile does not work here: Failed to find C++ compiler\n" in refusal(capsys, "--compile")


def test_report_that_nobody_reads_to_the_end_is_no_error(tmp_path, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed_pipe:
        monkeypatch.setattr(sys, "stdout", closed_pipe)
        profile(tmp_path, "--mode", "forward")
        monkeypatch.undo()


def test_layers_that_no_memory_can_hold_are_refused_before_they_are_built(capsys, monkeypatch):
    message = refusal(capsys, "--num-layers", str(10**12))
    assert re.search(r"--num-layers 10{12} makes [\d.]+ GiB of weights, and cpu has [\d.]+ GiB", message)
    monkeypatch.setattr(cli, "memory_bytes", lambda device: None)
    cli._checked(cli._parser().parse_args([*TINY, "--num-layers", str(10**12)]))  # nothing is known: it is tried


def test_a_stack_that_fits_is_not_refused_for_a_larger_one_in_its_sweep(monkeypatch):
    arguments = cli._parser().parse_args([*TINY, "--num-layers", "3", "--sweep", "d-model=16,4096"])
    monkeypatch.setattr(cli, "memory_bytes", lambda device: 4 * cli._size(arguments, {"d_model": 16}).parameters)
    assert [size.d_model for size in cli._checked(arguments)[1]] == [16, 4096]
