"""The parts of train_lm.py: text and its trigram model, batches, and the models that are compared."""

import hashlib
import json
import math
import os
import re
from collections import Counter
from functools import partial
from itertools import combinations, product
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from training import cli, comparison
from training.text import (
    batch,
    even_windows,
    files_in,
    read_text,
    standard_library,
    trigram_loss,
)
from training.trainer import Settings, Trainer

from tinyblock import RMSNorm

ROOT = Path(__file__).parents[2]
SETTINGS = Settings(
    steps=1,
    batch_size=4,
    seq_len=8,
    d_model=32,
    num_layers=2,
    num_heads=2,
    seed=0,
    lr=1e-3,
    warmup=0,
)


TEXTS = {}
for number in range(39):
    TEXTS[f"step-{number:02}"] = bytes(1 + (number * k * k) % 7 for k in range(number))
TEXTS[os.fsdecode(b"\xff")] = bytes(1 + k % 5 for k in range(39))


LEFT_OUT = (".hidden", "step-00000008.pt", "loss.json")


@pytest.fixture
def text(tmp_path):
    """Read a folder that also has a hidden file, a checkpoint, an output and a pipe."""
    for name, content in TEXTS.items():
        (tmp_path / name).write_bytes(content)
    for name in LEFT_OUT:
        (tmp_path / name).write_bytes(b"left out")
    os.mkfifo(tmp_path / "pipe")
    outputs = [tmp_path / "loss.json", tmp_path / "missing"]
    return read_text(files_in([tmp_path], outputs).files)


def test_text_is_the_files_in_their_order_and_validation_the_last_twentieth_of_the_bytes(
    text,
):
    data = b"".join(TEXTS.values())
    split = len(data) - len(data) // 20
    assert text.files == 40
    assert text.sha256 == hashlib.sha256(data).hexdigest()
    assert bytes(text.training.tolist()) == data[:split]
    assert bytes(text.validation.tolist()) == data[split:]
    assert even_windows(text.training, 2, 20).tolist() == [
        list(data[:20]),
        list(data[split - 20 : split]),
    ]


def test_standard_library_is_source_without_installed_packages():
    files = standard_library()
    assert files == sorted(files)
    assert any(path.parts[-2:] == ("json", "decoder.py") for path in files)
    assert not any("site-packages" in path.parts for path in files)


def test_batch_depends_only_on_seed_and_step(text):
    draw = partial(batch, text.training, batch_size=4, seq_len=9)
    first = draw(seed=0, step=5)
    assert first.shape == (4, 10)
    assert torch.equal(draw(seed=0, step=5), first)
    assert not torch.equal(draw(seed=0, step=6), first)
    assert not torch.equal(draw(seed=1, step=5), first)


def test_trigram_loss_is_that_of_smoothed_counts(text):
    data = text.training.tolist()
    triples = Counter(zip(data, data[1:], data[2:], strict=False))
    pairs = Counter()
    singles = Counter()
    before_triples = Counter()
    before_pairs = Counter()
    for (a, b, c), count in triples.items():
        pairs[b, c] += count
        singles[c] += count
        before_triples[a, b] += count
        before_pairs[b] += count
    windows = even_windows(text.validation, 3, 12)
    expected = []
    for row in windows.tolist():
        for a, b, c in zip(row, row[1:], row[2:], strict=False):
            p = (singles[c] + 1) / (triples.total() + 256)
            p = (pairs[b, c] + 4 * p) / (before_pairs[b] + 4)
            p = (triples[a, b, c] + 4 * p) / (before_triples[a, b] + 4)
            expected.append(-math.log(p))
    found = trigram_loss(text.training, windows)
    assert found == pytest.approx(mean(expected), rel=1e-5)


def test_validate_is_the_mean_loss_at_each_position():
    model = SETTINGS.build()
    windows = torch.randint(256, (8, 9))
    picked = model(windows[:, :-1]).log_softmax(-1).gather(-1, windows[:, 1:, None])
    losses = Trainer(model, windows, SETTINGS).validate(windows)
    torch.testing.assert_close(losses, -picked.detach().mean((0, 2)))


