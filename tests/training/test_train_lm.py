"""train_lm.py as its users run it: losses, checkpoints, kills, more than one process, and what is refused."""

import contextlib
import hashlib
import io
import json
import math
import os
import resource
import signal

import pytest
from processes import run_as_torchrun
from torch.distributed.checkpoint import FileSystemReader
from training import checkpoints, cli
from training.run import Trainer

TINY = ["--batch-size=4", "--seq-len=12", "--d-model=16", "--num-layers=2", "--num-heads=2", "--warmup=4", "--steps=8"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"{number} times {number} is {number**2}; " for number in range(300)))
    return path


def losses_in(path):
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return [record["loss"] for record in records]


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):
    """Return the losses of a run that nothing interrupts, what it printed, and its folder."""
    folder, printed = tmp_path_factory.mktemp("whole"), io.StringIO()
    outputs = ["--json", str(folder / "loss.json"), "--plot", str(folder / "loss.png")]
    with contextlib.redirect_stdout(printed):
        code = cli.main([*TINY, "--data", str(text), *outputs, "--checkpoint", str(folder / "saved"), "--keep=1"])
    assert code == 0
    return losses_in(folder / "loss.json"), printed.getvalue(), folder


def refused(capsys, *argv):
    """Return the one line that refuses these arguments."""
    with pytest.raises(SystemExit) as exit_:
        cli.main([*TINY, *map(str, argv)])
    captured = capsys.readouterr()
    assert exit_.value.code == 2
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("train_lm.py: error: ")
    return captured.err


