"""The training examples: resumed runs, and variants that differ in one choice."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import ablations
import pytest
import torch
import train

CONFIG = train.Config(steps=30, batch=4, seq=32, d_model=32, layers=2, warmup=5)
TEXT = b"the quick brown fox jumps over the lazy dog. " * 200


def test_interrupted_run_resumes_with_the_same_losses(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "EVERY", 10)
    sizes = ["--d-model", "16", "--seq", "16", "--layers", "1", "--batch", "2"]
    options = [__file__, *sizes, "--steps", "25"]
    train.main([*options, "--checkpoint", "whole.pt"])
    sample = capsys.readouterr().out.splitlines()[-1]

    def save(state, path):
        if len(state["history"]) < 20:
            return original(state, path)
        Path(path).write_bytes(b"half of a checkpoint")
        raise KeyboardInterrupt

    original = torch.save
    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(KeyboardInterrupt):
        train.main([*options, "--checkpoint", "part.pt"])
    monkeypatch.setattr(torch, "save", original)
    train.main(["--checkpoint", "part.pt", "--resume", "--plot", "loss.png"])

    whole = torch.load("whole.pt")
    resumed = torch.load("part.pt")
    assert whole.keys() == {"config", "history", "validation", "model", "optimizer"}
    assert resumed["history"] == whole["history"]
    assert resumed["validation"] == whole["validation"]
    assert resumed["validation"].keys() == {10, 20, 25}
    assert (tmp_path / "loss.png").exists()
    assert capsys.readouterr().out.splitlines()[-1] == sample


def test_loss_falls_from_that_of_a_guess():
    model = ablations.build(CONFIG)
    text = torch.frombuffer(bytearray(TEXT), dtype=torch.uint8)
    losses = list(train.train(model, train.adamw(model), text, CONFIG))
    assert losses[0] == pytest.approx(math.log(256), abs=0.7)
    assert losses[-1] < 0.6 * losses[0]


def test_learning_rate_rises_to_its_peak_and_falls_to_a_tenth():
    rates = [train.learning_rate(CONFIG, step) for step in range(CONFIG.steps + 1)]
    assert rates[4] == max(rates) == CONFIG.lr
    assert rates[-1] == pytest.approx(CONFIG.lr / 10)


@pytest.mark.parametrize("variants", ablations.VARIANTS.values())
def test_variants_differ_in_gains_of_norms_at_most(variants):
    counts = set()
    for build in variants.values():
        weights = build(CONFIG).parameters()
        counts.add(sum(weight.numel() for weight in weights if weight.ndim > 1))
    assert len(counts) == 1


def test_post_norm_normalizes_each_sum():
    model = ablations.post_norm(replace(CONFIG, layers=1)).double()
    block: Any = model.transformer.layers[0]
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    z = block.ln1(x + block.attn(x))
    expected = block.ln2(z + block.ffn(z))
    torch.testing.assert_close(model.transformer(x), expected)


def test_ablation_prints_a_row_per_rate_and_seed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ablations, "standard_library", lambda: [__file__])
    options = ["--steps", "6", "--seq", "8", "--d-model", "12", "--seeds", "2"]
    picture = str(tmp_path / "norm.png")
    ablations.main(
        ["norm", *options, "--lrs", "1e-3", "1e30", "--warmup", "0", "--plot", picture]
    )
    rows = capsys.readouterr().out.splitlines()[2:]
    assert len(rows) == 2 * 3
    assert [row.count("diverged") for row in rows] == [0, 0, 0, 3, 3, 3]
    assert (tmp_path / "norm.png").exists()
    ablations.main(["positions", *options])
    assert "| to byte 32 |" in capsys.readouterr().out
