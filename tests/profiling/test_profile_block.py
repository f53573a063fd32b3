"""The profiler as a program: every mode and every output."""

import gc
import json
import re
import weakref

import pytest
import torch
from lab.machine import Rates
from lab.progress import Progress
from lab.sizes import Size
from profiles import TINY, machine, profile, ticking
from profiling import session
from profiling.cli import main
from profiling.measure import measure
from profiling.outputs import Outputs
from profiling.records import OutOfMemory, Point, Settings

PARTS = [
    "ln1",
    "q/k/v projections",
    "rope",
    "attention",
    "output projection",
    "residual sums",
    "ln2",
    "ffn",
]
SIZE = Size(
    batch_size=2, seq_len=6, d_model=16, num_heads=4, num_kv_heads=2, d_head=4, d_ff=24
)
TOO_LARGE = 2**43  # a batch


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    return profile(tmp_path_factory.mktemp("train"), "--rounds=15")


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("step")
    return profile(
        folder,
        "--mode=step",
        "--num-layers=2",
        "--qk-norm",
        "--dtype=bfloat16",
        "--rounds=15",
        f"--trace={folder / 'trace.json'}",
        f"--plot={folder / 'plot.svg'}",
    )


def rows(text):
    """Return the first cell of each line of a table."""
    return re.findall(r"^\| (.+?) +\|", text, re.MULTILINE)


def test_profile_has_the_times_of_every_part(train):
    (point,) = train.profile.points
    assert [part.name for part in point.parts] == PARTS
    assert [*point.whole.passes] == ["forward", "backward", "train"]
    for name in ("forward", "train"):
        seconds = point.whole.passes[name].seconds
        assert 1 < seconds.median < 2
        assert seconds.samples == 15
    assert (point.kernels, point.compilation, point.optimizer) == (None, None, None)
    assert point.attention_kernel == "flash"
    assert [*point.overhead] == ["forward", "train"]


def test_report_has_a_row_for_every_part(train):
    assert train.out.isascii()
    shown = rows(train.out)
    for name in [*PARTS, "Block", "Block minus parts", "sum of the parts"]:
        assert name in shown
    assert "Datasheet: n/a" in train.out


def test_shares_of_the_report_add_up_to_the_total(train):
    table = train.out.partition(
        "Share: percentage of the time of forward and backward"
    )[2]
    shares = re.findall(r"^\| .*\| +(-?[\d.]+)% \|$", table, re.MULTILINE)
    *parts, rest, total = shares[: len(PARTS) + 2]
    assert float(total) == 100
    assert sum(map(float, parts)) + float(rest) == pytest.approx(100, abs=1)


def test_report_begins_with_doubts_and_gives_no_causes_then(train):
    # By this clock the samples vary by much more than 20%.
    _, doubts, summary, losses, *_ = train.out.split("\n\n")
    assert doubts.startswith("Do not trust these figures:\n- ")
    assert "the samples vary by " in doubts
    assert "--rounds" in doubts
    assert summary.startswith("Forward and backward: ")
    line = r"^  (.+): [0-9]+ ms, [0-9.]+%$"
    assert len(re.findall(line, losses, re.MULTILINE)) == 3


def test_each_storage_that_is_kept_for_backward_belongs_to_one_part(train):
    memory = train.profile.points[0].memory
    kept = {part.name: part.kept_bytes for part in memory.parts}
    # Scalars aside, the parts keep what the whole keeps.
    assert sum(kept.values()) == memory.kept_bytes > 0
    x = 2 * 6 * 16 * 4
    # A norm keeps x, its result without the gain, and a factor for each token.
    assert kept["ln1"] == kept["ln2"] == 2 * x + 48
    # What follows it keeps its result.
    assert kept["q/k/v projections"] == x
    assert (kept["rope"], kept["residual sums"]) == (0, 0)


def test_memory_of_the_whole_is_that_of_its_weights(train):
    memory = train.profile.points[0].memory
    attention = 2 * 16 * (4 * 4) + 2 * 16 * (2 * 4)
    feed_forward = 3 * 16 * 24
    weights = 4 * (attention + feed_forward + 2 * 16)
    assert memory.held.parameters_bytes == weights
    assert memory.held.gradients_bytes == weights
    assert memory.peak_bytes >= weights + max(weights, memory.kept_bytes)
    line = r"^Memory: parameters .*, peak .* allocated by the run\), kept for backward "
    assert re.search(line, train.out, re.MULTILINE)


def test_step_has_the_optimizer(step):
    (point,) = step.profile.points
    held = point.memory.held
    # Two moments, and 23 step counts.
    assert held.optimizer_state_bytes == 2 * held.parameters_bytes + 4 * 23
    assert point.optimizer.passes["optimizer"].seconds.median > 0
    # The gradients of the step before are not there when its peak is measured: it adds them.
    assert held.peak_added_bytes >= held.gradients_bytes + point.memory.kept_bytes
    work = step.out.partition("\nBackward: work")[2]
    assert "AdamW" in rows(work)