def test_training_writes_losses_a_picture_and_what_it_read(whole, text):
    losses, printed, folder = whole
    assert len(losses) == 8
    assert losses[0] == pytest.approx(math.log(256), rel=0.3)
    assert losses[-1] < losses[0] - 0.1
    records = [json.loads(line) for line in (folder / "loss.json").read_text().splitlines()]
    assert [record["lr"] for record in records[:4]] == pytest.approx([5e-3 * share for share in (0.25, 0.5, 0.75, 1)])
    assert records[5]["lr"] == pytest.approx(5e-3 * (0.55 + 0.45 * math.cos(math.pi / 4)))
    assert records[-1]["validation"] < math.log(256)
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    data = text.read_bytes()
    assert f"1 files, {len(data):,} bytes, SHA-256 {hashlib.sha256(data).hexdigest()}" in printed
    assert "bits/byte" in printed
    assert data[-(len(data) // 20) :][:64].decode() + "|" in printed


def test_checkpoint_has_the_keys_of_cs336(whole):
    [saved] = checkpoints.saved_in(whole[2] / "saved")
    names = FileSystemReader(saved).read_metadata().state_dict_metadata
    keys = {name.removeprefix("model.") for name in names if name.startswith("model.")}
    block = {f"attn.{name}_proj" for name in "qkv"} | {"attn.output_proj", "ffn.w1", "ffn.w2", "ffn.w3", "ln1", "ln2"}
    expected = {f"layers.{layer}.{name}.weight" for layer in (0, 1) for name in block}
    assert keys == expected | {"token_embeddings.weight", "ln_final.weight", "lm_head.weight"}


def test_killed_while_it_writes_a_checkpoint_resumes_to_the_same_losses(whole, text, tmp_path):
    outputs = ["--data", str(text), "--checkpoint", str(tmp_path / "saved"), "--json", str(tmp_path / "loss.json")]
    argv = [*TINY, *outputs, "--every=2", "--keep=3"]
    code = f"""
import os, signal
from training import cli
def replace(source, target):
    if "step-00000006" in str(target):
        os.kill(os.getpid(), signal.SIGKILL)
    rename(source, target)
rename, os.replace = os.replace, replace
cli.main({argv})
"""
    [killed] = run_as_torchrun(code, 1, tmp_path)
    assert killed.code == -signal.SIGKILL, killed
    assert len(losses_in(tmp_path / "loss.json")) == 6
    assert list((tmp_path / "saved").glob(".step-*"))
    assert cli.main([*argv, "--resume"]) == 0
    assert losses_in(tmp_path / "loss.json") == whole[0]
    assert sorted(os.listdir(tmp_path / "saved")) == ["step-00000004", "step-00000006", "step-00000008"]
    assert checkpoints.read(tmp_path / "saved" / "step-00000008")["step"] == 8


def interrupt_after(step, monkeypatch):
    """Press Ctrl-C while the step after this one is taken."""
    advance = Trainer.advance

    def advance_with_interruption(trainer):
        if trainer.step == step - 1:
            os.kill(os.getpid(), signal.SIGINT)
        return advance(trainer)

    monkeypatch.setattr(Trainer, "advance", advance_with_interruption)


def test_ctrl_c_leaves_a_checkpoint_and_a_picture(whole, text, tmp_path, monkeypatch):
    outputs = ["--data", str(text), "--checkpoint", str(tmp_path / "saved"), "--plot", str(tmp_path / "loss.png")]
    with monkeypatch.context() as patch:
        interrupt_after(3, patch)
        assert cli.main([*TINY, *outputs]) == 130
    assert os.listdir(tmp_path / "saved") == ["step-00000003"]
    assert (tmp_path / "loss.png").exists()
    assert cli.main([*TINY, *outputs, "--resume", "--json", str(tmp_path / "loss.json")]) == 0
    assert losses_in(tmp_path / "loss.json") == whole[0]


def test_two_processes_train_and_resume_like_one(whole, text, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt_after(2, patch)
        assert cli.main([*TINY, "--data", str(text), "--checkpoint", str(tmp_path / "one")]) == 130
    calls = [
        [*TINY, "--tp=2", "--data", str(text), "--checkpoint", str(tmp_path / "one"), "--resume"],
        [*TINY, "--dp=2", "--data", str(text), "--checkpoint", str(tmp_path / "two"), "--every=5"],
    ]
    for name, argv in zip(("tp", "dp"), calls, strict=True):
        argv += ["--json", str(tmp_path / f"{name}.json")]
    code = """
import sys
from training import cli, session
session.SAMPLE, session.VALIDATION_BATCHES = 4, 1  # each takes many messages
sys.exit(cli.main({argv}))
"""
    tp, dp = (run_as_torchrun(code.format(argv=argv), 2, tmp_path) for argv in calls)
    assert [process.code for process in (*tp, *dp)] == [0] * 4, (tp, dp)
    assert "resumed after step 2" in tp[0].out
    assert tp[1].out == dp[1].out == ""
    for name in ("tp", "dp"):
        assert losses_in(tmp_path / f"{name}.json") == pytest.approx(whole[0], rel=1e-5)
    (tmp_path / "two" / "step-00000008").rename(tmp_path / "elsewhere")
    argv = [*TINY, "--data", str(text), "--checkpoint", str(tmp_path / "two"), "--resume", "--json"]
    assert cli.main([*argv, str(tmp_path / "one.json")]) == 0
    assert losses_in(tmp_path / "one.json") == pytest.approx(whole[0], rel=1e-5)


def test_accumulated_parts_of_a_batch_give_its_loss(whole, text, tmp_path):
    outputs = ["--data", str(text), "--json", str(tmp_path / "loss.json")]
    assert cli.main([*TINY, "--accumulate=2", *outputs]) == 0
    assert losses_in(tmp_path / "loss.json") == pytest.approx(whole[0], rel=1e-5)


def test_divergence_stops_with_step_learning_rate_and_gradient_norm(text, capsys):
    assert cli.main([*TINY, "--data", str(text), "--lr=1e30", "--warmup=0"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("train_lm.py: stopped: step 2: the loss is ")
    assert "the learning rate 9.66e+29, the gradient norm nan" in error


REFUSALS = {
    "--data missing.txt": "missing.txt: No such file",
    "--seq-len 500": "the text has",
    "--seq-len 20 --max-seq-len 10": "--seq-len 20 is longer than --max-seq-len 10",
    "--d-model 15": "d_model=15 is not a multiple of num_heads=2",
    "--steps 0": "--steps must be at least 1",
    "--accumulate 3": "--batch-size 4 is not a multiple of",
    "--tp 2": "torchrun --nproc-per-node 2 scripts/train_lm.py",
    "--tp 3 --num-heads 4": "--num-heads 4 is not a multiple of --tp 3",
    "--lr 1e-3 1e-2": "several --lr",
    "--plot loss.gif": "--plot must end in",
    "--json missing/loss.json": "No such file",
    "--json .": "cannot write .: it is a folder",
    "--d-model 1000000000000": "impossible size",
    "--every 2": "--every needs --checkpoint",
    "--resume": "--resume needs --checkpoint",
    "--resume --checkpoint missing": "there is no folder missing",
    "--compare ffn --checkpoint saved": "--compare writes no checkpoints",
    "--compare activations": "needs --plot",
}


@pytest.mark.parametrize("arguments", REFUSALS)
def test_refusal_is_one_line_before_anything_is_allocated(arguments, text, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "train", None)  # a call would be a TypeError
    data = [] if "--data" in arguments else ["--data", text]
    assert REFUSALS[arguments] in refused(capsys, *data, *arguments.split())
    assert not list(tmp_path.iterdir())


def test_checkpoint_of_another_run_and_a_damaged_one_are_refused(whole, text, capsys):
    folder = whole[2] / "saved"
    argv = ["--data", text, "--checkpoint", folder]
    assert "add --resume" in refused(capsys, *argv)
    assert "its d_model is 16, and here 32" in refused(capsys, *argv, "--resume", "--d-model=32")
    [saved] = checkpoints.saved_in(folder)
    [weights] = saved.glob("*.distcp")
    before = weights.read_bytes()
    for damaged in (before[:-1], before.replace(before[5000:5008], bytes(8), 1), None):
        weights.unlink() if damaged is None else weights.write_bytes(damaged)
        assert f"{saved} is damaged" in refused(capsys, *argv, "--resume")
        weights.write_bytes(before)
    (saved / "run.json").write_text("{")
    assert f"{saved} is damaged" in refused(capsys, *argv, "--resume")


def test_full_disk_is_one_line_and_leaves_the_older_checkpoints(text, tmp_path, capsys, monkeypatch):
    argv = ["--data", text, "--checkpoint", tmp_path, "--every=3"]
    limits, advance = resource.getrlimit(resource.RLIMIT_FSIZE), Trainer.advance

    def advance_until_full(trainer):
        if trainer.step == 3:  # from now on a file can have no more bytes than these
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        return advance(trainer)

    monkeypatch.setattr(Trainer, "advance", advance_until_full)
    try:
        error = refused(capsys, *argv)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "cannot write" in error
    assert os.listdir(tmp_path) == ["step-00000003"]
    assert checkpoints.read(tmp_path / "step-00000003")["step"] == 3
