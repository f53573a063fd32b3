"""The presets, against the sizes of the published models."""

import pytest
import torch
from lab.presets import PRESETS
from lab.sizes import Size


@pytest.mark.parametrize(
    ("name", "parameters", "vocabulary", "tables"),
    [
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
    size = PRESETS[name]
    model = size.build("meta", torch.float32)
    body = sum(p.numel() for p in model.parameters())
    assert body + tables * vocabulary * size.d_model == parameters
    assert size.parameters == body


def test_presets_of_cs336_have_four_times_the_width_and_heads_of_64_or_80():
    for name, d_head in {
        "small": 64,
        "medium": 64,
        "large": 64,
        "xl": 64,
        "2.7b": 80,
    }.items():
        preset = PRESETS[name]
        assert (preset.d_ff, preset.d_head) == (4 * preset.d_model, d_head)
        assert preset.num_heads == preset.num_kv_heads == preset.d_model / d_head


def test_size_of_a_block_counts_the_parameters_that_are_built():
    size = Size(1, 3, 12, 6, 2, 4, 20, qk_norm=True)
    assert size.parameters == sum(
        p.numel() for p in size.build("meta", torch.float32).parameters()
    )


def test_smallest_keeps_the_calls_and_drops_the_arithmetic():
    size = PRESETS["qwen3-8b"].smallest()
    assert (size.tokens, size.d_model, size.d_head, size.d_ff) == (1, 8, 128, 8)
    assert (size.num_heads, size.num_kv_heads, size.qk_norm, size.num_layers) == (
        32,
        8,
        True,
        36,
    )
