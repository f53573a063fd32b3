"""train.py and ablations.py: runs equal their steps written out, and resume exactly."""

import math
import random
import zlib
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from pickle import PicklingError
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from language_model import LanguageModel
from torch import nn

ablations = pytest.importorskip("ablations", reason="requires the extra dev")
train = pytest.importorskip("train", reason="requires the extra dev")

CONFIG = train.Config(steps=61, batch=3, seq=8, d_model=16, layers=1, heads=2, seed=7)
SHORT = replace(CONFIG, steps=3)


@pytest.fixture
def text(tmp_path):
    """A file whose last 5% have other bytes than the rest."""
    path = tmp_path / "text"
    path.write_bytes(bytes(range(97, 116)) * 100 + random.Random(0).randbytes(100))
    return path


def written_out(data, config):
    """Return the model, the losses, and the validation loss of the recipe."""
    split = len(data) * 19 // 20
    text = torch.tensor(list(data[:split]))
    held_out = torch.tensor(list(data[split:]))
    torch.manual_seed(config.seed)
    model = LanguageModel(
        256, config.layers, config.d_model, config.heads, max_seq_len=config.seq
    )
    weights = list(model.parameters())
    decayed = [weight for weight in weights if weight.ndim == 2]
    gains = [weight for weight in weights if weight.ndim == 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": 0.1},
            {"params": gains, "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),  # of Llama, section 2.3 of arXiv 2302.13971
    )

    def loss_of(starts, of):
        rows = torch.stack([of[start : start + config.seq + 1] for start in starts])
        logits = model(rows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())

    history = []
    for step in range(config.steps):
        drawn = torch.Generator().manual_seed(config.seed * 10**9 + step)
        starts = torch.randint(split - config.seq, (config.batch,), generator=drawn)
        loss = loss_of(starts, text)
        history.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        if step < 50:
            rate = config.lr * (step + 1) / 50
        else:
            down = (1 + math.cos(math.pi * (step - 50) / (config.steps - 50))) / 2
            rate = config.lr * (0.1 + 0.9 * down)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    last = len(held_out) - config.seq - 1
    with torch.no_grad():
        validation = loss_of([last * index // 63 for index in range(64)], held_out)
    return model, history, validation.item()


def test_a_run_equals_its_steps_written_out(text, tmp_path, capsys):
    path = str(tmp_path / "run.pt")
    train.main([str(text), "--checkpoint", path], CONFIG)
    model, history, validation = written_out(text.read_bytes(), CONFIG)
    saved = train.read(path)
    assert saved["history"] == pytest.approx(history, rel=1e-4)
    assert saved["validation"] == {61: pytest.approx(validation, rel=1e-4)}
    trained = train.load(path)
    for found, expected in zip(trained.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-4)

    held_out = text.read_bytes()[-100:]
    bits = 8 * len(zlib.compress(held_out)) / len(held_out)
    first, second, sample = capsys.readouterr().out.split("\n", 2)
    assert first == f"1,900 bytes; zlib: {bits * math.log(2):.3f} nats per byte"
    assert second == f"step 61: {history[-1]:.3f}, validation {validation:.3f}"
    # The prompt, then as many bytes as the model has positions, and one.
    torch.manual_seed(CONFIG.seed)
    train.build(CONFIG)  # training itself draws from other generators
    drawn = trained.generate(torch.tensor([list(held_out[:3])]), 6, temperature=0.8)
    assert sample == bytes(drawn[0].tolist()).decode(errors="replace") + "\n"


def test_a_stopped_run_resumes_with_the_same_losses_over_the_same_text(text, tmp_path):
    """12 steps, because in the first 50 the learning rate does not depend on their number."""
    config = replace(CONFIG, steps=12, every=5)
    whole, part = str(tmp_path / "whole.pt"), str(tmp_path / "part.pt")
    train.main([str(text), "--checkpoint", whole], config)
    train.main([str(text), "--checkpoint", part, "--steps", "5"], config)
    resume = ["--checkpoint", part, "--resume", "--steps", "12"]
    data = text.read_bytes()
    for changed in (b"!" + data[1:], data[:-1] + b"!"):
        text.write_bytes(changed)
        with pytest.raises(ValueError, match="must have the text of its checkpoint"):
            train.main(resume)
    text.write_bytes(data)
    train.main(resume)
    resumed, expected = train.read(part), train.read(whole)
    assert resumed["validation"].keys() == {5, 10, 12}
    for name in ("files", "config", "history", "validation"):
        assert resumed[name] == expected[name]


def test_a_checkpoint_is_replaced_when_the_new_one_is_complete(tmp_path):
    path = str(tmp_path / "run.pt")
    train.save(path, {"history": [1.0]})
    with pytest.raises((AttributeError, PicklingError)):
        train.save(path, {"history": [1.0, 2.0], "model": lambda: None})
    assert train.read(path) == {"history": [1.0]}


def test_each_parameter_is_trained_and_only_matrices_decay():
    shapes = {(2, 2): 0.1, (2,): 0.0, (): 0.0}
    model = nn.ParameterList([torch.ones(shape) for shape in shapes])
    groups = train.adamw(model).param_groups
    assert shapes == {
        weight.shape: group["weight_decay"]
        for group in groups
        for weight in group["params"]
    }


def test_the_standard_library_is_in_one_order_and_has_no_installed_packages():
    files = train.standard_library()
    assert files == sorted(files, key=lambda file: Path(file).parts)
    assert any(file.endswith("/json/decoder.py") for file in files)
    assert not any("-packages" in file for file in files)


def test_a_text_may_have_any_number_of_bytes():
    """These take no memory. float32 cannot tell their last bytes apart."""
    for size in (2**24 + 3, 2**32 + 5, 10**11 + 1):
        text = torch.zeros(1, dtype=torch.uint8).expand(size)
        assert train.even_windows(text, 64, 8).shape == (64, 9)
        assert train.random_windows(text, CONFIG, 0).shape == (3, 9)


def test_the_default_sizes_run(capsys):
    train.main([__file__, "--steps", "1"])
    assert "step 1: " in capsys.readouterr().out


def test_resume_requires_a_checkpoint(capsys):
    with pytest.raises(SystemExit):
        train.main(["--resume"])
    assert "--resume requires --checkpoint FILE" in capsys.readouterr().err


def test_a_text_that_is_too_short_raises(text):
    """Its last 5% have 100 bytes, and a window needs a byte more than `seq`."""
    train.main([str(text)], replace(SHORT, seq=99))
    with pytest.raises(ValueError, match="more than 100 bytes, got 100"):
        train.main([str(text)], replace(SHORT, seq=100))


# --- Ablations ----------------------------------------------------------------------------

X = torch.linspace(-2, 2, 5 * 16, dtype=torch.float64).view(5, 16)


def test_ungated_feed_forward_layers_compute_their_formula():
    activations: dict[str, Any] = {"GELU": F.gelu, "SiLU": F.silu, "ReLU": F.relu}
    for name, activation in activations.items():
        model = ablations.VARIANTS["ffn"][name](CONFIG).double()
        ffn: Any = model.transformer.layers[0].ffn
        expected = activation(X @ ffn.w1.weight.T) @ ffn.w2.weight.T
        torch.testing.assert_close(ffn(X), expected, msg=name)


def test_post_norm_normalizes_each_sum():
    model: Any = ablations.VARIANTS["norm"]["post-norm"](CONFIG).double().transformer
    block = model.layers[0]
    norm = partial(F.rms_norm, normalized_shape=(16,), eps=1e-5)
    between = norm(X + block.attn(X))
    torch.testing.assert_close(model(X), norm(between + block.ffn(between)))


def test_in_one_block_only_rope_sees_the_order_of_earlier_tokens():
    for name, build in ablations.VARIANTS["positions"].items():
        model: Any = build(CONFIG).double().transformer
        exchanged = model(X[[1, 0, 2, 3, 4]])
        difference = (exchanged - model(X))[-1].norm()
        assert (difference < 1e-9) == (name == "no positions")


@pytest.mark.parametrize("group", ablations.VARIANTS)
def test_variants_of_a_group_have_equally_many_weights_in_matrices(group):
    counts = set()
    for build in ablations.VARIANTS[group].values():
        weights = build(CONFIG).parameters()
        counts.add(sum(weight.numel() for weight in weights if weight.ndim > 1))
    assert len(counts) == 1


@pytest.mark.parametrize("group", ablations.VARIANTS)
def test_an_ablation_prints_the_losses_of_runs_of_the_recipe(group, text, capsys):
    """Variants of a seed have its batches. Positions are validated to 4 times 8 bytes."""
    runs = ["--lrs", "0.1", "1e20", "--seeds", "3", "5"]
    sizes = ["--layers", "1", "--seq", "8"]
    defaults = replace(SHORT, layers=2, seq=4)
    ablations.main([group, str(text), *runs, *sizes], defaults)
    found = {}
    diverged = set()
    for line in capsys.readouterr().out.splitlines():
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        if name.startswith("lr 0.1,"):
            found[name] = [float(cell) for cell in cells]
        elif name.startswith("lr 1e+20,"):
            diverged |= set(cells)

    length = 32 if group == "positions" else 8
    trained, held_out = train.read_text([str(text)], length)
    windows = train.even_windows(held_out, 256, length)
    by_variant = []
    for seed, build in product((3, 5), ablations.VARIANTS[group].values()):
        torch.manual_seed(seed)
        config = replace(SHORT, lr=0.1, seed=seed)
        model = build(config)
        list(train.train(model, train.adamw(model), trained, config, first=0))
        by_variant.append(train.validate(model, windows))
    losses = torch.stack(by_variant).unflatten(0, (2, -1))  # seed, variant, position
    seed_3, seed_5 = losses[..., :8].mean(-1)
    expected = {"seed 3": seed_3, "seed 5": seed_5, "mean": (seed_3 + seed_5) / 2}
    if group == "positions":
        for end in range(4, 33, 4):
            expected[f"to byte {end}"] = losses[..., end - 4 : end].mean((0, 2))
    assert diverged == {"diverged"}
    assert found == {
        f"lr 0.1, {name}": pytest.approx(numbers.tolist(), abs=6e-4)
        for name, numbers in expected.items()
    }