@pytest.mark.parametrize("kind", comparison.VARIANTS)
def test_variants_have_as_many_parameters_and_differ(kind):
    tokens = torch.randint(256, (2, 8))
    counts = []
    outputs = []
    for build in comparison.VARIANTS[kind].values():
        torch.manual_seed(0)
        model = build(SETTINGS)
        # Without the gains of norms, which have one dimension: a variant has no norms.
        matrices = [weight for weight in model.parameters() if weight.ndim > 1]
        counts.append(sum(map(torch.numel, matrices)))
        outputs.append(model(tokens))
    assert len(set(counts)) == 1
    for one, other in combinations(outputs, 2):
        assert not torch.allclose(one, other)


def test_post_norm_is_the_equation():
    torch.manual_seed(0)
    before: Any = comparison.VARIANTS["norm"]["pre-norm"](SETTINGS)
    torch.manual_seed(0)
    after = comparison.VARIANTS["norm"]["post-norm"](SETTINGS)
    norm = RMSNorm(32)
    tokens = torch.randint(256, (2, 8))
    x = before.token_embeddings(tokens)
    for block in before.transformer.layers:
        z = norm(x + block.attn(x))
        x = norm(z + block.ffn(z))
    torch.testing.assert_close(after(tokens), before.lm_head(x))


TINY = [
    "--steps=3",
    "--batch-size=2",
    "--seq-len=8",
    "--d-model=24",
    "--num-layers=1",
    "--num-heads=1",
    "--seeds=2",
]


@pytest.fixture
def short_text(tmp_path, monkeypatch):
    monkeypatch.setattr(comparison, "VALIDATION_BATCHES", 2)
    path = tmp_path / "text"
    path.write_bytes(bytes(range(256)) * 9)
    return path


def is_png(path):
    return path.read_bytes().startswith(b"\x89PNG")


def compare(kind, rates, text, folder, *options):
    """Compare variants with two seeds, and return the records of the runs."""
    results = folder / "of.json"
    inputs = ["--compare", kind, "--data", str(text), "--lr", *map(str, rates)]
    assert cli.main([*TINY, *inputs, "--json", str(results), *options]) == 0
    return json.loads(results.read_text())["runs"]


# A run with a learning rate of 1e30 diverges.
KINDS_AND_RATES = [("positions", [0.01]), ("norm", [0.01, 1e30])]


@pytest.mark.parametrize(("kind", "rates"), KINDS_AND_RATES)
def test_comparison_has_runs_of_every_seed_rate_and_variant(
    kind, rates, short_text, tmp_path
):
    runs = compare(kind, rates, short_text, tmp_path)
    expected = list(product((0, 1), rates, comparison.VARIANTS[kind]))
    assert [(run["seed"], run["lr"], run["variant"]) for run in runs] == expected
    for run in runs:
        assert (run["diverged"] is None) == (run["lr"] < 1)


@pytest.mark.parametrize(("kind", "rates"), KINDS_AND_RATES)
def test_only_the_comparison_of_positions_has_losses_by_position(
    kind, rates, short_text, tmp_path
):
    for run in compare(kind, rates, short_text, tmp_path):
        if kind == "positions":
            assert len(run["by_position"]) == 32
        else:
            assert run["by_position"] is None


@pytest.mark.parametrize(("kind", "rates"), KINDS_AND_RATES)
def test_comparison_prints_mean_and_range_of_the_differences_from_the_first_variant(
    kind, rates, short_text, tmp_path, capsys
):
    runs = compare(kind, rates, short_text, tmp_path)
    losses = {}
    for run in runs:
        if run["lr"] < 1:
            losses[run["variant"], run["seed"]] = run["validation"]
    first, other = list(comparison.VARIANTS[kind])[:2]
    differences = [losses[other, seed] - losses[first, seed] for seed in (0, 1)]
    low = min(differences)
    high = max(differences)
    [row] = printed_rows(capsys, f"| {other} | 0.01 |")
    assert row.endswith(f"{mean(differences):.4f} | {low:.4f} to {high:.4f} |")


def test_comparison_prints_how_many_seeds_did_not_diverge(short_text, tmp_path, capsys):
    compare("norm", [0.01, 1e30], short_text, tmp_path)
    rows = printed_rows(capsys, "")
    of_high_rate = [row for row in rows if "| 1e+30 |" in row]
    assert len(of_high_rate) == len(comparison.VARIANTS["norm"])
    for row in of_high_rate:
        assert "| 0 of 2 | diverged |" in row


def printed_rows(capsys, beginning):
    """Return the printed lines that begin so, with one space between words."""
    lines = capsys.readouterr().out.splitlines()
    rows = [" ".join(line.split()) for line in lines]
    return [row for row in rows if row.startswith(beginning)]