def test_step_of_a_stack_counts_each_layer(step):
    (point,) = step.profile.points
    counts = {part.name: part.count for part in point.parts}
    assert counts == dict.fromkeys([*PARTS, "q/k norm"], 2) | {"final norm": 1}
    assert "Sums and shares count the parts of a block 2 times" in step.out


def test_trace_labels_every_pass(step):
    text = (step.folder / "trace.json").read_text()
    labels = {event.get("name") for event in json.loads(text)["traceEvents"]}
    for part in [*PARTS, "q/k norm", "final norm", "whole"]:
        assert {f"{part} forward", f"{part} backward"} <= labels
    assert {"AdamW", "aten::scaled_dot_product_attention"} <= labels


def test_picture_has_every_part_the_rest_and_the_doubts(step):
    texts = " ".join(step.texts)
    for name in PARTS:
        assert f"{name} (x 2)" in step.texts
    assert {"AdamW", "final norm", "Transformer minus parts"} <= set(step.texts)
    assert "d_model 16" in texts
    assert "Do not trust these figures: " in texts
    date, _, _ = step.profile.environment.date.partition("T")
    assert date in texts


def test_profile_without_space_for_temporary_files_ends_in_one_line(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    assert main([*TINY, "--mode=forward"], ticking()) == 1
    error = capsys.readouterr().err
    assert error.startswith("profile_block.py: error: [Errno 2] No such file")
    assert error.count("\n") == 1


def test_progress_counts_samples(tmp_path, monkeypatch):
    started = {}

    def start(progress, what, steps=None):
        started[what] = steps

    monkeypatch.setattr(Progress, "start", start)
    profile(tmp_path, "--mode=forward")
    # Two rounds of the parts, the Block, and the smallest one.
    assert started["timing samples"] == 2 * (len(PARTS) + 2)


def test_profile_compiles_the_whole_and_the_parts(tmp_path, monkeypatch):
    compile_, compiled = torch.compile, []

    def quick(function, **options):  # the real inductor takes a minute here
        compiled.append(function)
        smallest = len(compiled) == 2  # the same as the whole
        return function if smallest else compile_(function, backend="eager", **options)

    monkeypatch.setattr(torch, "compile", quick)
    run = profile(tmp_path, "--compile")
    (point,) = run.profile.points
    assert point.compilation.graphs == 1
    assert point.compilation.graph_breaks == 0
    assert point.compilation.seconds > 0
    # The Block, the smallest one, and the parts. The residual sums are two functions.
    assert len(compiled) == 2 + len(PARTS) + 1
    line = r"^Compilation of the Block: .* s; 1 graph, 0 breaks$"
    assert re.search(line, run.out, re.MULTILINE)


def test_sweep_goes_on_after_a_size_without_memory(tmp_path):
    pytest.importorskip("matplotlib")
    sweep = profile(
        tmp_path,
        "--mode=forward",
        f"--sweep=batch-size=1,{TOO_LARGE},3",
        f"--plot={tmp_path / 'plot.svg'}",
    )
    kinds = [type(point) for point in sweep.profile.points]
    assert kinds == [Point, OutOfMemory, Point]
    first = sweep.profile.points[0]
    assert [*first.whole.passes] == ["forward"]
    assert first.memory.kept_bytes is None
    assert {part.kept_bytes for part in first.memory.parts} == {None}
    assert "backward |" not in sweep.out.replace("kept for backward |", "")
    assert re.search(rf"^\| {TOO_LARGE} +\| +out of memory", sweep.out, re.MULTILINE)
    # The doubts name the size.
    assert "\n- batch-size 1: " in sweep.out
    assert set(PARTS) <= set(sweep.texts)
    assert set(PARTS) <= set(rows(sweep.out))


def test_sweep_without_any_result_fails_and_has_no_parts(tmp_path):
    option = f"--sweep=batch-size={TOO_LARGE}"
    sweep = profile(tmp_path, "--mode=forward", option, code=1)
    assert "part" not in rows(sweep.out)


def test_size_without_memory_fails(tmp_path):
    run = profile(tmp_path, "--mode=forward", f"--batch-size={TOO_LARGE}", code=1)
    (point,) = run.profile.points
    assert isinstance(point, OutOfMemory)
    assert f"out of memory: {point.error}" in run.out


def test_interruption_keeps_the_finished_points(tmp_path, capsys):
    clock, path = ticking(), tmp_path / "profile.json"

    def interrupted():  # once the first point is written
        if path.exists():
            raise KeyboardInterrupt
        return clock()

    options = [*TINY, "--mode=forward", "--sweep=seq-len=4,8", f"--json={path}"]
    assert main(options, interrupted) == 130
    document = json.loads(path.read_text())
    assert (document["finished"], len(document["points"])) == (False, 1)
    assert "Interrupted after 1 size: " in capsys.readouterr().out
    assert main(TINY, interrupted) == 130
    assert capsys.readouterr() == ("", "profile_block.py: interrupted\n")


def test_ceilings_that_a_part_beats_are_measured_once_more(tmp_path, monkeypatch):
    # Ceilings of a machine that was busy at first, and of one that always is.
    measured = []
    for rates, too_low in (([1e3, 1e12], False), ([1e3, 1e3], True)):
        pending = [machine(rate, rate) for rate in rates]

        def measure_ceilings(*arguments, pending=pending, **options):
            measured.append(pending[0])
            return pending.pop(0)

        monkeypatch.setattr(session, "measure_ceilings", measure_ceilings)
        run = profile(tmp_path, "--mode=forward", "--sweep=seq-len=4,8")
        assert pending == []
        found = run.profile.ceilings.flops_per_second.median
        assert found == max(rates)
        assert ("The measured ceiling is too low" in run.out) == too_low
    assert len(measured) == 4


@pytest.mark.parametrize(
    ("precision", "expected"), [("highest", Rates(67e12, 4.8e12)), ("high", None)]
)
def test_datasheet_is_left_out_where_it_has_no_peak(
    precision, expected, tmp_path, monkeypatch
):
    monkeypatch.setattr(session, "device_name", lambda device: "NVIDIA H200")
    torch.set_float32_matmul_precision(precision)
    try:
        run = profile(tmp_path, "--mode=forward")
    finally:
        torch.set_float32_matmul_precision("highest")
    assert run.profile.datasheet == expected
    assert ("Datasheet: n/a" in run.out) == (expected is None)


@pytest.fixture
def weights(monkeypatch):
    """Return weak references to the weights of every model that is built from now on."""
    weights, build = [], Size.build

    def watched(*arguments):
        model = build(*arguments)
        weights.extend(weakref.ref(weight) for weight in model.parameters())
        return model

    monkeypatch.setattr(Size, "build", watched)
    return weights


def test_measure_lets_go_of_everything(weights):
    settings = Settings(torch.device("cpu"), torch.float32, "step", rounds=1)
    assert isinstance(measure(SIZE, settings, clock=ticking()), Point)
    gc.collect()
    assert weights
    assert not any(ref() is not None for ref in weights)


def test_gradients_of_the_whole_are_not_kept_while_the_parts_are_timed(weights):
    tick, kept = ticking(), []

    def clock():
        kept.append(any(ref().grad is not None for ref in weights))
        return tick()

    settings = Settings(torch.device("cpu"), torch.float32, "train", rounds=1)
    assert isinstance(measure(SIZE, settings, clock=clock), Point)
    assert kept
    assert not any(kept)


def test_error_that_is_not_a_lack_of_memory_is_raised():
    def broken():
        raise RuntimeError("something else")

    settings = Settings(torch.device("cpu"), torch.float32, "forward")
    with pytest.raises(RuntimeError, match="something else"):
        measure(SIZE, settings, clock=broken)


def test_files_that_cannot_be_written_do_not_lose_the_report(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    tick, folder = ticking(), tmp_path / "folder"
    folder.mkdir()

    def clock():  # from the first measurement on, the folder is gone
        if folder.exists():
            folder.rmdir()
        return tick()

    trace, json_path, picture = folder / "trace", folder / "json", folder / "plot.png"
    options = [f"--trace={trace}", f"--json={json_path}", f"--plot={picture}"]
    assert main([*TINY, "--mode=forward", *options], clock) == 1
    captured = capsys.readouterr()
    assert "sum of the parts" in captured.out
    lines = captured.err.splitlines()
    assert len(lines) == 3
    for path, line in zip((trace, json_path, picture), lines, strict=True):
        beginning = f"profile_block.py: error: cannot write {path}: "
        assert line == f"{beginning}No such file or directory"


def test_error_of_a_file_is_forgotten_once_it_is_written(tmp_path):
    path, outputs = tmp_path / "profile.json", Outputs()
    with outputs.writing(path):
        raise OSError("the disk is full")
    assert [*outputs.errors] == [path]
    with outputs.writing(path):
        path.touch()
    assert outputs.errors == {}


def test_plot_that_fails_does_not_lose_the_report(tmp_path, monkeypatch, capsys):
    figure = pytest.importorskip("matplotlib.figure").Figure

    def broken(*args, **kwargs):
        raise ZeroDivisionError

    monkeypatch.setattr(figure, "savefig", broken)
    json_path, picture = tmp_path / "profile.json", tmp_path / "plot.png"
    outputs = [f"--json={json_path}", f"--plot={picture}"]
    with pytest.raises(ZeroDivisionError):
        main([*TINY, "--mode=forward", *outputs], ticking())
    assert "sum of the parts" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["profile.json"]
