"""The profiler as a program: every mode, every output, every rejection."""

import copy
import gc
import json
import re
import weakref

import pytest
import torch
from lab.machine import Ceilings
from lab.sizes import Size
from lab.timing import Spread
from profiles import TINY, profile, ticking, undocumented
from profiling.cli import main
from profiling.measure import measure
from profiling.records import Settings
from profiling.report import report

PARTS = [
    "ln1",
    "q/k/v projections",
    "rope",
    "attention",
    "output projection",
    "residual adds",
    "ln2",
    "ffn",
]
SIZE = Size(2, 6, 16, 4, 2, 4, 24)
CEILINGS = Ceilings(
    Spread(1e11, 1e11, 1e11, 7), Spread(1e10, 1e10, 1e10, 7), 1e11, 1024, 2**27
)
TOO_LARGE = 2**43  # a batch


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    return profile(tmp_path_factory.mktemp("train"), "--rounds=15")


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("step")
    options = [
        "--mode=step",
        "--num-layers=2",
        "--qk-norm",
        "--dtype=bfloat16",
        "--rounds=15",
    ]
    return profile(
        folder,
        *options,
        f"--trace={folder / 'trace.json'}",
        f"--plot={folder / 'plot.svg'}",
    )


def test_profile_of_train_measures_every_part(train):
    assert train.out.isascii()
    assert all(
        re.search(rf"^\| {name} ", train.out, re.MULTILINE)
        for name in [*PARTS, "sum of the parts", "whole"]
    )
    assert "datasheet n/a" in train.out
    assert (train.document["schema"], train.document["status"]) == (
        "tinyblock.profile/1",
        "ok",
    )
    (point,) = train.document["points"]
    assert [part["name"] for part in point["parts"]] == PARTS
    for name in ("forward", "train"):
        assert 1 < point["whole"][name]["seconds"]["median"] < 2
        assert point["whole"][name]["seconds"]["samples"] == 15
    memory = point["memory"]
    # Along the block, every saved storage is one part's; scalars aside, the parts save what the whole saves.
    assert (
        sum(part["saved_bytes"] for part in memory["parts"])
        == memory["saved_bytes"]
        > 0
    )
    saved = {part["name"]: part["saved_bytes"] for part in memory["parts"]}
    x = 2 * 6 * 16 * 4
    # A norm saves x, its result without the gain, and a factor for each token; what follows it, its result.
    assert (saved["ln1"], saved["ln2"], saved["q/k/v projections"]) == (
        2 * x + 48,
        2 * x + 48,
        x,
    )
    assert (saved["rope"], saved["residual adds"]) == (0, 0)
    weights = 4 * (2 * 16 * 4 * 4 + 2 * 16 * 2 * 4 + 3 * 16 * 24 + 2 * 16)
    assert memory["parameters_bytes"] == memory["gradients_bytes"] == weights
    assert memory["peak_bytes"] >= weights + max(weights, memory["saved_bytes"])
    assert (point["kernels"], point["compile"]) == (None, None)
    assert point["attention_kernel"] == "flash"
    assert point["overhead"]["share"] > 0
    assert re.search(
        r"^Memory: parameters .*, peak above the start [0-9.]+ kB",
        train.out,
        re.MULTILINE,
    )


def test_report_begins_with_doubts_and_gives_no_causes_then(train):
    # By this clock the samples vary by much more than 20%.
    _, doubts, summary, losses, *_ = train.out.split("\n\n")
    assert re.match(
        r"Do not trust these figures:\n  .*the samples vary .*\n.*--rounds", doubts
    )
    assert summary.startswith("Forward and backward: ")
    lost = re.findall(
        r"^  (.+): [0-9]+ ms, [0-9.]+% of the whole$", losses, re.MULTILINE
    )
    assert lost == [loss["name"] for loss in train.document["points"][0]["losses"]]


def test_report_shows_the_calls_on_one_token_where_the_whole_waits_for_them(train):
    document = copy.deepcopy(train.document)
    (point,) = document["points"]
    point["overhead"]["share"] = 0.25
    waiting, busy = (
        {"count": 9, "busy_fraction": 0.5, "launch_bound": bound}
        for bound in (True, False)
    )
    on_cpu = ("cpu", None, [", 25.0% of the whole"])
    for device, kernels, shares in (
        on_cpu,
        ("cuda:0", waiting, [""]),
        ("cuda:0", None, [""]),
        ("cuda:0", busy, []),
    ):
        document["settings"]["device"], point["kernels"] = device, kernels
        assert (
            re.findall(
                r"\nSame calls on .*: [0-9]+ ms(.*), all of it overhead",
                str(report(document)[2]),
            )
            == shares
        )