@pytest.mark.parametrize(("kind", "rates"), KINDS_AND_RATES)
def test_file_of_a_comparison_gives_the_same_table_and_picture(
    kind, rates, short_text, tmp_path, capsys
):
    picture = tmp_path / "of.png"
    compare(kind, rates, short_text, tmp_path, "--plot", str(picture))
    printed = capsys.readouterr().out
    assert is_png(picture)
    again = tmp_path / "again.png"
    report = ["--report", str(tmp_path / "of.json"), "--plot", str(again)]
    assert cli.main(report) == 0
    assert capsys.readouterr().out == printed
    assert again.read_bytes() == picture.read_bytes()


def test_comparison_takes_the_lowest_and_the_highest_seed(short_text, tmp_path):
    results = tmp_path / "ffn.json"
    options = ["--compare=ffn", f"--data={short_text}", f"--json={results}"]
    for first in (-(2**63), 2**63 - 1):
        assert cli.main([*TINY, *options, f"--seed={first}"]) == 0
        runs = json.loads(results.read_text())["runs"]
        assert {run["seed"] for run in runs} == {first, first + 1}


def test_comparison_that_diverged_has_no_picture(short_text, tmp_path, capsys):
    picture = tmp_path / "ffn.png"
    options = ["--compare=ffn", "--seeds=1", f"--plot={picture}", "--lr=1e30"]
    assert cli.main([*TINY, *options, f"--data={short_text}"]) == 0
    assert not picture.exists()
    assert "0 of 1 | " in capsys.readouterr().out


def texts_in(picture):
    """Return the texts of a picture in SVG, each with its distances from the left and from the top."""
    found = re.findall(
        r'<!-- (.*) -->\s+<g (?:style="[^"]*" )?transform="translate\(([\d.]+) ([\d.]+)\)',
        picture.read_text(),
    )
    return [(text, float(left), float(top)) for text, left, top in found]


NORM_TITLES = {
    "norm": "Pre-norm, post-norm, and no norm: 6 layers, 50 steps of warm-up",
    "norm-no-warmup": "Pre-norm, post-norm, and no norm: 6 layers, no warm-up",
    "norm-two-layers": "Pre-norm, post-norm, and no norm: 2 layers, 50 steps of warm-up",
}


@pytest.mark.parametrize("name", NORM_TITLES)
def test_picture_of_norms_has_its_settings_in_the_title_and_its_legend_below(
    name, tmp_path
):
    picture = tmp_path / "norm.svg"
    report = ROOT / "docs" / "ablations" / f"{name}.json"
    assert cli.main(["--report", str(report), "--plot", str(picture)]) == 0
    texts = texts_in(picture)
    of_crosses = [text for text, _, _ in texts if "diverged" in text]
    assert of_crosses == ["no norm: at least one seed diverged"]
    tops = {text: top for text, _, top in texts}
    assert NORM_TITLES[name] in tops
    for entry in ("pre-norm", "post-norm", *of_crosses):
        assert tops[entry] > tops["peak learning rate"]
    # The lines of models that never trained have no entry.
    assert ("no norm" in tops) == (name == "norm-two-layers")


def test_legend_of_variants_that_all_diverged_fits_into_the_picture(
    short_text, tmp_path
):
    picture = tmp_path / "norm.svg"
    options = ["--compare=norm", "--lr", "0.01", "1e30", "--seeds=1"]
    options += [f"--data={short_text}", f"--plot={picture}"]
    assert cli.main([*TINY, *options]) == 0
    lefts = {text: left for text, left, _ in texts_in(picture)}
    width = 9 * 72  # inches and points
    for name in comparison.VARIANTS["norm"]:
        assert lefts[name] > 0
        assert lefts[f"{name}: at least one seed diverged"] < width * 2 / 3


def test_picture_of_high_losses_has_the_highest_at_the_top(short_text, tmp_path):
    picture = tmp_path / "positions.svg"
    options = ["--compare=positions", f"--data={short_text}", f"--plot={picture}"]
    assert cli.main([*TINY, *options]) == 0
    losses = []
    for text, left, top in texts_in(picture):
        # The numbers at the edge of the left panel.
        if re.fullmatch(r"[\d.]+", text) and left < 36:
            losses.append((float(text), top))
    assert min(losses)[0] > 3.5
    assert min(losses)[1] > max(losses)[1]


