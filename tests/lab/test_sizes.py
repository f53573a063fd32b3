"""Sizes and presets, against the published models and against what torch builds."""

import pytest
import torch
from lab.presets import PRESETS
from lab.sizes import Size


@pytest.mark.parametrize(
    ("name", "parameters", "vocabulary", "tables"),
    [
        # Its embedding is its head, too.
        ("llama-3.2-1b", 1_235_814_400, 128_256, 1),
        ("llama-3.1-8b", 8_030_261_248, 128_256, 2),
        ("llama-3.1-70b", 70_553_706_496, 128_256, 2),
        ("qwen3-8b", 8_190_735_360, 151_936, 2),
        ("mistral-7b", 7_248_023_552, 32_768, 2),
    ],
)
def test_presets_have_the_published_number_of_parameters(
    name, parameters, vocabulary, tables
):
    size = PRESETS[name].stack(batch_size=1, seq_len=1)
    model = size.build("meta", torch.float32)
    body = sum(weight.numel() for weight in model.parameters())
    assert body + tables * vocabulary * size.d_model == parameters
    assert size.parameters == body


@pytest.mark.parametrize("name", ["small", "medium", "large", "xl", "2.7b"])
def test_presets_of_cs336_have_four_times_the_width(name):
    preset = PRESETS[name]
    assert preset.d_ff == 4 * preset.d_model
    assert preset.num_kv_heads == preset.num_heads
    assert preset.d_head * preset.num_heads == preset.d_model
    assert preset.d_head == (80 if name == "2.7b" else 64)


def test_block_of_a_preset_is_one_of_its_layers():
    preset = PRESETS["qwen3-8b"]
    block = preset.block(batch_size=2, seq_len=3)
    stack = preset.stack(batch_size=2, seq_len=3)
    assert (block.num_layers, stack.num_layers) == (None, 36)
    assert (block.batch_size, block.seq_len, block.tokens) == (2, 3, 6)
    assert stack.parameters == 36 * block.parameters + preset.d_model


@pytest.mark.parametrize("num_layers", [None, 2], ids=["block", "stack"])
@pytest.mark.parametrize("qk_norm", [False, True], ids=["plain", "qk_norm"])
def test_size_counts_the_parameters_that_are_built(num_layers, qk_norm):
    size = Size(
        batch_size=1,
        seq_len=3,
        d_model=12,
        num_heads=6,
        num_kv_heads=2,
        d_head=4,
        d_ff=20,
        qk_norm=qk_norm,
        num_layers=num_layers,
    )
    built = list(size.build("meta", torch.float32).parameters())
    assert size.parameters == sum(weight.numel() for weight in built)
    assert size.gains == sum(weight.numel() for weight in built if weight.ndim == 1)


def test_smallest_keeps_the_calls_and_drops_the_arithmetic():
    size = PRESETS["qwen3-8b"].stack(batch_size=4, seq_len=9)
    smallest = size.smallest()
    assert (smallest.tokens, smallest.d_model, smallest.d_ff) == (1, 8, 8)
    for name in ("num_heads", "num_kv_heads", "d_head", "qk_norm", "num_layers"):
        assert getattr(smallest, name) == getattr(size, name)


@pytest.mark.parametrize("name", ["batch_size", "seq_len"])
def test_empty_batches_are_rejected(name):
    counts = {"batch_size": 1, "seq_len": 1, name: 0}
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        PRESETS["small"].block(**counts)
