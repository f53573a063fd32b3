"""The options of the profiler: what they choose, and which of them are rejected."""

import json
import re

import pytest
from lab.sizes import Size
from profiles import TINY, profile, undocumented
from profiling.cli import main


def rejection(capsys, *options):
    """Return the one line in which the profiler rejects these options, before anything is measured."""
    with pytest.raises(SystemExit) as raised:
        main([*TINY, *options])
    captured = capsys.readouterr()
    assert raised.value.code == 2
    assert captured.out == ""
    assert captured.err.startswith("profile_block.py: error: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_preset_gives_every_size_and_an_option_overrides_it(tmp_path):
    path = tmp_path / "paper.json"  # a prediction, which allocates nothing
    predict = [
        "--predict",
        "dp=1",
        "--link=1e9",
        "--ceilings=NVIDIA H200",
        f"--json={path}",
        "--device=cpu",
    ]
    for options, expected in (
        (
            ["--preset=qwen3-8b", "--seq-len=7"],
            Size(1, 7, 4096, 32, 8, 128, 12288, True, 1e6, 1e-6),
        ),
        (
            ["--preset=llama-3.1-8b", "--d-model=512"],
            Size(1, 128, 512, 32, 8, 16, 1344, theta=5e5),
        ),
        ([], Size(1, 128, 512, 8, 8, 64, 1344)),
    ):
        assert main([*options, *predict]) == 0
        (prediction,) = json.loads(path.read_text())["predictions"]
        assert Size(**prediction["size"]) == expected


def test_prediction_is_written_shown_and_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    options = [
        "--predict",
        "tp=2,dp=2",
        "dp=8",
        "--link=450e9,50e9",
        "--ceilings=NVIDIA H200",
    ]
    run = profile(
        tmp_path, *options, "--sweep=batch-size=4,8", f"--plot={tmp_path / 'plot.svg'}"
    )
    assert undocumented(run.document) == set()
    assert re.match(
        "A lower bound on time.* at the roofline of the NVIDIA H200 datasheet\n",
        run.out,
    )
    assert [prediction["processes"] for prediction in run.document["predictions"]] == [
        4,
        4,
        8,
    ]
    assert re.search(r"^\| dp=2,tp=2 \| +4 \| +6 ", run.out, re.MULTILINE)
    assert {run.out.partition("\n")[0], "dp=8", "dp=2,tp=2"} <= set(run.texts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seq-len", "0"], "seq_len must be at least 1, got 2 and 0"),
        (["--sweep", "d-model=16,17"], "d_model=17"),
        (["--sweep", "d-ff=16"], "--sweep must be one of seq-len, batch-size, d-model"),
        (["--sweep", "seq-len=8,x"], "'seq-len=8,x'"),
        (["--rounds", "0"], "--rounds"),
        (["--trace", "."], "--trace: cannot write"),
        (["--compare", "missing.json"], "--compare: cannot read missing.json"),
        (["--memory-snapshot", "x"], "--memory-snapshot needs CUDA"),
        (["--sweep", "seq-len=4", "--trace", "x"], "leave --sweep out"),
        (["--d-model", "4" + "0" * 20], "impossible size: "),
        (["--seq-len", str(2**62)], "impossible size: "),
        (["--seed", "9" * 20], "--seed must fit into 64 bits"),
        (["--dtype", "float16", "--mode", "step"], "use bfloat16, or --mode train"),
        (["--num-layers", str(10**12)], "GiB of weights does not fit: cpu has "),
        (
            ["--tp", "2"],
            "tp=2 needs 2 processes, but 1 is running: start with torchrun --nproc-per-node 2 ",
        ),
        (["--dp", "4"], "a batch of 2 does not split over dp=4"),
        (["--dp-replicate", "2"], "use dp alone"),
        (["--tp", "0"], "at least 1 process"),
        (
            ["--tp", "2", "--plot", "x.png"],
            "--plot is for one process: leave --tp and --dp out",
        ),
        (["--predict", "tp=2"], "--predict needs --link"),
        (
            ["--predict", "pp=2", "--link", "1e9"],
            "--predict: must be meshes, as in tp=8,dp=64, got 'pp=2'",
        ),
        (
            ["--predict", "tp=4", "--link", "1e9"],
            "num_kv_heads must be a multiple of tp=4, got 2; use",
        ),
        (["--predict", "tp=2", "--link", "1e9,0"], "--link: must be bytes/s"),
        (["--predict", "tp=2", "--link", "1e9", "--trace", "x"], "leave --predict out"),
        (["--predict", "tp=2", "--link", "1e9", "--plot", "x.png"], "add --sweep"),
        (
            ["--predict", "tp=2", "--link", "1e9", "--vocab", "9"],
            "--vocab 9 must be positive and needs --num-layers",
        ),
        (
            ["--predict", "tp=2", "--link", "1e9", "--from", "missing.json"],
            "--from: cannot read missing.json",
        ),
        (["--recompute"], "--recompute is for --predict"),
    ],
)
def test_rejections_name_what_is_wrong(options, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in rejection(capsys, *options)
    assert list(tmp_path.iterdir()) == []