def test_profile_trace_and_plot_of_a_step_have_the_optimizer(step):
    (point,) = step.document["points"]
    memory, parts = (
        point["memory"],
        {part["name"]: part["count"] for part in point["parts"]},
    )
    assert (
        memory["optimizer_state_bytes"] == 2 * memory["parameters_bytes"] + 4 * 23
    )  # two moments, and 23 step counts
    assert point["optimizer"]["seconds"]["median"] > 0
    assert parts == dict.fromkeys([*PARTS, "q/k norm"], 2) | {"final norm": 1}
    assert "the sum counts 2 times" in step.out
    assert "\n| AdamW " in step.out.partition("\nBackward: work")[2]
    # The gradients of the step before are not there when its peak is measured: it adds them.
    assert (
        memory["peak_added_bytes"] >= memory["gradients_bytes"] + memory["saved_bytes"]
    )
    assert undocumented(step.document) == set()
    labels = {
        event.get("name")
        for event in json.loads((step.folder / "trace.json").read_text())["traceEvents"]
    }
    assert labels >= {
        f"{part} {pass_}"
        for part in [*parts, "whole"]
        for pass_ in ("forward", "backward")
    } | {"AdamW"}
    assert "aten::scaled_dot_product_attention" in labels
    *_, title, origin = step.texts
    assert "d_model 16" in title
    assert step.document["environment"]["date"].partition("T")[0] in origin
    assert {f"{name} (x 2)" for name in PARTS} | {"AdamW", "final norm"} <= set(
        step.texts
    )


def test_profile_compiles_the_whole_and_the_parts(tmp_path, monkeypatch):
    compile_, compiled = torch.compile, []

    def quick(function, **options):  # the real inductor takes a minute here
        compiled.append(function)
        smallest = len(compiled) == 2  # the same as the whole
        return function if smallest else compile_(function, backend="eager", **options)

    monkeypatch.setattr(torch, "compile", quick)
    run = profile(tmp_path, "--compile")
    (point,) = run.document["points"]
    assert (point["compile"]["graphs"], point["compile"]["graph_breaks"]) == (1, 0)
    assert point["compile"]["seconds"] > 0
    assert len(compiled) == 2 + len(PARTS)  # the whole and the smallest, the parts
    assert re.search(
        r"^Compilation of the whole: .* s; 1 graph, 0 breaks$", run.out, re.MULTILINE
    )


def test_sweep_goes_on_without_memory_and_a_single_size_fails(tmp_path):
    pytest.importorskip("matplotlib")
    options = [f"--sweep=batch-size=1,{TOO_LARGE},3", f"--plot={tmp_path / 'plot.svg'}"]
    sweep = profile(tmp_path, "--mode=forward", *options)
    assert [point["status"] for point in sweep.document["points"]] == [
        "ok",
        "out of memory",
        "ok",
    ]
    point, memory = sweep.document["points"][0], sweep.document["points"][0]["memory"]
    assert list(point["whole"]) == ["forward"]
    assert {record["saved_bytes"] for record in (memory, *memory["parts"])} == {None}
    assert "backward" not in sweep.out
    assert re.search(rf"^\| {TOO_LARGE} \| out of memory", sweep.out, re.MULTILINE)
    assert re.search(
        rf"^\| 1 +\| +{point['losses'][0]['name']} [0-9.]+%", sweep.out, re.MULTILINE
    )
    assert "\n  batch-size 1: " in sweep.out  # its doubts
    assert set(PARTS) <= set(sweep.texts)
    assert "| part " in sweep.out
    too_large = profile(
        tmp_path, "--mode=forward", f"--sweep=batch-size={TOO_LARGE}", code=1
    )
    assert "| part " not in too_large.out  # nor a table of parts without a row
    run = profile(tmp_path, "--mode=forward", f"--batch-size={TOO_LARGE}", code=1)
    assert [point["status"] for point in run.document["points"]] == ["out of memory"]
    assert "out of memory" in run.out


def test_interruption_keeps_the_finished_points(tmp_path, capsys):
    clock, path = ticking(), tmp_path / "profile.json"

    def interrupted():  # once the first point is written
        if path.exists():
            raise KeyboardInterrupt
        return clock()

    assert (
        main(
            [*TINY, "--mode=forward", "--sweep=seq-len=4,8", "--json", str(path)],
            interrupted,
        )
        == 130
    )
    document = json.loads(path.read_text())
    assert (document["status"], len(document["points"])) == ("interrupted", 1)
    assert "Interrupted after 1 size." in capsys.readouterr().out
    assert main(TINY, interrupted) == 130
    assert capsys.readouterr() == ("", "profile_block.py: interrupted\n")


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
    assert measure(SIZE, settings, CEILINGS, clock=ticking())["status"] == "ok"
    gc.collect()
    assert weights
    assert not any(ref() is not None for ref in weights)


def test_gradients_of_the_whole_are_not_kept_while_the_parts_are_timed(weights):
    tick, kept = ticking(), []

    def clock():
        kept.append(any(ref().grad is not None for ref in weights))
        return tick()

    settings = Settings(torch.device("cpu"), torch.float32, "train", rounds=1)
    assert measure(SIZE, settings, CEILINGS, clock=clock)["status"] == "ok"
    assert kept
    assert not any(kept)


def test_error_that_is_not_a_lack_of_memory_is_raised():
    def broken():
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        measure(
            SIZE,
            Settings(torch.device("cpu"), torch.float32, "forward"),
            CEILINGS,
            clock=broken,
        )


def test_plot_that_fails_does_not_lose_the_report(tmp_path, monkeypatch, capsys):
    figure = pytest.importorskip("matplotlib.figure").Figure

    def broken(*args, **kwargs):
        raise ZeroDivisionError

    monkeypatch.setattr(figure, "savefig", broken)
    outputs = [
        "--json",
        str(tmp_path / "profile.json"),
        "--plot",
        str(tmp_path / "plot.png"),
    ]
    with pytest.raises(ZeroDivisionError):
        main([*TINY, "--mode=forward", *outputs], ticking())
    assert "sum of the parts" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["profile.json"]
