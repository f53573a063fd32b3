"""train_lm.py as its users run it: losses, checkpoints, signals, and what it rejects."""

import contextlib
import hashlib
import io
import json
import math
import os
import re
import resource
import shlex
import shutil
import signal
import sys

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


@pytest.fixture(autouse=True)
def _ctrl_c_has_its_usual_effect():
    """Handle SIGINT as in a terminal: nohup would have the tests ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


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
    folder = tmp_path_factory.mktemp("whole")
    printed = io.StringIO()
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


def records_in(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_training_writes_losses_and_a_picture(whole):
    losses, _, folder = whole
    assert len(losses) == 8
    assert losses[0] == pytest.approx(math.log(256), rel=0.3)
    assert losses[-1] < losses[0] - 0.1
    records = records_in(folder / "loss.json")
    rates = [record["lr"] for record in records]
    assert rates[:4] == pytest.approx([5e-3 * share for share in (0.25, 0.5, 0.75, 1)])
    assert rates[5] == pytest.approx(5e-3 * (0.55 + 0.45 * math.cos(math.pi / 4)))
    assert records[-1]["validation"] < math.log(256)
    # The first five steps may compile, so they are not timed.
    untimed = [record["bytes_per_second"] is None for record in records]
    assert untimed == [True] * 5 + [False] * 3
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_training_prints_what_it_read_and_a_sample(whole, text):
    printed = whole[1]
    data = text.read_bytes()
    held_out = len(data) // 20
    assert f"{len(data) - held_out:,} bytes for training" in printed
    assert f"{held_out:,} for validation, SHA-256 " in printed
    assert "trigram model: validation " in printed
    assert " nats/byte (" in printed
    assert " bits/byte)" in printed
    prompt, continuation = printed.split("prompt (")[1].split("continuation ")
    assert data[-held_out:][:64].decode() in prompt
    # Five bytes and the end of the line. Several bytes may form one character.
    assert 1 < len(continuation.partition(":\n")[2]) <= 6


def test_checkpoint_has_the_keys_of_cs336(saved):
    projections = ("q_proj", "k_proj", "v_proj", "output_proj")
    names = [f"attn.{name}" for name in projections]
    names += ["ffn.w1", "ffn.w2", "ffn.w3", "ln1", "ln2"]
    expected = {"token_embeddings.weight", "ln_final.weight", "lm_head.weight"}
    for layer in (0, 1):
        expected.update(f"layers.{layer}.{name}.weight" for name in names)
    assert torch.load(saved / LAST)["model"].keys() == expected


def run_with_signals(argv, folder, *, event, path_ends, signals):
    """Train in a process of its own, which sends itself signals, and return how it has ended.

    It sends them just before an audit event of Python, such as "open", for a path that ends with `path_ends`.
    """
    code = f"""
import signal, sys
from training import cli, session
session.SAMPLE = 5
session.VALIDATION_BATCHES = 1

def send(event, args):
    if event == {event!r} and any(str(arg).endswith({path_ends!r}) for arg in args):
        for number in {[int(number) for number in signals]}:
            signal.raise_signal(number)

