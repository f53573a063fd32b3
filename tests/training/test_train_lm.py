"""train_lm.py as its users run it: losses, checkpoints, signals, several processes, and what it rejects."""

import contextlib
import io
import json
import math
import os
import resource
import shutil
import signal

import pytest
import torch
from processes import run_as_torchrun
from training import checkpoints, cli, session
from training.trainer import Trainer

TINY = [
    "--batch-size=4",
    "--seq-len=12",
    "--d-model=16",
    "--num-layers=2",
    "--num-heads=2",
    "--warmup=4",
    "--steps=8",
]
LAST = "step-00000008.pt"


@pytest.fixture(scope="module", autouse=True)
def _short():
    """Write a few bytes at the end, and validate on a few, in all runs of this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "SAMPLE", 5)
        patch.setattr(session, "VALIDATION_BATCHES", 1)
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(
        "".join(f"{number} times {number} is {number**2}; " for number in range(300))
    )
    return path


def train(text, *options):
    return cli.main([*TINY, "--data", str(text), *map(str, options)])


def rejected(capsys, *options):
    """Return the one line that rejects these options."""
    with pytest.raises(SystemExit) as exit_:
        cli.main([*TINY, *map(str, options)])
    captured = capsys.readouterr()
    assert exit_.value.code == 2
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("train_lm.py: error: ")
    return captured.err


def losses_in(path):
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return [record["loss"] for record in records]


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):
    """Return the losses of a run that nothing interrupts, what it printed, and its folder."""
    folder, printed = tmp_path_factory.mktemp("whole"), io.StringIO()
    outputs = [
        "--json",
        folder / "loss.json",
        "--plot",
        folder / "loss.png",
        "--checkpoint",
        folder / "saved",
    ]
    with contextlib.redirect_stdout(printed):
        assert train(text, *outputs) == 0
    return losses_in(folder / "loss.json"), printed.getvalue(), folder


@pytest.fixture
def saved(whole, tmp_path):
    """Return a copy of the checkpoints of that run."""
    return shutil.copytree(whole[2] / "saved", tmp_path / "saved")


def at_step(step, act, monkeypatch):
    """Call `act` before this step is taken."""
    advance = Trainer.advance

    def act_and_advance(trainer):
        if trainer.step == step - 1:
            act()
        return advance(trainer)

    monkeypatch.setattr(Trainer, "advance", act_and_advance)


def test_training_writes_losses_a_picture_and_what_it_read(whole, text):
    losses, printed, folder = whole
    assert len(losses) == 8
    assert losses[0] == pytest.approx(math.log(256), rel=0.3)
    assert losses[-1] < losses[0] - 0.1
    records = [
        json.loads(line) for line in (folder / "loss.json").read_text().splitlines()
    ]
    assert [record["lr"] for record in records[:4]] == pytest.approx(
        [5e-3 * share for share in (0.25, 0.5, 0.75, 1)]
    )
    assert records[5]["lr"] == pytest.approx(
        5e-3 * (0.55 + 0.45 * math.cos(math.pi / 4))
    )
    assert records[-1]["validation"] < math.log(256)
    assert [record["tokens_per_second"] is None for record in records] == [True] * 5 + [
        False
    ] * 3  # no warm-up
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    data = text.read_bytes()
    held_out = len(data) // 20
    assert (
        f"{len(data) - held_out:,} bytes for training and {held_out:,} for validation, SHA-256 "
        in printed
    )
    assert "bits/byte" in printed
    assert data[-held_out:][:64].decode() + "|" in printed


def test_checkpoint_has_the_keys_of_cs336(saved):
    block = {f"attn.{name}_proj" for name in "qkv"} | {
        "attn.output_proj",
        "ffn.w1",
        "ffn.w2",
        "ffn.w3",
        "ln1",
        "ln2",
    }
    expected = {f"layers.{layer}.{name}.weight" for layer in (0, 1) for name in block}
    keys = torch.load(saved / LAST)["model"].keys()
    assert keys == expected | {
        "token_embeddings.weight",
        "ln_final.weight",
        "lm_head.weight",
    }


RUN = """
import os, resource, signal, sys
from training import cli, session
session.SAMPLE, session.VALIDATION_BATCHES = 5, 1
{}
sys.exit(cli.main({}))
"""
SEND = """
def hook(event, args):
    if event == "{}" and any(str(arg).endswith("{}") for arg in args):
        for number in {}:
            signal.raise_signal(number)
