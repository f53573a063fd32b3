"""The parts of train_lm.py: text and its order-2 model, batches, and the models that are compared."""

import hashlib
import json
import os
from collections import Counter
from itertools import product
from statistics import mean
from typing import Any

import pytest
import torch
from training import cli, compare
from training.text import (
    batch,
    even_windows,
    files_in,
    order_two_loss,
    read_text,
    standard_library,
)
from training.trainer import Settings, Trainer

from tinyblock import RMSNorm

SETTINGS = Settings(1, 4, 8, 16, 32, 2, 2, 0, 1e-3, 0)


TEXTS = {
    f"step-{number:02}": bytes((number * k * k) % 7 for k in range(number))
    for number in range(39)
}
TEXTS[os.fsdecode(b"\xff")] = bytes(k % 5 for k in range(39))


@pytest.fixture
def text(tmp_path):
    """Read a folder that also has a hidden file, a checkpoint, an output and a pipe."""
    for name, content in (
        TEXTS | dict.fromkeys((".hidden", "step-00000008.pt", "loss.json"), b"left out")
    ).items():
        (tmp_path / name).write_bytes(content)
    os.mkfifo(tmp_path / "pipe")
    return read_text(
        files_in([tmp_path], outputs=[tmp_path / "loss.json", tmp_path / "missing"])
    )


def test_text_is_the_files_in_their_order_and_validation_the_last_twentieth_of_the_bytes(
    text,
):
    data = b"".join(TEXTS.values())
    assert text.files == 40
    assert text.sha256 == hashlib.sha256(data).hexdigest()
    assert bytes(text.training.tolist()) == data[:741]  # 780 bytes
    assert bytes(text.validation.tolist()) == data[741:]
    assert even_windows(text.training, 2, 20).tolist() == [
        list(data[:20]),
        list(data[721:741]),
    ]


def test_standard_library_is_source_without_installed_packages():
    files = standard_library()
    assert files == sorted(files)
    assert any(path.parts[-2:] == ("json", "decoder.py") for path in files)
    assert not any("site-packages" in path.parts for path in files)


def test_batch_depends_on_seed_and_step_alone(text):
    first = batch(text.training, 0, 5, 4, 9)
    assert first.shape == (4, 10)
    assert torch.equal(batch(text.training, 0, 5, 4, 9), first)
    assert not torch.equal(batch(text.training, 0, 6, 4, 9), first)
    assert not torch.equal(batch(text.training, 1, 5, 4, 9), first)


def test_order_two_loss_is_that_of_smoothed_counts(text):
    data = text.training.tolist()
    triples = Counter(zip(data, data[1:], data[2:], strict=False))
    windows, expected = even_windows(text.validation, 3, 12), []
    of = {n: Counter(key[3 - n :] for key in triples.elements()) for n in (1, 2)}
    for a, b, c in (row[at : at + 3] for row in windows.tolist() for at in range(10)):
        p = (of[1][c,] + 1) / (triples.total() + 256)
        p = (of[2][b, c] + 4 * p) / (sum(of[2][b, x] for x in range(256)) + 4)
        expected.append(
            (triples[a, b, c] + 4 * p) / (sum(triples[a, b, x] for x in range(256)) + 4)
        )
    assert order_two_loss(text.training, windows) == pytest.approx(
        -torch.tensor(expected).log().mean().item(), rel=1e-5
    )


def test_validate_is_the_mean_loss_at_each_position():
    model, windows = SETTINGS.build(), torch.randint(256, (8, 9))
    picked = model(windows[:, :-1]).log_softmax(-1).gather(-1, windows[:, 1:, None])
    losses = Trainer(model, windows, SETTINGS).validate(windows)
    torch.testing.assert_close(losses, -picked.detach().mean((0, 2)))


@pytest.mark.parametrize("kind", compare.VARIANTS)
def test_variants_have_as_many_parameters_and_differ(kind):
    tokens, counts, outputs = torch.randint(256, (2, 8)), [], []
    for build in compare.VARIANTS[kind].values():
        torch.manual_seed(0)
        model = build(SETTINGS)
        counts.append(sum(p.numel() for p in model.parameters() if p.ndim > 1))
        outputs.append(model(tokens))
    assert len(set(counts)) == 1
    assert all(
        not torch.allclose(one, other)
        for i, one in enumerate(outputs)
        for other in outputs[:i]
    )


def test_post_norm_is_the_equation():
    torch.manual_seed(0)
    before: Any = compare.VARIANTS["norm"]["pre-norm"](SETTINGS)
    torch.manual_seed(0)
    after = compare.VARIANTS["norm"]["post-norm"](SETTINGS)
    norm, tokens = RMSNorm(32), torch.randint(256, (2, 8))
    x = before.token_embeddings(tokens)
    for block in before.transformer.layers:
        z = norm(x + block.attn(x))
        x = norm(z + block.ffn(z))
    torch.testing.assert_close(after(tokens), before.lm_head(x))


def test_comparison_writes_runs_of_every_seed_and_a_picture(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(compare, "VALIDATION_BATCHES", 2)
    text, results = tmp_path / "text", tmp_path / "of.json"
    text.write_bytes(bytes(range(256)) * 9)
    argv = [
        "--steps=3",
        "--batch-size=2",
        "--seq-len=8",
        "--d-model=24",
        "--num-layers=1",
        "--num-heads=1",
    ]
    argv += ["--seeds=2", f"--data={text}", f"--json={results}"]
    for kind, rates in (("positions", ["0.01"]), ("norm", ["0.01", "1e30"])):
        picture = tmp_path / f"{kind}.png"
        assert (
            cli.main([*argv, "--compare", kind, f"--plot={picture}", "--lr", *rates])
            == 0
        )
        assert picture.read_bytes().startswith(b"\x89PNG")
        runs, (first, other, *_) = (
            json.loads(results.read_text())["runs"],
            compare.VARIANTS[kind],
        )
        expected = product((0, 1), map(float, rates), compare.VARIANTS[kind])
        assert [(run["seed"], run["lr"], run["variant"]) for run in runs] == list(
            expected
        )
        assert all((run["diverged"] is None) == (run["lr"] < 1) for run in runs)
        assert all(len(run["by_position"]) == 32 for run in runs if kind == "positions")
        losses = {
            (run["variant"], run["seed"]): run["validation"]
            for run in runs
            if run["lr"] < 1
        }
        differences = [losses[other, seed] - losses[first, seed] for seed in (0, 1)]
        printed = f"{mean(differences):.4f} | {min(differences):.4f} to {max(differences):.4f} |"
        rows = [" ".join(row.split()) for row in capsys.readouterr().out.splitlines()]
        assert [
            row.endswith(printed)
            for row in rows
            if row.startswith(f"| {other} | 0.01 |")
        ] == [True]
        assert all("| 0 of 2 | diverged |" in row for row in rows if "| 1e+30 |" in row)
    assert (
        cli.main(
            [
                *argv,
                "--compare=ffn",
                "--seeds=1",
                f"--plot={tmp_path / 'ffn.png'}",
                "--lr=1e30",
            ]
        )
        == 0
    )
    assert not (tmp_path / "ffn.png").exists()  # all diverged
    assert (
        cli.main(["--compare=activations", f"--plot={tmp_path / 'activations.png'}"])
        == 0
    )
    assert (tmp_path / "activations.png").read_bytes().startswith(b"\x89PNG")