def test_activations_and_derivatives_are_drawn_over_the_same_numbers(tmp_path):
    picture = tmp_path / "activations.svg"
    assert cli.main(["--compare=activations", f"--plot={picture}"]) == 0
    texts = texts_in(picture)
    [axis, _] = [top for text, _, top in texts if text == "x"]
    panels: dict[bool, list[str]] = {False: [], True: []}
    for text, left, top in texts:
        # The numbers just above the name of the axis.
        if 0 < axis - top < 18:
            panels[left > 4 * 72].append(text)
    assert len(panels[False]) > 2
    assert panels[False] == panels[True]


DAMAGE = {
    "a curve of another length": (
        ["runs", 3, "curve"],
        [1.0],
        "runs[3].curve must have 50 points for 400 steps, got 1",
    ),
    "a missing loss": (["runs", 0, "validation"], None, "must have a validation loss"),
    "an unknown variant": (
        ["runs", 0, "variant"],
        "x",
        "runs[0] must be SwiGLU with seed 0 and lr 0.005, got x with seed 0 and lr 0.005",
    ),
    "a text for a number": (["settings", "steps"], "1", "settings.steps must be"),
    "another schema": (["schema"], "tinyblock.training/1", 'the "schema"'),
    "an empty curve": (["runs", 0, "curve"], [], "runs[0].curve must have 50 points"),
    "a negative validation loss": (
        ["runs", 1, "validation"],
        -1.0,
        "runs[1].validation must have no negative loss, got -1.0",
    ),
    "a negative point": (
        ["runs", 2, "curve"],
        [1.0] * 49 + [-2.0],
        "runs[2].curve must have no negative loss, got -2.0",
    ),
    "a step of divergence after the last": (
        ["runs", 0, "diverged"],
        402,
        "runs[0].diverged must be from 1 to settings.steps 400, got 402",
    ),
    "no parameters": (
        ["runs", 0, "parameters"],
        0,
        "parameters must be at least 1, got 0",
    ),
    "many seeds": (["seeds"], 10**9, "it must have the 4000000000 runs"),
    "no seeds": (["seeds"], 0, "seeds must be at least 1, got 0"),
    "no rates": (["rates"], [], "rates must begin with settings.lr 0.005, got []"),
    "a rate twice": (
        ["rates"],
        [0.005, 0.005],
        "rates must differ, got [0.005, 0.005]",
    ),
    "a negative rate": (
        ["rates"],
        [0.005, -1.0],
        "rates must be positive, got [0.005, -1.0]",
    ),
    "no steps": (["settings", "steps"], 0, "steps must be at least 1, got 0"),
    "a rate of 0": (["settings", "lr"], 0, "lr must be positive and finite, got 0.0"),
    "another seed": (
        ["settings", "seed"],
        -1,
        "runs[0] must be SwiGLU with seed -1 and lr 0.005, got SwiGLU with seed 0",
    ),
    "a long warm-up": (
        ["settings", "warmup"],
        401,
        "warmup must be from 0 to steps 400, got 401",
    ),
    "a trigram model without loss": (
        ["trigram_validation"],
        0,
        "trigram_validation must be positive, got 0.0",
    ),
    "no runs": (["runs"], [], "got 0 runs; was it interrupted?"),
}


DAMAGED_POSITIONS = {
    "no positions": (None, "runs[0] must have 32 positions, got 0"),
    "a missing position": ([1.0] * 31, "runs[0] must have 32 positions, got 31"),
    "a negative loss": (
        [1.0] * 31 + [-1.0],
        "runs[0].by_position must have no negative loss, got -1.0",
    ),
}


def rejected_report(kind, keys, value, folder, capsys):
    """Change a value in a comparison of the documents, and return the one line that rejects it."""
    document = json.loads((ROOT / "docs" / "ablations" / f"{kind}.json").read_text())
    place = document
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    path = folder / "damaged.json"
    path.write_text(json.dumps(document))
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--report", str(path)])
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"train_lm.py: error: --report: {path}")
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_comparison_is_one_line(damage, tmp_path, capsys):
    keys, value, message = DAMAGE[damage]
    assert message in rejected_report("ffn", keys, value, tmp_path, capsys)


@pytest.mark.parametrize("damage", DAMAGED_POSITIONS)
def test_damaged_comparison_of_positions_is_one_line(damage, tmp_path, capsys):
    value, message = DAMAGED_POSITIONS[damage]
    keys = ["runs", 0, "by_position"]
    assert message in rejected_report("positions", keys, value, tmp_path, capsys)