sys.addaudithook(hook)
"""


def test_killed_while_it_writes_a_checkpoint_resumes_to_the_same_losses(
    whole, text, tmp_path
):
    saved, losses = tmp_path / "saved", tmp_path / "loss.json"
    options = [
        "--checkpoint",
        str(saved),
        "--json",
        str(losses),
        "--every=2",
        "--keep=3",
    ]
    send = SEND.format("os.rename", "step-00000006.pt", [int(signal.SIGKILL)])
    [killed] = run_as_torchrun(
        RUN.format(send, [*TINY, "--data", str(text), *options]), 1, tmp_path
    )
    assert killed.code == -signal.SIGKILL, killed
    assert len(losses_in(losses)) == 6
    assert len(os.listdir(saved)) == 3  # two, and a hidden file
    assert train(text, *options, "--resume") == 0
    assert losses_in(losses) == whole[0]
    assert sorted(os.listdir(saved)) == ["step-00000004.pt", "step-00000006.pt", LAST]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_leaves_a_checkpoint_and_a_picture(number, text, tmp_path, monkeypatch):
    at_step(3, lambda: signal.raise_signal(number), monkeypatch)
    assert (
        train(text, "--checkpoint", tmp_path / "saved", "--plot", tmp_path / "loss.png")
        == 128 + number
    )
    assert os.listdir(tmp_path / "saved") == ["step-00000003.pt"]
    assert (tmp_path / "loss.png").exists()


def test_second_ctrl_c_ends_the_writing_of_a_checkpoint(text, tmp_path):
    argv = [
        *TINY,
        "--data",
        str(text),
        "--checkpoint",
        str(tmp_path / "saved"),
        "--every=2",
    ]
    send = SEND.format("open", ".step-00000004.pt", [int(signal.SIGINT)] * 2)
    [process] = run_as_torchrun(RUN.format(send, argv), 1, tmp_path)
    assert (process.code, process.err) == (130, "train_lm.py: interrupted\n")
    assert os.listdir(tmp_path / "saved") == ["step-00000002.pt"]


def test_longer_run_resumes_with_its_own_learning_rate_and_leaves_other_files(
    saved, text, tmp_path, capsys
):
    alive = f".{os.getppid()}.step-00000009.pt"  # of a run that is writing it
    others = [
        alive,
        ".step-notes.pt",
        ".my.step-00000009.pt",
        "step-00000008.pt.best",
        "step-99999999x.pt",
    ]
    for name in (
        *others,
        ".4194305.step-00000009.pt",
    ):  # the last of a process that was killed while it wrote
        (saved / name).touch()
    options = [
        "--checkpoint",
        saved,
        "--resume",
        "--keep=1",
        "--json",
        tmp_path / "loss.json",
    ]
    assert train(text, *options, "--steps=6") == 0
    assert "8 of 6 steps are done" in capsys.readouterr().out
    assert train(text, *options, "--steps=12") == 0
    ninth = json.loads((tmp_path / "loss.json").read_text().splitlines()[8])
    assert ninth["lr"] == pytest.approx(
        5e-3 * (0.55 + 0.45 * math.cos(math.pi * 4 / 8))
    )
    assert sorted(os.listdir(saved)) == sorted([*others, "step-00000012.pt"])


def test_output_among_the_text_is_rejected_and_in_a_folder_left_out(
    saved, text, capsys
):
    mine, outputs = (
        saved / "mine.txt",
        ["--json", saved / "loss.json", "--checkpoint", saved, "--resume"],
    )
    shutil.copy(text, mine)
    assert "has no text: outputs" in rejected(capsys, "--data", mine, "--json", mine)
    assert mine.read_bytes() == text.read_bytes()
    for _ in range(2):
        assert train(saved, *outputs) == 0
    (saved / "other.json").write_text("{}")
    assert "was an output written to a folder of --data?" in rejected(
        capsys, "--data", saved, *outputs
    )


def test_sample_reaches_an_ascii_terminal(tmp_path, monkeypatch):
    (tmp_path / "text").write_text("äöü" * 3000)
    printed = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(printed, encoding="ascii"))
    assert train(tmp_path / "text") == 0
    assert b"??????|" in printed.getvalue()


def test_two_processes_train_and_resume_like_one(whole, text, tmp_path, monkeypatch):
    one, two = tmp_path / "one", tmp_path / "two"
    with monkeypatch.context() as patch:
        at_step(2, lambda: signal.raise_signal(signal.SIGINT), patch)
        assert train(text, "--checkpoint", one) == 130
    for options in (
        ["--tp=2", "--checkpoint", str(one), "--resume"],
        ["--dp=2", "--checkpoint", str(two), "--every=5"],
    ):
        argv = [
            *TINY,
            "--data",
            str(text),
            *options,
            "--json",
            str(tmp_path / "loss.json"),
        ]
        first, second = run_as_torchrun(RUN.format("", argv), 2, tmp_path)
        assert (first.code, second.code, second.out) == (0, 0, ""), (first, second)
        assert ("2 of 8 steps are done" in first.out) == ("--resume" in options)
        assert losses_in(tmp_path / "loss.json") == pytest.approx(whole[0], rel=1e-5)
    (two / LAST).unlink()
    assert (
        train(text, "--checkpoint", two, "--resume", "--json", tmp_path / "loss.json")
        == 0
    )
    assert losses_in(tmp_path / "loss.json") == pytest.approx(whole[0], rel=1e-5)


def test_process_that_cannot_write_is_the_only_one_to_report(text, tmp_path):
    argv = [
        *TINY,
        "--steps=40",
        "--dp=2",
        "--data",
        str(text),
        "--json",
        str(tmp_path / "loss.json"),
    ]
    limit = 'if os.environ["RANK"] == "0": resource.setrlimit(resource.RLIMIT_FSIZE, (700, 700))'
    first, second = run_as_torchrun(RUN.format(limit, argv), 2, tmp_path)
    assert (first.code, first.err) == (
        2,
        f"train_lm.py: error: {tmp_path / 'loss.json'}: File too large\n",
    )
    assert second.err == ""


def test_divergence_stops_with_step_learning_rate_and_gradient_norm(text, capsys):
    assert train(text, "--lr=1e30", "--warmup=0") == 1
    error = capsys.readouterr().err
    assert error.startswith("train_lm.py: error: step 2: the loss is ")
    assert "the learning rate 9.66e+29, the gradient norm nan" in error


REJECTED = {
    "--data missing.txt": "cannot read missing.txt: No such file",
    "--data .": "--data . has no text",
    "--data pipe": "--data pipe has no text",
    "--seq-len 500": "the text has",
    "--d-model 15": "d_model=15 must be a multiple of num_heads=2",
    "--steps 0": "--steps must be at least 1",
    "--warmup 9": "--warmup must be from 0 to --steps 8, got 9",
    "--lr nan": "--lr must be positive and finite, got [nan]",
    "--lr 1e-3 1e-2": "--lr must be one rate without --compare norm, got [0.001, 0.01]",
    "--dp 3": "--batch-size must be a multiple of --dp 3, got 4",
    "--tp 2": "torchrun --nproc-per-node 2 scripts/train_lm.py",
    "--tp 3 --num-heads 4": "--num-heads must be a multiple of --tp 3, got 4",
    "--tp 3 --num-heads 3 --d-model 12": "--tp must divide d_ff 64 and the vocabulary 256, got 3",
    "--plot loss.gif": "--plot must end in",
    "--json missing/loss.json": "No such file",
    "--d-model 1000000000000": "impossible size",
    "--resume": "--every and --resume need --checkpoint",
    "--resume --checkpoint missing": "there is no folder missing",
    "--compare activations": "needs --plot",
    "--compare ffn --tp 2": "--compare does not support --tp",
}


@pytest.mark.parametrize("arguments", REJECTED)
def test_rejection_is_one_line_before_anything_is_allocated(
    arguments, text, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    monkeypatch.setattr(session, "train", None)  # a call would be a TypeError
    data = [] if "--data" in arguments else ["--data", text]
    assert REJECTED[arguments] in rejected(capsys, *data, *arguments.split())
    assert os.listdir(tmp_path) == ["pipe"]


def test_checkpoint_of_another_run_and_a_damaged_one_are_rejected(saved, text, capsys):
    options = ["--data", text, "--checkpoint", saved]
    assert "add --resume" in rejected(capsys, *options)
    assert "its d_model is 16, but here it is 32" in rejected(
        capsys, *options, "--resume", "--d-model=32"
    )
    size = (saved / LAST).stat().st_size
    for damage in (
        lambda: os.truncate(saved / LAST, size // 2),
        lambda: torch.save([], saved / LAST),
        lambda: (saved / LAST).write_text("text"),
    ):
        damage()
        assert f"{saved / LAST}: the checkpoint is damaged" in rejected(
            capsys, *options, "--resume"
        )


def test_full_disk_is_one_line_and_leaves_the_older_checkpoints(
    text, tmp_path, capsys, monkeypatch
):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    at_step(
        4,
        lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1])),
        monkeypatch,
    )
    try:
        error = rejected(capsys, "--data", text, "--checkpoint", tmp_path, "--every=3")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (
        error
        == f"train_lm.py: error: {tmp_path / 'step-00000006.pt'}: File too large\n"
    )
    assert os.listdir(tmp_path) == ["step-00000003.pt"]
    assert len(checkpoints.read(tmp_path / "step-00000003.pt")["history"]) == 3
