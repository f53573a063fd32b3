"""The training examples: the recipe, resumed runs, and variants that differ in one choice."""

import math
import zlib
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

ablations = pytest.importorskip("ablations", reason="requires the extra dev")
train = pytest.importorskip("train", reason="requires the extra dev")
matplotlib = pytest.importorskip("matplotlib.figure", reason="requires the extra dev")

ROOT = Path(__file__).parents[2]
CONFIG = train.Config(steps=30, batch=4, seq=32, d_model=32, layers=2, warmup=5)
TEXT = b"the quick brown fox jumps over the lazy dog. " * 200
TINY = ["--seq", "8", "--d-model", "8", "--heads", "1", "--layers", "1"]


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


# --- Text and batches ---------------------------------------------------------------------


def test_the_standard_library_has_no_installed_packages(tmp_path, monkeypatch):
    for name in ("site-packages", "dist-packages", "json"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tool.py").touch()
    for name in ("b.py", "a.py", "c.py"):
        (tmp_path / name).touch()
    monkeypatch.setattr(train.sysconfig, "get_path", lambda name: str(tmp_path))
    files = [str(Path(file).relative_to(tmp_path)) for file in train.standard_library()]
    assert files == ["a.py", "b.py", "c.py", "json/tool.py"]


def test_the_last_5_percent_are_held_out(tmp_path):
    (tmp_path / "one").write_bytes(b"a" * 150)
    (tmp_path / "two").write_bytes(b"b" * 40 + b"z" * 10)
    text, held_out = train.read_text([str(tmp_path / "one"), str(tmp_path / "two")])
    assert bytes(text.tolist()) == b"a" * 150 + b"b" * 40
    assert bytes(held_out.tolist()) == b"z" * 10


def test_a_run_trains_on_the_text_and_validates_on_what_is_held_out(
    tmp_path, monkeypatch
):
    path = tmp_path / "text"
    path.write_bytes(b"ab" * 950 + b"yz" * 50)
    seen: dict[bool, set[int]] = {True: set(), False: set()}
    losses = train.losses

    def watch(model, windows):
        seen[torch.is_grad_enabled()] |= set(windows.flatten().tolist())
        return losses(model, windows)

    monkeypatch.setattr(train, "losses", watch)
    train.main([str(path), *TINY, "--steps", "9", "--batch", "8"])
    assert bytes(sorted(seen[True])) == b"ab"
    assert bytes(sorted(seen[False])) == b"yz"


def test_a_batch_consists_of_sequences_of_the_text_and_one_more_byte():
    text = torch.arange(40, dtype=torch.uint8)
    starts = set()
    for step in range(200):
        windows = train.random_windows(text, replace(CONFIG, batch=3, seq=36), step)
        assert windows.shape == (3, 37)
        assert torch.equal(windows - windows[:, :1], torch.arange(37).expand(3, -1))
        starts.update(windows[:, 0].tolist())
    assert starts == {0, 1, 2, 3}


def test_validation_covers_the_text_from_its_start_to_its_end():
    windows = train.even_windows(torch.arange(41, dtype=torch.uint8), 5, 8)
    assert windows[:, 0].tolist() == [0, 8, 16, 24, 32]
    assert windows[:, -1].tolist() == [8, 16, 24, 32, 40]


def test_each_seed_and_step_has_its_own_batch():
    text = torch.frombuffer(bytearray(TEXT), dtype=torch.uint8)
    batches = [
        train.random_windows(text, replace(CONFIG, seed=seed), step)
        for seed, step in [(0, 0), (0, 0), (0, 1), (1, 0)]
    ]
    assert torch.equal(batches[0], batches[1])
    for one, other in combinations(batches[1:], 2):
        assert not torch.equal(one, other)


def test_a_text_that_is_too_short_raises(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"a" * 400)  # 20 are held out
    with pytest.raises(ValueError, match="more than --seq 20 bytes, got 20"):
        train.main([str(path), "--seq", "20"])


def test_zlib_cannot_compress_random_bytes():
    text = torch.randint(256, (100_000,), dtype=torch.uint8)
    assert train.zlib_loss(text) == pytest.approx(math.log(256), rel=1e-2)
    assert train.zlib_loss(torch.zeros(100_000, dtype=torch.uint8)) < 0.01


# --- The recipe ---------------------------------------------------------------------------


class Successor(nn.Module):
    """Predict that each byte is followed by the next number."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1000.0))

    def forward(self, tokens):
        return self.scale * F.one_hot((tokens + 1) % 256, 256).float()


def test_the_target_of_a_byte_is_the_next_one():
    windows = torch.arange(20).view(2, 10)
    assert train.losses(Successor(), windows).tolist() == [[0.0] * 9] * 2
    assert train.losses(Successor(), windows.flip(-1)).min() == 1000


def test_validation_is_the_mean_loss_of_each_position():
    """Of 12 windows, 3 have a wrong byte at position 2, which also misleads the next."""
    windows = torch.arange(5).repeat(12, 1)
    windows[:3, 2] = 100
    found = train.validate(Successor(), windows)
    assert found.tolist() == [0.0, 250.0, 250.0, 0.0]


class Sloped(nn.Module):
    """Return weights times a slope as logits. So the gradient grows with the slope."""

    def __init__(self, slope):
        super().__init__()
        self.slope = slope
        self.weight = nn.Parameter(torch.zeros(256))

    def forward(self, tokens):
        return (self.slope * self.weight).expand(*tokens.shape, -1)


def test_gradients_are_clipped_to_norm_1():
    model = Sloped(1000.0)
    config = replace(CONFIG, steps=1, warmup=0, lr=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=9.0)
    text = torch.frombuffer(bytearray(TEXT), dtype=torch.uint8)
    list(train.train(model, optimizer, text, config))
    assert model.weight.norm().item() == pytest.approx(0.5, rel=1e-4)


def test_gradients_of_earlier_steps_are_forgotten():
    """With a rate of 0, all steps have equal gradients, which are too small to clip."""
    model = Sloped(0.25)
    config = replace(CONFIG, steps=2, warmup=0, lr=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=9.0)
    gradients = []
    text = torch.zeros(100, dtype=torch.uint8)
    for _ in train.train(model, optimizer, text, config):
        gradients.append(model.weight.grad.clone())
    torch.testing.assert_close(gradients[0], gradients[1])


def test_adamw_has_the_betas_of_llama():
    """Section 2.3 of arXiv 2302.13971."""
    for group in train.adamw(ablations.build(CONFIG)).param_groups:
        assert group["betas"] == (0.9, 0.95)


def test_matrices_decay_and_gains_do_not():
    model = ablations.build(CONFIG)
    decay, keep = train.adamw(model).param_groups
    assert (decay["weight_decay"], keep["weight_decay"]) == (0.1, 0.0)
    names = {id(weight): name for name, weight in model.named_parameters()}
    gains = {name for name in names.values() if "ln" in name}
    assert {names[id(weight)] for weight in keep["params"]} == gains
    matrices = set(names.values()) - gains
    assert {names[id(weight)] for weight in decay["params"]} == matrices


def test_loss_falls_from_that_of_a_guess():
    model = ablations.build(CONFIG)
    text = torch.frombuffer(bytearray(TEXT), dtype=torch.uint8)
    losses = list(train.train(model, train.adamw(model), text, CONFIG))
    assert losses[0] == pytest.approx(math.log(256), abs=0.7)
    assert losses[-1] < 0.6 * losses[0]


def test_learning_rate_rises_to_its_peak_and_falls_to_a_tenth_as_a_cosine():
    rates = [train.learning_rate(CONFIG, step) for step in range(CONFIG.steps + 1)]
    assert rates[:5] == pytest.approx([CONFIG.lr * part / 5 for part in range(1, 6)])
    assert rates[4] == max(rates) == CONFIG.lr
    fifth = 0.1 + 0.9 * math.cos(math.pi / 10) ** 2  # of the way down
    assert rates[10] == pytest.approx(CONFIG.lr * fifth)
    assert rates[-1] == pytest.approx(CONFIG.lr / 10)


# --- The command --------------------------------------------------------------------------

OTHER_OPTIONS = {
    "steps": "2",
    "batch": "3",
    "seq": "10",
    "d_model": "24",
    "layers": "1",
    "heads": "2",
    "lr": "0.25",
    "warmup": "4",
    "seed": "7",
}


def test_each_option_reaches_what_it_sets(tmp_path, monkeypatch):
    sizes = []
    batches = train.random_windows

    def watch(text, config, step):
        batch = batches(text, config, step)
        sizes.append(tuple(batch.shape))
        assert config.seed == 7
        return batch

    monkeypatch.setattr(train, "random_windows", watch)
    path = str(tmp_path / "run.pt")
    options = [
        f"--{name.replace('_', '-')}={value}" for name, value in OTHER_OPTIONS.items()
    ]
    train.main([__file__, *options, "--checkpoint", path])
    assert sizes == [(3, 11), (3, 11)]
    saved = train.read(path)
    groups = saved["optimizer"]["param_groups"]
    assert [group["lr"] for group in groups] == [0.25 * 2 / 4] * 2
    model = train.load(path)
    assert model.transformer.d_model == 24
    assert model.transformer.max_seq_len == 10
    assert [block.attn.num_heads for block in model.transformer.layers] == [2]
    for name, value in OTHER_OPTIONS.items():
        assert str(saved["config"][name]) == value


def test_the_seed_draws_the_weights(tmp_path):
    first = []
    for seed in ("0", "0", "1"):
        path = str(tmp_path / "run.pt")
        train.main([__file__, *TINY, "--steps=1", "--seed", seed, "--checkpoint", path])
        first.append(train.load(path).token_embeddings.weight)
    assert torch.equal(first[0], first[1])
    assert not torch.allclose(first[0], first[2], atol=0.1)


def test_the_smallest_sequences_are_enough(capsys):
    train.main([__file__, *TINY, "--seq", "1", "--steps", "1"])
    assert "step 1: " in capsys.readouterr().out


@pytest.mark.parametrize("example", [train, ablations], ids=["train", "ablations"])
def test_help_shows_the_docstring(example, capsys):
    with pytest.raises(SystemExit):
        example.main(["--help"])
    assert example.__doc__ in capsys.readouterr().out


class Anything:
    """What a checkpoint may not contain, because to read it could run any code."""


def test_a_checkpoint_with_objects_is_not_read(tmp_path):
    torch.save({"config": Anything()}, tmp_path / "run.pt")
    with pytest.raises(UnpicklingError, match="Anything"):
        train.read(str(tmp_path / "run.pt"))


@pytest.mark.parametrize(
    "option", ["--steps", "--batch", "--seq", "--d-model", "--layers", "--heads"]
)
def test_a_size_of_0_is_an_error(option, capsys):
    with pytest.raises(SystemExit):
        train.main([__file__, option, "0"])
    assert f"argument {option}: must be at least 1, got 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--resume", "--resume requires --checkpoint FILE"),
        ("--d-model 10 --heads 4", "even multiple of --heads, got 10 and 4"),
        ("--d-model 12 --heads 4", "even multiple of --heads, got 12 and 4"),
    ],
    ids=["no checkpoint", "a fraction per head", "an odd number per head"],
)
def test_options_that_do_not_fit_are_an_error(options, message, capsys):
    with pytest.raises(SystemExit):
        train.main([__file__, *options.split()])
    assert message in capsys.readouterr().err


def test_a_resumed_run_takes_new_options_and_keeps_the_others(tmp_path):
    path = str(tmp_path / "run.pt")
    sizes = [*TINY, "--seed", "7", "--lr", "0.5"]
    train.main([__file__, *sizes, "--steps", "1", "--checkpoint", path])
    train.main(["--checkpoint", path, "--resume", "--steps", "3", "--lr", "0.25"])
    saved = train.read(path)
    assert len(saved["history"]) == 3
    config = saved["config"]
    assert (config["steps"], config["lr"], config["seed"]) == (3, 0.25, 7)
    assert config["files"] == [__file__]


def test_the_progress_of_a_resumed_run_begins_where_it_stopped(tmp_path, monkeypatch):
    bars = Mock(wraps=train.tqdm)
    monkeypatch.setattr(train, "tqdm", bars)
    path = str(tmp_path / "run.pt")
    train.main([__file__, *TINY, "--steps", "2", "--checkpoint", path])
    train.main(["--checkpoint", path, "--resume", "--steps", "3"])
    options = [call.kwargs for call in bars.call_args_list]
    assert [(each["initial"], each["total"]) for each in options] == [(0, 2), (2, 3)]


def test_a_run_validates_and_saves_every_100_steps_and_at_its_end(
    tmp_path, monkeypatch
):
    saved = []
    monkeypatch.setattr(train, "train", lambda *_: iter([1.0] * 250))
    monkeypatch.setattr(
        train, "save", lambda path, state: saved.append(list(state["validation"]))
    )
    train.main([__file__, *TINY, "--steps", "250", "--checkpoint", "run.pt"])
    assert saved == [[100], [100, 200], [100, 200, 250]]


def test_a_run_prints_what_it_trains_on_and_both_losses(tmp_path, capsys):
    path = tmp_path / "text"
    held_out = b"yz" * 50
    path.write_bytes(b"ab" * 950 + held_out)
    saved = str(tmp_path / "run.pt")
    train.main([str(path), *TINY, "--steps", "9", "--checkpoint", saved])
    bits = 8 * len(zlib.compress(held_out, level=9)) / len(held_out)
    losses = train.read(saved)
    loss, validation = losses["history"][8], losses["validation"][9]
    assert capsys.readouterr().out.splitlines()[:2] == [
        f"1,900 bytes; zlib: {bits * math.log(2):.3f} nats per byte",
        f"step 9: {loss:.3f}, validation {validation:.3f}",
    ]


def test_a_run_ends_with_a_drawn_sample_after_held_out_text(tmp_path, monkeypatch):
    calls = []

    def generate(model, prompt, count, temperature):
        calls.append((bytes(prompt[0].tolist()), count, temperature))
        return prompt

    path = tmp_path / "text"
    path.write_bytes(b"ab" * 950 + b"yz" * 50)
    monkeypatch.setattr(train.LanguageModel, "generate", generate)
    train.main([str(path), *TINY, "--steps", "1"])
    assert calls == [(b"yz", 7, 0.8)]  # 8 positions; the last byte needs none


@pytest.fixture
def figures(monkeypatch):
    """The figures that are saved, by path."""
    saved = {}
    monkeypatch.setattr(
        matplotlib.Figure, "savefig", lambda self, path, **_: saved.update({path: self})
    )
    return saved


def curves(axes):
    """Return x and y of each line, by its label."""
    return {line.get_label(): line.get_data() for line in axes.get_lines()}


def test_the_plot_has_losses_by_step_and_what_zlib_reaches(figures):
    train.plot("loss.png", [5.0, 4.0, 3.0], {2: 4.5, 3: 3.5}, 1.25)
    [axes] = figures["loss.png"].axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "nats per byte")
    lines = {name: [list(x), list(y)] for name, (x, y) in curves(axes).items()}
    assert lines["training"] == [[1, 2, 3], [5.0, 4.0, 3.0]]
    assert lines["validation"] == [[2, 3], [4.5, 3.5]]
    assert lines["zlib, validation"][1] == [1.25, 1.25]
    assert [text.get_text() for text in axes.get_legend().texts] == list(lines)


# --- Ablations ----------------------------------------------------------------------------


every_group = pytest.mark.parametrize(
    "variants", ablations.VARIANTS.values(), ids=ablations.VARIANTS
)


@every_group
def test_variants_have_equally_many_weights_in_matrices(variants):
    counts = set()
    for build in variants.values():
        weights = build(CONFIG).parameters()
        counts.add(sum(weight.numel() for weight in weights if weight.ndim > 1))
    assert len(counts) == 1


@every_group
def test_no_variant_equals_another(variants):
    tokens = torch.randint(256, (2, 9))
    logits = {}
    for name, build in variants.items():
        torch.manual_seed(0)
        logits[name] = build(CONFIG)(tokens)
    for one, other in combinations(logits, 2):
        assert not torch.allclose(logits[one], logits[other], atol=1e-3), (one, other)


def build_variant(group, name):
    """Return the block of a variant with one layer, and the Transformer around it."""
    config = replace(CONFIG, layers=1)
    model = ablations.VARIANTS[group][name](config).double()
    block: Any = model.transformer.layers[0]
    return block, model.transformer


@pytest.mark.parametrize(
    ("name", "activation"),
    [("GELU", F.gelu), ("SiLU", F.silu), ("ReLU", F.relu)],
    ids=["GELU", "SiLU", "ReLU"],
)
def test_an_ungated_variant_has_its_activation(name, activation):
    block, _ = build_variant("ffn", name)
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    expected = block.ffn.w2(activation(block.ffn.w1(x)))
    torch.testing.assert_close(block.ffn(x), expected)


def test_swiglu_has_a_gate():
    block, _ = build_variant("ffn", "SwiGLU")
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    expected = block.ffn.w2(F.silu(block.ffn.w1(x)) * block.ffn.w3(x))
    torch.testing.assert_close(block.ffn(x), expected)


def test_pre_norm_normalizes_what_each_branch_reads():
    block, model = build_variant("norm", "pre-norm")
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    z = x + block.attn(F.rms_norm(x, (32,), eps=1e-5))
    z = z + block.ffn(F.rms_norm(z, (32,), eps=1e-5))
    torch.testing.assert_close(model(x), F.rms_norm(z, (32,), eps=1e-5))


def test_post_norm_normalizes_each_sum():
    block, model = build_variant("norm", "post-norm")
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    z = F.rms_norm(x + block.attn(x), (32,), eps=1e-5)
    expected = F.rms_norm(z + block.ffn(z), (32,), eps=1e-5)
    torch.testing.assert_close(model(x), expected)


def last_results_in_two_orders(name):
    """Return the result of the last of five bytes, and after a swap of the others."""
    _, model = build_variant("positions", name)
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    swapped = x[:, [1, 0, 3, 2, 4]]
    return model(x)[:, -1], model(swapped)[:, -1]


def test_rope_tells_the_order_of_earlier_bytes():
    one, other = last_results_in_two_orders("RoPE")
    assert (one - other).norm() > 1e-3 * one.norm()


def test_without_positions_the_order_of_earlier_bytes_changes_nothing():
    torch.testing.assert_close(*last_results_in_two_orders("no positions"))


@pytest.mark.parametrize("diverged", [21.0, math.nan], ids=str)
def test_a_run_stops_where_it_diverges(diverged, monkeypatch):
    losses = [5.0, 19.0, diverged, 4.0]
    monkeypatch.setattr(ablations, "train", lambda *_: iter(losses))
    model = ablations.build(CONFIG)
    windows = torch.zeros(2, 9, dtype=torch.long)
    config = replace(CONFIG, steps=4)
    curve, losses = ablations.run(model, config, torch.zeros(9), windows)
    assert curve[:2].tolist() == [5.0, 19.0]
    assert curve[2:].isnan().all()
    assert losses.isnan().all()
    assert losses.shape == (8,)


def test_parts_are_means_up_to_their_ends():
    ends, means = ablations.parts(torch.arange(12.0).view(1, 12), 3)
    assert ends.tolist() == [4, 8, 12]
    assert means.tolist() == [[1.5, 5.5, 9.5]]
    ends, means = ablations.parts(torch.arange(3.0).view(1, 3), 50)
    assert (ends.tolist(), means.tolist()) == ([1, 2, 3], [[0.0, 1.0, 2.0]])


def test_a_table_has_a_cell_per_variant():
    rows = [("seed 0", torch.tensor([1.25, torch.nan])), ("mean", torch.tensor([2, 3]))]
    assert ablations.table(["banana", "other"], rows).splitlines() == [
        "|  | banana | other |",
        "| --- | --- | --- |",
        "| seed 0 | 1.250 | diverged |",
        "| mean | 2.000 | 3.000 |",
    ]


def test_the_left_plot_is_the_training_at_the_middle_rate(figures):
    """Of 3 rates, 2 seeds, 1 variant and 4 steps. Each loss tells where it is from."""
    steps = torch.tensor([0.4, 0.3, 0.2, 0.1])
    rates = torch.tensor([2.0, 3.0, 4.0]).view(3, 1, 1, 1)
    seeds = torch.tensor([0.0, 0.02]).view(1, 2, 1, 1)
    losses = torch.full((3, 2, 1, 8), 0.5) + rates + seeds
    ablations.plot("p", ["RoPE"], [1e-3, 1e-2, 1e-1], rates + seeds + steps, losses)
    left, right = figures["p"].axes
    assert left.get_title() == "training, peak learning rate 0.01"
    assert (left.get_xlabel(), left.get_ylabel()) == ("step", "nats per byte")
    assert (right.get_xlabel(), right.get_xscale()) == ("peak learning rate", "log")
    x, y = curves(left)["RoPE"]
    assert list(x) == [1, 2, 3, 4]
    assert list(y) == pytest.approx([3.41, 3.31, 3.21, 3.11])
    [band] = left.collections  # from the lowest seed to the highest
    extent = band.get_paths()[0].get_extents()
    assert (extent.y0, extent.y1) == pytest.approx((3.1, 3.42))
    assert [text.get_text() for text in left.get_legend().texts] == ["RoPE"]
    x, y = curves(right)["RoPE"]
    assert list(x) == [1e-3, 1e-2, 1e-1]
    assert list(y) == pytest.approx([2.51, 3.51, 4.51])
    assert right.get_ylim() == left.get_ylim()
    low, high = left.get_ylim()
    assert low < 3.1
    assert high > 4.51


def test_each_variant_is_drawn_with_its_own_losses(figures):
    of_variants = torch.tensor([2.0, 3.0]).view(1, 1, 2, 1)
    losses = of_variants.expand(2, 1, 2, 4)
    ablations.plot("p", ["RoPE", "no positions"], [1e-3, 1e-2], losses, losses)
    for axes in figures["p"].axes:
        lines = curves(axes)
        assert set(lines["RoPE"][1]) == {2.0}
        assert set(lines["no positions"][1]) == {3.0}


def test_with_one_rate_the_right_plot_is_by_position(figures):
    losses = torch.arange(128.0).view(1, 1, 1, 128) / 100 + 2
    ablations.plot("p", ["RoPE"], [1e-2], torch.ones(1, 1, 1, 4), losses)
    _, right = figures["p"].axes
    assert (right.get_title(), right.get_xlabel()) == (
        "validation",
        "position of the byte",
    )
    x, y = curves(right)["RoPE"]
    assert list(x) == list(range(2, 129, 2))
    assert list(y)[:2] == pytest.approx([2.005, 2.025])


def test_the_defaults_are_the_settings_that_the_page_describes():
    page = " ".join((ROOT / "docs" / "ablations.md").read_text().split())
    options = ablations.parse(["ffn"])
    for sentence in (
        f"All models have d_model {options.d_model} and {options.heads} heads.",
        f"AdamW trains each for {options.steps} steps of {options.batch} sequences.",
        f"The first {options.warmup} steps are warm-up.",
        f"The models have {options.layers} layers, and train on {options.seq} bytes.",
        f"Each variant runs with {options.seeds} seeds.",
    ):
        assert sentence in page
    assert "The peak learning rate is 5e-3 unless a table names another." in page
    assert options.lrs == [5e-3]


@pytest.fixture
def small(monkeypatch):
    """Options of an ablation that takes a second, on a small text."""
    monkeypatch.setattr(ablations, "standard_library", lambda: [__file__])
    return ["--steps", "6", "--seq", "8", "--d-model", "12"]


def test_ablation_prints_a_row_per_rate_and_seed(small, tmp_path, capsys):
    picture = str(tmp_path / "norm.png")
    options = ["--lrs", "1e-3", "1e30", "--warmup", "0", "--seeds", "2", "--seed", "5"]
    ablations.main(["norm", *small, *options, "--plot", picture])
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split("|")[1].strip() for row in rows] == [
        "lr 0.001, seed 5",
        "lr 0.001, seed 6",
        "lr 0.001, mean",
        "lr 1e+30, seed 5",
        "lr 1e+30, seed 6",
        "lr 1e+30, mean",
    ]
    assert [row.count("diverged") for row in rows] == [0, 0, 0, 2, 2, 2]
    assert (tmp_path / "norm.png").exists()


@pytest.mark.parametrize("group", ablations.VARIANTS)
def test_only_positions_are_validated_beyond_the_length_of_training(
    group, small, monkeypatch
):
    lengths = set()

    def run(model, config, text, windows):
        length = windows.shape[1] - 1
        lengths.add(length)
        return torch.ones(config.steps), torch.ones(length)

    monkeypatch.setattr(ablations, "run", run)
    ablations.main([group, *small, "--seeds", "1"])
    assert lengths == {4 * 8 if group == "positions" else 8}


def test_variants_of_one_seed_have_the_same_text_and_initial_weights(
    small, monkeypatch, capsys
):
    """The losses that are printed are those of the variant, the rate and the seed."""
    calls = []

    def run(model, config, text, windows):
        calls.append((config.lr, config.seed, text, windows, model))
        loss = len(calls) + torch.zeros(windows.shape[1] - 1)
        loss[8:] += 100  # beyond the training length, not in the first table
        return torch.ones(config.steps), loss

    monkeypatch.setattr(ablations, "run", run)
    ablations.main(["positions", *small, "--lrs", "0.5", "--seeds", "2"])
    text, held_out = train.read_text([__file__])
    assert [call[:2] for call in calls] == [(0.5, 0), (0.5, 0), (0.5, 1), (0.5, 1)]
    for _, _, trained, windows, _ in calls:
        assert torch.equal(trained, text)
        assert torch.equal(windows, train.even_windows(held_out, 256, 32))
    assert [call[-1].transformer.rope is None for call in calls] == [False, True] * 2
    first = [call[-1].token_embeddings.weight for call in calls]
    assert first[0].equal(first[1])  # of one seed
    assert not first[0].equal(first[2])
    out = capsys.readouterr().out
    for row in (
        "| lr 0.5, seed 0 | 1.000 | 2.000 |",
        "| lr 0.5, seed 1 | 3.000 | 4.000 |",
        "| lr 0.5, mean | 2.000 | 3.000 |",
        "| to byte 8 | 2.000 | 3.000 |",
        "| to byte 32 | 102.000 | 103.000 |",
    ):
        assert row in out
