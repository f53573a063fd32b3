"""What the scripts share: the machine's name, sizes, timing, and text."""

import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest
import torch
from lab.machine import commit_of, environment
from lab.sizes import PRESETS, Size
from lab.tables import markdown, number, share, si, terminal
from lab.timing import Clock, Spread, interleave, wall_sampler

CPU, META = torch.device("cpu"), torch.device("meta")


def test_a_measurement_names_device_versions_commit_and_date():
    python = sys.version.partition(" ")[0]
    line = environment(CPU)
    assert f", {torch.get_num_threads()} of " in line
    assert f"; torch {torch.__version__}, python {python}, commit " in line
    assert line.endswith(f"; {time.strftime('%Y-%m-%d')}")


def test_the_commit_may_have_changes(tmp_path):
    def git(*arguments):
        author = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.check_output(["git", *author, *arguments], cwd=tmp_path)

    assert commit_of(tmp_path) == "unknown"
    file = tmp_path / "machine.py"
    file.touch()
    git("init", "--quiet")
    git("add", "machine.py")
    git("commit", "--quiet", "--message", "A commit", "--no-gpg-sign")
    commit = git("rev-parse", "--short", "HEAD").decode().strip()
    assert commit_of(tmp_path) == commit
    file.write_text("changed")
    assert commit_of(tmp_path) == f"{commit}-dirty"


def test_spread_has_the_median_and_the_percentiles():
    spread = Spread.of([5.0, 1.0, 2.0, 4.0, 3.0, 6.0])
    assert (spread.median, spread.p20, spread.p80) == (3.5, 2.0, 5.0)
    assert spread.range == 5 - 2
    assert spread.width == pytest.approx((5 - 2) / 3.5)


def test_interleave_takes_turns_and_reverses_every_other_round():
    turns = count()
    samples = interleave({"a": turns.__next__, "b": turns.__next__}, 3)
    assert samples == {"a": [0, 3, 4], "b": [1, 2, 5]}


class Counting(Clock):
    """A clock that a run of 1 ms advances."""

    def __init__(self):
        self.time = 0.0

    def now(self):
        return self.time

    def run(self):
        self.time += 0.001


def test_wall_sampler_repeats_short_calls_and_returns_the_time_of_one():
    clock = Counting()
    sample = wall_sampler(clock.run, least_seconds=0.0095, clock=clock)
    before = clock.time
    assert sample() == pytest.approx(0.001)
    # Ten calls are timed, after one that fills the caches.
    assert clock.time - before == pytest.approx(0.011)
    sample = wall_sampler(clock.run, least_seconds=0.0009, clock=clock)
    before = clock.time
    sample()
    assert clock.time - before == pytest.approx(0.001)


TEXTS: dict[Any, dict[Any, str]] = {
    number: {
        (0.0,): "0",
        (1e-5,): "0.0000100",
        (99.96,): "100",
        (12345.0,): "12300",
        (12345.0, 2): "12000",
        (0.0126, 2): "0.013",
    },
    si: {
        (0.0, "s"): "0 s",
        (-2e-3, "s"): "-2.00 ms",
        (0.0123, "s"): "12.3 ms",
        (999.6, "s"): "1.00 ks",
        (3.11e6,): "3.11 M",
        (4.2e9, "s"): "4.20 Gs",
        (4.2e12, "s"): "4.20 Ts",
        (4.2e15, "s"): "4.20 Ps",
        (996e3, "B", 2): "1.0 MB",
        (994e3, "B", 2): "990 kB",
    },
    share: {(0.042,): "4.20%", (1.5,): "150%", (0.0426, 2): "4.3%"},
}


def test_numbers_have_three_digits_or_those_that_are_asked_for():
    for function, cases in TEXTS.items():
        for arguments, text in cases.items():
            assert function(*arguments) == text, arguments


def test_tables_align_names_left_and_numbers_right():
    assert markdown(["", "n"], [["norm", "1.5"], ["ffn", ""]]).splitlines() == [
        "|      |   n |",
        "| ---- | --: |",
        "| norm | 1.5 |",
        "| ffn  |     |",
    ]
    rows = [["model.layers.attention.projection", "12"], ["b", ""]]
    # Names that are too long lose their middle.
    assert terminal(["part", "ms"], rows, width=25).splitlines() == [
        "part                   ms",
        "model....n.projection  12",
        "b",
    ]


@dataclass
class Published:
    """What is published about a model.

    parameters: without embedding and head.
    heads: of queries and of keys, and the width of each.
    """

    blocks: int
    parameters: int
    heads: tuple[int, int, int]
    qk_norm: bool = False


PUBLISHED = {
    "llama-3.2-1b": Published(16, 1_235_814_400 - 128_256 * 2048, (32, 8, 64)),
    "llama-3.1-8b": Published(32, 8_030_261_248 - 2 * 128_256 * 4096, (32, 8, 128)),
    "llama-3.1-70b": Published(80, 70_553_706_496 - 2 * 128_256 * 8192, (64, 8, 128)),
    "qwen3-8b": Published(
        36, 8_190_735_360 - 2 * 151_936 * 4096, (32, 8, 128), qk_norm=True
    ),
}
# d_model, d_ff and heads: table 1 of CS336's assignment 2.
OF_CS336 = {
    "small": (768, 3072, 12),
    "medium": (1024, 4096, 16),
    "large": (1280, 5120, 20),
    "xl": (1600, 6400, 25),
    "2.7b": (2560, 10240, 32),
}


def test_presets_have_the_sizes_and_parameters_of_their_models():
    assert PRESETS.keys() == PUBLISHED.keys() | OF_CS336.keys()
    for name, model in PUBLISHED.items():
        size = PRESETS[name]
        heads = (size.num_heads, size.num_kv_heads, size.d_head)
        assert (heads, size.qk_norm) == (model.heads, model.qk_norm), name
        block = size.build(META, torch.bfloat16)
        in_a_block = sum(weight.numel() for weight in block.parameters())
        # The final norm has d_model.
        assert model.blocks * in_a_block + size.d_model == model.parameters, name
    for name, sizes in OF_CS336.items():
        size = PRESETS[name]
        assert (size.d_model, size.d_ff, size.num_heads) == sizes, name
        assert (size.num_kv_heads, size.d_head) == (None, None), name


def test_size_of_several_layers_is_a_stack():
    stack = Size(2, 3, d_model=32, num_heads=2, num_layers=3)
    assert len(stack.build(META, torch.float32).layers) == 3
    assert stack.title == "Transformer of 3, 2 heads: 2 x 3 tokens, d_model 32"
    assert (stack.tokens, stack.shape) == (6, (2, 3, 32))
