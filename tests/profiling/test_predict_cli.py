"""The program that predicts: what it shows, writes and draws, and what it rejects."""

import json
import re

import pytest
from profiling.predict_cli import main
from profiling.report_prediction import duration

GPU = ["--ceilings=NVIDIA H200", "--link=450e9,50e9", "--dtype=bfloat16"]
LLAMA_8B = ["--preset=llama-3.1-8b", "--vocab=128256", "--mode=step"]


def test_headline_has_parameters_time_and_rate_of_the_whole_model(capsys):
    assert main(["dp=512", "--batch-size=512", "--seq-len=8192", *LLAMA_8B, *GPU]) == 0
    out = capsys.readouterr().out
    assert "For comparison, published runs of Llama 3.1 on H100 GPUs take" in out
    assert "8.03 billion parameters, 4.19 million tokens in the batch." in out
    # 6 FLOPs for each of 7.50 billion weights that take part in products, and causal attention.
    found = re.search(r"On dp=512, a training step takes at least (\d+) ms", out)
    assert found
    weights = 6 * 7.50e9 * 8192
    attention = 3 * 32 * 4 * 4096 * 8192 * 8193 / 2
    assert int(found[1]) == pytest.approx((weights + attention) / 989e9, rel=0.05)


def test_tiny_times_are_not_shown_as_zero(capsys):
    tiny = ["--d-model=16", "--num-heads=2", "--seq-len=2", "--batch-size=2"]
    assert main(["dp=2", "dp=1", *tiny, *GPU]) == 0
    out = capsys.readouterr().out
    assert "0.00" not in out
    row = next(line for line in out.splitlines() if line.startswith("| one process"))
    assert re.search(r"\| +0 \| +0 \| +0 \|", row), "one process transfers nothing"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0"), (3.2e-9, "3.20 ns"), (0.00045, "450 us"), (0.118, "118 ms")],
)
def test_duration_has_three_digits_and_a_unit(seconds, text):
    assert duration(seconds) == text


def test_sweep_is_written_shown_and_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path, picture = tmp_path / "bounds.json", tmp_path / "plot.svg"
    sweep = ["--sweep=batch-size=4,8", "--seq-len=6", "--num-heads=4"]
    outputs = [f"--json={path}", f"--plot={picture}"]
    assert main(["tp=2,dp=2", "dp=8", *sweep, *GPU, *outputs]) == 0
    document = json.loads(path.read_text())
    sizes_and_meshes = [
        (each["size"]["batch_size"], each["mesh"]["dp"], each["mesh"]["tp"])
        for each in document["predictions"]
    ]
    # A batch of 4 does not split over dp=8.
    assert sizes_and_meshes == [(4, 2, 2), (8, 2, 2), (8, 8, 1)]
    assert document["basis"]["rates"]["flops_per_second"] == 989e12
    # A batch of 4 sequences of 6 tokens leaves 6 tokens to each of four devices.
    out = capsys.readouterr().out
    assert re.search(r"^\| dp=2,tp=2 \| +4 \| +6 ", out, re.MULTILINE)
    reason = "--batch-size must be a multiple of 8 for dp=8, got 4"
    (left_out,) = [line for line in out.splitlines() if line.startswith("left out: ")]
    assert left_out.endswith(f"; dp=8: {reason}")
    texts = re.findall("<!-- (.*) -->", picture.read_text())
    assert {"dp=8", "dp=2,tp=2", "sequences per batch"} <= set(texts)


def test_rates_of_another_device_are_numbers(capsys):
    assert main(["dp=1", "--ceilings=2e12,300e9", "--link=1e9"]) == 0
    assert "Ceilings of each device: 2.00 TFLOP/s, 300 GB/s" in capsys.readouterr().out


def rejection(capsys, *options):
    with pytest.raises(SystemExit) as raised:
        main(options)
    assert raised.value.code == 2
    return capsys.readouterr().err.removeprefix("predict_scaling.py: error: ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            ["dp=1", "--vocab=9"],
            "--vocab requires --num-layers: a single Block has no embedding",
            id="vocabulary of a Block",
        ),
        pytest.param(
            ["dp=1", "--vocab=0"], "argument --vocab: must be an integer", id="no words"
        ),
        pytest.param(
            ["dp=8,dp=4"], "a mesh must have each axis once", id="an axis twice"
        ),
        pytest.param(["dp=8"], "--batch-size must be a multiple of 8", id="batch of 1"),
        pytest.param(["dp=1", "--plot=x.png"], "add --sweep", id="plot of one size"),
        pytest.param(["dp=1", "--link=1e9,0"], "--link must be bytes/s", id="no rate"),
        pytest.param(
            ["dp=1", "--link=1e-300"], "--link must be bytes/s", id="tiny rate"
        ),
        pytest.param(
            ["dp=1", "--ceilings=1e-300,1e9"], "--ceilings must be", id="tiny ceiling"
        ),
        pytest.param(
            ["dp=1", "--ceilings=RTX"],
            "as in 989e12,3350e9, got 'RTX'\n",
            id="unknown GPU",
        ),
        pytest.param(
            ["dp=1", "--ceilings=h100"],
            "got 'h100': did you mean NVIDIA H100 80GB HBM3 or NVIDIA H100 PCIe?\n",
            id="part of a GPU's name",
        ),
        pytest.param(
            ["tp=3"],
            "--num-heads must be a multiple of tp=3, got 8",
            id="heads that do not split",
        ),
        pytest.param(
            ["dp=1", "--recomp"], "did you mean --recompute?", id="misspelled option"
        ),
    ],
)
def test_rejections_name_what_is_wrong(options, message, capsys):
    assert message in rejection(capsys, *GPU, *options)


def test_datasheet_without_this_dtype_is_rejected(capsys, monkeypatch):
    monkeypatch.setattr("torch.get_float32_matmul_precision", lambda: "high")
    message = rejection(capsys, *GPU, "dp=1", "--dtype=float32")
    assert "the datasheet has no peak for float32" in message
