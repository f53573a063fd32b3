"""What the scripts share: the machine's name, sizes, timing, and text."""

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import count

import pytest
import torch
from lab import machine
from lab.sizes import PRESETS, Size
from lab.tables import markdown, number, share, si, terminal
from lab.timing import Spread, clock, interleave, wall_sampler

META = torch.device("meta")


def test_a_measurement_names_device_versions_commit_and_date(monkeypatch):
    monkeypatch.setattr(machine, "device_name", lambda device: f"on {device}")
    monkeypatch.setattr(machine, "_commit", lambda: "abc")
    python = sys.version.partition(" ")[0]
    assert machine.environment(META) == (
        f"on meta; torch {torch.__version__}, python {python}, commit abc; "
        f"{time.strftime('%Y-%m-%d')}"
    )


def test_a_gpu_has_the_name_that_torch_gives(monkeypatch):
    names = {torch.device("cuda:1"): "the second GPU"}
    monkeypatch.setattr(torch.cuda, "get_device_name", names.get)
    assert machine.device_name(torch.device("cuda:1")) == "the second GPU"


def test_a_cpu_has_its_model_and_threads(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    name, threads, _ = machine.device_name(torch.device("cpu")).rsplit(", ", 2)
    assert name
    assert "model name" not in name
    assert threads == f"{torch.get_num_threads()} of 7 threads"


def test_the_commit_is_the_scripts_own_and_may_have_changes(tmp_path, monkeypatch):
    def git(*arguments):
        author = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.check_output(["git", *author, *arguments], cwd=tmp_path)

    monkeypatch.setattr(machine, "__file__", str(tmp_path / "machine.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert machine._commit() == "unknown"
    (tmp_path / "machine.py").touch()
    git("init", "--quiet")
    git("add", "machine.py")
    git("commit", "--quiet", "--message", "A commit", "--no-gpg-sign")
    commit = git("rev-parse", "--short", "HEAD").decode().strip()
    assert machine._commit() == commit
    (tmp_path / "machine.py").write_text("changed")
    assert machine._commit() == f"{commit}-dirty"


def test_spread_has_the_median_and_the_percentiles():
    spread = Spread.of([5.0, 1.0, 2.0, 4.0, 3.0, 6.0])
    assert (spread.median, spread.p20, spread.p80) == (3.5, 2.0, 5.0)


def test_range_and_width_lie_between_the_percentiles():
    spread = Spread.of([5.0, 1.0, 2.0, 4.0, 3.0, 6.0])
    assert spread.range == 5 - 2
    assert spread.width == pytest.approx((5 - 2) / 3.5)


def test_the_clock_reads_the_time_after_the_gpu_is_done(monkeypatch):
    now = 1.0

    def wait():
        nonlocal now
        now += 2

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    assert clock() == 3


def test_interleave_takes_turns_and_reverses_every_other_round():
    turns = count()
    samples = interleave({"a": turns.__next__, "b": turns.__next__}, 3)
    assert samples == {"a": [0, 3, 4], "b": [1, 2, 5]}


def test_wall_sampler_repeats_short_calls_and_returns_the_time_of_one(monkeypatch):
    now = 0.0

    def run():
        nonlocal now
        now += 0.001

    monkeypatch.setattr("lab.timing.clock", lambda: now)
    sample = wall_sampler(run, least_seconds=0.0095)
    before = now
    assert sample() == pytest.approx(0.001)
    # Ten calls are timed, after one that fills the caches.
    assert now - before == pytest.approx(0.011)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (1e-5, "0.0000100"), (99.96, "100"), (12345.0, "12300")],
)
def test_a_number_has_three_digits_and_no_exponent(value, text):
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0 s"),
        (-2e-3, "-2.00 ms"),
        (0.0123, "12.3 ms"),
        (999.6, "1.00 ks"),
        (3.11e6, "3.11 Ms"),
        (4.2e9, "4.20 Gs"),
        (4.2e12, "4.20 Ts"),
        (4.2e15, "4.20 Ps"),
    ],
)
def test_the_prefix_of_a_unit_follows_its_size(value, text):
    assert si(value, "s") == text


def test_a_number_without_unit_has_a_prefix_alone():
    assert (si(3.11e6), si(0.0)) == ("3.11 M", "0")


def test_a_share_is_in_percent():
    assert (share(0.042), share(1.5)) == ("4.20%", "150%")


def test_uncertain_numbers_have_fewer_digits():
    assert (number(12345.0, 2), number(0.0126, 2)) == ("12000", "0.013")
    assert (si(996e3, "B", 2), si(994e3, "B", 2)) == ("1.0 MB", "990 kB")
    assert share(0.0426, 2) == "4.3%"


def test_table_in_markdown_aligns_names_left_and_numbers_right():
    assert markdown(["", "time"], [["norm", "1.5"], ["ffn", ""]]).splitlines() == [
        "|      | time |",
        "| ---- | ---: |",
        "| norm |  1.5 |",
        "| ffn  |      |",
    ]


def test_a_rule_in_markdown_has_three_characters_as_its_readers_require():
    _, rule, _ = markdown(["", "n"], [["a", "1"]]).splitlines()
    assert rule == "| --- | --: |"


def test_table_for_a_terminal_cuts_long_names_in_their_middle():
    rows = [["model.layers.attention.projection", "12"], ["b", ""]]
    table = terminal(["part", "ms"], rows, width=25)
    assert table.splitlines() == [
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


def test_each_preset_is_compared_with_a_published_size():
    assert PRESETS.keys() == PUBLISHED.keys() | OF_CS336.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_number_of_parameters_of_its_model(name):
    model = PUBLISHED[name]
    block = PRESETS[name].build(META, torch.bfloat16)
    in_a_block = sum(weight.numel() for weight in block.parameters())
    in_the_final_norm = PRESETS[name].d_model
    assert model.blocks * in_a_block + in_the_final_norm == model.parameters


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_heads_and_their_norms_of_its_model(name):
    size = PRESETS[name]
    assert (size.num_heads, size.num_kv_heads, size.d_head) == PUBLISHED[name].heads
    assert size.qk_norm == PUBLISHED[name].qk_norm


@pytest.mark.parametrize("name", OF_CS336)
def test_a_preset_has_the_sizes_of_the_course(name):
    size = PRESETS[name]
    assert (size.d_model, size.d_ff, size.num_heads) == OF_CS336[name]
    assert (size.num_kv_heads, size.d_head) == (None, None)


STACK = Size(2, 3, d_model=32, num_heads=2, num_layers=3)


def test_size_of_several_layers_is_a_stack():
    assert len(STACK.build(META, torch.float32).layers) == 3


def test_title_names_the_layers_heads_tokens_and_width():
    assert STACK.title == "Transformer of 3, 2 heads: 2 x 3 tokens, d_model 32"


def test_tokens_are_those_of_all_sequences():
    assert STACK.tokens == 6
