"""What the scripts share: the machine's name, sizes, timing, and text."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch
from lab.machine import commit_of, environment
from lab.sizes import PRESETS, Size
from lab.tables import markdown, number, share, si, terminal
from lab.timing import Clock, Spread, interleave, wall_sampler

CPU, META = torch.device("cpu"), torch.device("meta")


def git(folder, *arguments):
    me = ["-c", "user.name=me", "-c", "user.email=me@example.com"]
    command = ["git", *me, *arguments]
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return done.stdout.decode().strip()


def test_a_measurement_names_device_versions_and_date():
    python = sys.version.partition(" ")[0]
    line = environment(CPU)
    threads = f", {torch.get_num_threads()} of {os.cpu_count()} threads, "
    assert threads + torch.backends.cpu.get_cpu_capability() in line
    commit = commit_of(Path(__file__).parent)
    assert f"; torch {torch.__version__}, python {python}, tinyblock {commit};" in line
    assert line.endswith(f"; {time.strftime('%Y-%m-%d')}")


def test_a_commit_says_whether_files_were_changed(tmp_path):
    assert commit_of(tmp_path) == "unknown"  # it is no repository
    git(tmp_path, "init")
    (tmp_path / "file").write_text("before")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-m", "a commit")
    commit = git(tmp_path, "rev-parse", "--short", "HEAD")
    assert commit_of(tmp_path) == commit
    (tmp_path / "file").write_text("after")
    assert commit_of(tmp_path) == f"{commit}-dirty"


def test_interleave_alternates_and_reverses_every_other_round():
    turns, said = count(), []
    samples = interleave({"a": turns.__next__, "b": turns.__next__}, 3, said.append)
    assert samples == {"a": [0, 3, 4], "b": [1, 2, 5]}
    assert said == ["round 1 of 3", "round 2 of 3", "round 3 of 3"]


def test_a_spread_has_the_median_and_the_20th_and_80th_percentile():
    """Of six samples, each is 20% of the way from the first to the last."""
    spread = Spread.of([60.0, 10.0, 20.0, 30.0, 40.0, 50.0])
    assert (spread.p20, spread.median, spread.p80) == (20, 35, 50)
    assert spread.range == 30
    assert spread.width == 30 / 35
    assert Spread.of([0.0]).width == 0


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


def test_wall_sampler_times_a_long_call_once():
    clock = Counting()
    sample = wall_sampler(clock.run, least_seconds=0.001, clock=clock)
    before = clock.time
    assert sample() == pytest.approx(0.001)
    assert clock.time - before == pytest.approx(0.001)


NUMBERS = {
    number(0.011996): "0.0120",
    number(1.234): "1.23",
    number(12345): "12300",
    number(0): "0",
    share(0.042): "4.20%",
    share(0.5, 2): "50%",
    si(0, "s"): "0 s",
    si(0.0123, "s"): "12.3 ms",
    si(4.5e-6, "s"): "4.50 us",
    si(3.111e6, "B"): "3.11 MB",
    # The prefix is that of the rounded number.
    si(999.4, "s"): "999 s",
    si(999.5, "s"): "1.00 ks",
    si(994e3, "B", 2): "990 kB",
    si(995e3, "B", 2): "1.0 MB",
    si(2e16, "B"): "20.0 PB",
}


def test_numbers_have_three_digits_and_a_prefix():
    for written, expected in NUMBERS.items():
        assert written == expected


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


# Blocks of published models, and their parameters without embedding and head.
PUBLISHED = {
    "llama-3.2-1b": (16, 1_235_814_400 - 128_256 * 2048),
    "llama-3.1-8b": (32, 8_030_261_248 - 2 * 128_256 * 4096),
    "llama-3.1-70b": (80, 70_553_706_496 - 2 * 128_256 * 8192),
    "qwen3-8b": (36, 8_190_735_360 - 2 * 151_936 * 4096),
}
# d_model, d_ff, heads, KV heads, and d_head: of CS336's table, where all heads have keys of
# their own, and of each config.json.
SIZES = {
    "small": (768, 3072, 12, 12, 64),
    "medium": (1024, 4096, 16, 16, 64),
    "large": (1280, 5120, 20, 20, 64),
    "xl": (1600, 6400, 25, 25, 64),
    "2.7b": (2560, 10240, 32, 32, 80),
    "llama-3.2-1b": (2048, 8192, 32, 8, 64),
    "llama-3.1-8b": (4096, 14336, 32, 8, 128),
    "llama-3.1-70b": (8192, 28672, 64, 8, 128),
    "qwen3-8b": (4096, 12288, 32, 8, 128),
}


def test_presets_have_the_parameters_of_their_models():
    for name, (blocks, parameters) in PUBLISHED.items():
        size = PRESETS[name]
        block = size.build(META, torch.bfloat16)
        in_a_block = sum(weight.numel() for weight in block.parameters())
        # The final norm has d_model.
        assert blocks * in_a_block + size.d_model == parameters, name


def test_presets_build_the_blocks_of_their_models():
    for name, size in PRESETS.items():
        block = size.build(META, torch.bfloat16)
        attn = block.attn
        heads = (attn.num_heads, attn.num_kv_heads, attn.d_head)
        assert (block.d_model, block.ffn.d_ff, *heads) == SIZES[name], name
        assert block.ln1.weight.dtype == torch.bfloat16
    assert list(PRESETS) == list(SIZES)


def test_a_size_is_a_block_or_a_stack_for_its_tokens():
    size = Size(3, 5, 32, 4, num_kv_heads=2, d_head=6, d_ff=40, qk_norm=True)
    stack = replace(size, num_layers=2).build(CPU, torch.float32)
    assert len(stack.layers) == 2
    block = size.build(CPU, torch.float32)
    assert size.tokens == 15
    assert block(torch.zeros(size.shape)).shape == (3, 5, 32)
    for layer in (block, *stack.layers):
        assert layer.attn.rope.max_seq_len == 5
        assert layer.attn.q_norm.eps == 1e-5
        assert layer.attn.num_kv_heads == 2