sys.addaudithook(send)
sys.exit(cli.main({argv}))
"""
    [ended] = run_as_torchrun(code, 1, folder)
    return ended


def test_killed_while_it_writes_a_checkpoint_resumes_to_the_same_losses(
    whole, text, tmp_path
):
    saved = tmp_path / "saved"
    losses = tmp_path / "loss.json"
    options = ["--checkpoint", str(saved), "--json", str(losses), "--every=2"]
    killed = run_with_signals(
        [*TINY, "--data", str(text), *options],
        tmp_path,
        event="os.rename",
        path_ends="step-00000006.pt",
        signals=[signal.SIGKILL],
    )
    assert killed.code == -signal.SIGKILL, killed
    assert len(losses_in(losses)) == 6
    names = sorted(name for name in os.listdir(saved) if not name.startswith("."))
    assert names == ["step-00000002.pt", "step-00000004.pt"]
    assert train(text, *options, "--resume") == 0
    assert losses_in(losses) == whole[0]
    # The last two are kept.
    names = sorted(name for name in os.listdir(saved) if not name.startswith("."))
    assert names == ["step-00000006.pt", LAST]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_leaves_a_checkpoint_and_the_command_that_resumes_it(
    number, whole, text, tmp_path, monkeypatch, capsys
):
    saved = tmp_path / "saved"
    picture = tmp_path / "loss.png"
    options = ["--checkpoint", saved, "--plot", picture]
    with monkeypatch.context() as patch:
        at_step(3, lambda: signal.raise_signal(number), patch)
        assert train(text, *options) == 128 + number
    assert os.listdir(saved) == ["step-00000003.pt"]
    assert picture.exists()
    *_, stop, command = capsys.readouterr().out.splitlines()
    path = saved / "step-00000003.pt"
    assert stop == f"stopped by {number.name} after step 3; saved {path}. To resume:"
    python, script, *argv = shlex.split(command)
    assert (python, script) == ("python", sys.argv[0])
    losses = tmp_path / "loss.json"
    assert cli.main([*argv, "--json", str(losses)]) == 0
    assert losses_in(losses) == whole[0]


def test_signal_before_the_first_step_leaves_a_checkpoint(
    whole, text, tmp_path, monkeypatch, capsys
):
    folder = ["--checkpoint", tmp_path / "saved"]
    with monkeypatch.context() as patch:
        # The run starts to show its progress before the first step.
        patch.setattr(
            session.Progress, "start", lambda *_: signal.raise_signal(signal.SIGINT)
        )
        assert train(text, *folder) == 130
    path = tmp_path / "saved" / "step-00000000.pt"
    stop = f"stopped by SIGINT after step 0; saved {path}. To resume:"
    assert stop in capsys.readouterr().out
    assert path.exists()
    losses = tmp_path / "loss.json"
    assert train(text, *folder, "--resume", "--json", losses) == 0
    assert losses_in(losses) == whole[0]


def test_signal_without_checkpoints_says_what_was_written(
    text, tmp_path, monkeypatch, capsys
):
    at_step(2, lambda: signal.raise_signal(signal.SIGINT), monkeypatch)
    losses = tmp_path / "loss.json"
    picture = tmp_path / "loss.svg"
    stop = "stopped by SIGINT after step 2"
    without = "without --checkpoint DIR, no checkpoint was saved"
    assert train(text) == 130
    assert capsys.readouterr().out.splitlines()[-1] == f"{stop}; {without}"
    assert train(text, "--json", losses, "--plot", picture) == 130
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"{stop}; wrote {losses} and {picture}; {without}"
    assert len(losses_in(losses)) == 2
    assert "; 2 of 8 steps of 4 x 12 bytes" in footer_of(picture)


def test_picture_of_a_whole_run_has_its_steps(text, tmp_path):
    picture = tmp_path / "loss.svg"
    assert train(text, "--plot", picture) == 0
    assert footer_of(picture).endswith("2 layers, d_model 16; 8 steps of 4 x 12 bytes")


def footer_of(picture):
    """Return the line of a picture in SVG that says how many parameters the model has."""
    texts = re.findall("<!-- (.*) -->", picture.read_text())
    [footer] = [text for text in texts if " parameters, " in text]
    return footer


@pytest.mark.parametrize("when", ["in the step", "while it is saved"])
def test_signal_in_a_step_that_is_saved_anyway_saves_it_once(
    when, text, tmp_path, monkeypatch
):
    save = checkpoints.save
    steps = []

    def save_and_signal(folder, trainer, text_sha256):
        steps.append(trainer.step)
        if when == "while it is saved" and trainer.step == 4:
            signal.raise_signal(signal.SIGINT)
        return save(folder, trainer, text_sha256)

    monkeypatch.setattr(checkpoints, "save", save_and_signal)
    if when == "in the step":
        at_step(4, lambda: signal.raise_signal(signal.SIGINT), monkeypatch)
    assert train(text, "--checkpoint", tmp_path, "--every=2") == 130
    assert steps == [2, 4]


def test_ignored_ctrl_c_stays_ignored(text, monkeypatch):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as nohup does
    at_step(2, lambda: signal.raise_signal(signal.SIGINT), monkeypatch)
    assert train(text) == 0


def test_second_ctrl_c_ends_the_writing_of_a_checkpoint(text, tmp_path):
    saved = tmp_path / "saved"
    ended = run_with_signals(
        [*TINY, "--data", str(text), "--checkpoint", str(saved), "--every=2"],
        tmp_path,
        event="open",
        path_ends=".step-00000004.pt",
        signals=[signal.SIGINT, signal.SIGINT],
    )
    assert ended.code == 130
    assert ended.err == "train_lm.py: interrupted\n"
    assert os.listdir(saved) == ["step-00000002.pt"]


def test_run_that_has_more_steps_is_rejected(saved, text, tmp_path, capsys):
    losses = tmp_path / "loss.json"
    losses.write_text("losses")
    options = ["--checkpoint", saved, "--resume", "--json", losses]
    error = rejected(capsys, "--data", text, *options, "--steps=7")
    expected = f"--steps must be at least 8, the steps of {saved / LAST}, got 7"
    assert error.startswith(f"train_lm.py: error: {expected}: raise it, or ")
    assert losses.read_text() == "losses"


@pytest.mark.parametrize(
    ("stopped_after", "least"),
    [(7, "7, the steps of"), (3, "6, the warm-up steps of")],
)
def test_fewer_steps_than_the_warm_up_of_the_checkpoint_are_rejected(
    stopped_after, least, text, tmp_path, capsys, monkeypatch
):
    sizes = [option for option in TINY if not option.startswith("--warm")]
    folder = ["--data", str(text), "--checkpoint", str(tmp_path)]
    with monkeypatch.context() as patch:
        at_step(stopped_after, lambda: signal.raise_signal(signal.SIGINT), patch)
        assert cli.main([*sizes, *folder, "--warmup=6"]) == 130
    capsys.readouterr()
    with pytest.raises(SystemExit):
        cli.main([*sizes, *folder, "--steps=5", "--resume"])
    path = tmp_path / f"step-{stopped_after:08d}.pt"
    error = capsys.readouterr().err
    assert f"--steps must be at least {least} {path}, got 5: raise it" in error


def test_warm_up_that_is_longer_than_the_run_of_the_checkpoint_is_rejected(
    saved, text, capsys
):
    options = ["--data", text, "--checkpoint", saved, "--resume"]
    error = rejected(capsys, *options, "--steps=40", "--warmup=20")
    assert "its --warmup is 4, but here it is 20" in error


def test_run_with_all_its_steps_resumes_to_its_sample(saved, text, whole, capsys):
    assert train(text, "--checkpoint", saved, "--resume") == 0
    printed = capsys.readouterr().out
    assert "8 of 8 steps are done" in printed
    assert "schedule" not in printed
    assert printed.split("prompt (")[1] == whole[1].split("prompt (")[1]


def test_longer_run_resumes_with_its_own_learning_rate(saved, text, tmp_path, capsys):
    losses = tmp_path / "loss.json"
    options = ["--checkpoint", saved, "--resume", "--json", losses]
    assert train(text, *options, "--steps=12") == 0
    schedule = "the schedule of the learning rate now ends at step 12 instead of 8"
    assert schedule in capsys.readouterr().out.splitlines()
    ninth = records_in(losses)[8]
    share = 0.55 + 0.45 * math.cos(math.pi * 4 / 8)
    assert ninth["lr"] == pytest.approx(5e-3 * share)


def test_longer_run_resumes_with_the_warm_up_with_which_it_began(
    text, tmp_path, capsys
):
    sizes = [option for option in TINY if not option.startswith(("--warm", "--steps"))]
    folder = ["--data", str(text), "--checkpoint", str(tmp_path / "run")]
    losses = tmp_path / "loss.json"
    assert cli.main([*sizes, *folder, "--steps=8"]) == 0
    again = [*sizes, *folder, "--resume", "--json", str(losses)]
    assert cli.main([*again, "--steps=16"]) == 0
    # Two of eight steps are the default warm-up; four of sixteen would be another one.
    assert records_in(losses)[1]["lr"] == 5e-3
    rate = 5e-3 * (0.55 + 0.45 * math.cos(math.pi * 6 / 14))
    assert records_in(losses)[8]["lr"] == pytest.approx(rate)
    with pytest.raises(SystemExit):
        cli.main([*again, "--steps=24", "--warmup=4"])
    assert "its --warmup is 2, but here it is 4" in capsys.readouterr().err


def test_output_among_the_text_is_rejected_and_in_a_folder_left_out(
    saved, text, capsys
):
    mine = saved / "mine.txt"
    outputs = ["--json", saved / "loss.json", "--checkpoint", saved, "--resume"]
    shutil.copy(text, mine)
    assert "has no text: outputs" in rejected(capsys, "--data", mine, "--json", mine)
    assert mine.read_bytes() == text.read_bytes()
    for _ in range(2):
        assert train(saved, *outputs) == 0
    (saved / "other.json").write_text("{}")
    assert "was an output written to a folder of --data?" in rejected(
        capsys, "--data", saved, *outputs
    )


BINARY = {
    "picture.png": b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 8,
    "zeros": b"text\0text",
    "latin-1.txt": "äöü".encode("latin-1"),
}


def test_binary_files_in_a_folder_are_skipped_and_counted(text, tmp_path, capsys):
    folder = tmp_path / "data"
    folder.mkdir()
    shutil.copy(text, folder)
    (folder / "utf-8.txt").write_text("äöü", encoding="utf-8")
    for name, content in BINARY.items():
        (folder / name).write_bytes(content)
    assert train(folder) == 0
    printed = capsys.readouterr()
    data = text.read_bytes() + "äöü".encode()
    assert f"text: 2 files, {len(data) - len(data) // 20:,} bytes" in printed.out
    assert hashlib.sha256(data).hexdigest() in printed.out
    expected = (
        "--data: skipped 3 binary files in folders; name a file to read its bytes"
    )
    assert printed.err.splitlines() == [expected]


def test_folder_of_binary_files_is_rejected(tmp_path, capsys):
    (tmp_path / "zeros").write_bytes(bytes(9999))
    assert "has no text: outputs," in rejected(capsys, "--data", tmp_path)


@pytest.mark.parametrize("name", BINARY)
def test_binary_file_that_is_named_is_read(name, tmp_path, capsys):
    path = tmp_path / name
    content = BINARY[name] * 999
    path.write_bytes(content)
    assert train(path) == 0
    printed = capsys.readouterr()
    assert hashlib.sha256(content).hexdigest() in printed.out
    assert printed.err == ""


def test_sample_reaches_an_ascii_terminal(tmp_path, monkeypatch):
    (tmp_path / "text").write_text("äöü" * 3000)
    printed = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(printed, encoding="ascii"))
    assert train(tmp_path / "text") == 0
    assert b"??????\ncontinuation" in printed.getvalue()


def test_divergence_stops_with_step_learning_rate_and_gradient_norm(text, capsys):
    assert train(text, "--lr=1e30", "--warmup=0") == 1
    error = capsys.readouterr().err
    assert error.startswith("train_lm.py: error: step 2: the loss is ")
    assert "the learning rate 9.66e+29, the gradient norm nan" in error


REJECTED = {
    "--data missing.txt": "cannot read missing.txt: No such file",
    "--data .": "--data . has no text",
    "--data pipe": "--data pipe has no text",
    "--seq-len 500": "the text must have at least 2001 bytes for training and 501 for",
    "--d-model 15": "--d-model must be a multiple of --num-heads 2, got 15",
    "--d-model 64 --num-heads 5": "--d-model must be a multiple of --num-heads 5, got 64",
    "--d-model 10": "--d-model / --num-heads must be even for RoPE, got 10 / 2",
    "--steps 0": "--steps must be at least 1",
    "--warmup 9": "--warmup must be from 0 to --steps 8, got 9",
    "--lr nan": "--lr must be positive and finite, got [nan]",
    "--lr 1e-3 1e-2": "--lr must be one rate without --compare norm, got [0.001, 0.01]",
    "--compare norm --lr 1e-3 3e-3 0.001": "--lr must have each rate once, got [0.001, 0.003, 0.001]",
    "--seed x": "--seed: must be an integer, got 'x'",
    "--seed 9223372036854775808": "--seed: must fit into 64 bits",
    "--tp 2": "--tp was removed: examples/parallel.py",
    "--dp 2": "--dp was removed: examples/parallel.py",
    "--keep 3": "--keep was removed: the last two checkpoints are kept",
    "--every 5": "--every and --resume require --checkpoint DIR: add it",
    "--seeds 2": "--seeds has no effect without --compare",
    "--report x.json": "--batch-size has no effect with --report",
    "--plot loss.gif": "--plot must end in",
    "--json missing/loss.json": "No such file",
    "--d-model 1000000000000": "sizes that torch can represent, got 1000000000000 and 12",
    "--resume": "--every and --resume require --checkpoint DIR: add it",
    "--resume --checkpoint missing": "there is no folder missing: remove --resume to begin",
    "--compare activations": "--batch-size has no effect with --compare activations",
    "--compare ffn --compile": "--compile has no effect with --compare",
    "--compare ffn --resume": "--resume has no effect with --compare",
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


def test_text_that_is_named_twice_is_rejected(text, capsys):
    expected = f"--data must name each file once, got {text} and {text}, which are the same file: remove a path"
    assert expected in rejected(capsys, "--data", text, text)
    assert expected in rejected(capsys, "--data", text.parent, text)


def test_text_that_has_two_paths_is_rejected(text, tmp_path, capsys):
    detour = text.parent / ".." / text.parent.name / text.name
    link = tmp_path / "link"
    link.symlink_to(text)
    for other in (detour, link):
        expected = f"got {text} and {other}, which are the same file"
        assert expected in rejected(capsys, "--data", text, other)


def test_checkpoint_of_another_run_is_rejected(saved, text, tmp_path, capsys):
    options = ["--data", text, "--checkpoint", saved]
    assert "add --resume" in rejected(capsys, *options)
    wider = rejected(capsys, *options, "--resume", "--d-model=32")
    assert "its --d-model is 16, but here it is 32" in wider
    other = tmp_path / "other.txt"
    other.write_text(text.read_text().upper())
    of_other = rejected(capsys, "--checkpoint", saved, "--resume", "--data", other)
    assert "its text is another one" in of_other


def change(path, name, value):
    """Write a checkpoint with another value, and with correct checksums."""
    contents = torch.load(path)
    contents[name] = value(contents[name])
    torch.save(contents, path)


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def one_step_less(history):
    return history[1:]


def no_loss(history):
    return [{**step, "loss": None} for step in history]


def half_of_a_weight(weights):
    return {**weights, "ln_final.weight": weights["ln_final.weight"][::2]}


def no_head(weights):
    return {key: weights[key] for key in weights if key != "lm_head.weight"}


def half_of_a_moment(optimizer):
    state = dict(optimizer["state"])
    state[0] = {**state[0], "exp_avg": state[0]["exp_avg"][::2]}
    return {**optimizer, "state": state}


def last_step_missing(history):
    return history[:-1]


def loss_of_400_digits(history):
    return [{**step, "loss": 10**400} for step in history]


def no_history(history):
    return []


def shape_of_a_step(optimizer):
    state = dict(optimizer["state"])
    state[0] = {**state[0], "step": torch.full((1,), 8.0)}
    return {**optimizer, "state": state}


def another_step(optimizer):
    state = dict(optimizer["state"])
    state[0] = {**state[0], "step": torch.tensor(7.0)}
    return {**optimizer, "state": state}


DAMAGE = {
    "half of the file": lambda path: os.truncate(path, path.stat().st_size // 2),
    "a flipped bit": flip_a_bit,
    "a list": lambda path: torch.save([], path),
    "a text": lambda path: path.write_text("text"),
    "a module": lambda path: torch.save(torch.nn.Linear(1, 1), path),
    "another schema": lambda path: change(path, "schema", lambda schema: "x"),
    "a missing step": lambda path: change(path, "history", one_step_less),
    "a missing loss": lambda path: change(path, "history", no_loss),
    "a weight's shape": lambda path: change(path, "model", half_of_a_weight),
    "a missing weight": lambda path: change(path, "model", no_head),
    "a moment's shape": lambda path: change(path, "optimizer", half_of_a_moment),
    "a missing last step": lambda path: change(path, "history", last_step_missing),
    "a loss of 400 digits": lambda path: change(path, "history", loss_of_400_digits),
    "no history": lambda path: change(path, "history", no_history),
    "a step's shape": lambda path: change(path, "optimizer", shape_of_a_step),
    "another step": lambda path: change(path, "optimizer", another_step),
    "no moments": lambda path: change(path, "optimizer", lambda optimizer: {}),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_checkpoint_is_one_line(damage, saved, text, capsys):
    DAMAGE[damage](saved / LAST)
    resume = ["--data", text, "--checkpoint", saved, "--resume", "--steps=12"]
    error = rejected(capsys, *resume)
    assert f"{saved / LAST}: the checkpoint is damaged (" in error
    assert error.endswith("): remove it to resume from the one before\n")


def test_optimizer_takes_its_hyperparameters_from_the_run(
    text, whole, tmp_path, monkeypatch
):
    folder = tmp_path / "saved"
    losses = tmp_path / "loss.json"
    with monkeypatch.context() as patch:
        at_step(3, lambda: signal.raise_signal(signal.SIGINT), patch)
        assert train(text, "--checkpoint", folder) == 130

    def with_other_hyperparameters(optimizer):
        for group in optimizer["param_groups"]:
            group["betas"] = "x"
            del group["eps"]
            del group["weight_decay"]
        return optimizer

    change(folder / "step-00000003.pt", "optimizer", with_other_hyperparameters)
    assert train(text, "--checkpoint", folder, "--resume", "--json", losses) == 0
    assert losses_in(losses) == whole[0]


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
    assert len(checkpoints.read(tmp_path / "step-00000003.pt").history) == 3


def test_several_processes_are_rejected(text, capsys, monkeypatch):
    for name, value in {
        "TORCHELASTIC_RUN_ID": "x",
        "WORLD_SIZE": "2",
        "RANK": "0",
    }.items():
        monkeypatch.setenv(name, value)
    assert "examples/parallel.py uses several" in rejected(capsys, "--data", text)
