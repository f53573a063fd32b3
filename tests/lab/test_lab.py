"""What the scripts share: the machine's name, sizes, timing, and text."""

import sys
import time
from itertools import count

import pytest
import torch
from lab.machine import commit_of, environment
from lab.sizes import PRESETS
from lab.tables import markdown, si, terminal
from lab.timing import Clock, interleave, wall_sampler

CPU, META = torch.device("cpu"), torch.device("meta")


def test_a_measurement_names_device_versions_and_date(tmp_path):
    python = sys.version.partition(" ")[0]
    line = environment(CPU)
    assert f", {torch.get_num_threads()} of " in line
    assert f"; torch {torch.__version__}, python {python}, tinyblock " in line
    assert line.endswith(f"; {time.strftime('%Y-%m-%d')}")
    assert commit_of(tmp_path) == "unknown"  # it is no repository


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


def test_prefix_is_that_of_the_rounded_number():
    assert [si(999.4, "s"), si(999.6, "s")] == ["999 s", "1.00 ks"]
    assert [si(994e3, "B", 2), si(996e3, "B", 2)] == ["990 kB", "1.0 MB"]


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


def test_presets_have_the_parameters_of_their_models():
    for name, (blocks, parameters) in PUBLISHED.items():
        size = PRESETS[name]
        block = size.build(META, torch.bfloat16)
        in_a_block = sum(weight.numel() for weight in block.parameters())
        # The final norm has d_model.
        assert blocks * in_a_block + size.d_model == parameters, name
