"""Llama31Rope against transformers, and its arguments."""

import math

import llama31_rope
import pytest
import torch
from llama31_rope import Llama31Rope

from tinyblock import RotaryPositionalEmbedding

# Importing transformers warns.
pytestmark = pytest.mark.filterwarnings(
    "default::DeprecationWarning", "default::FutureWarning"
)


@pytest.mark.parametrize(
    ("factor", "low", "high", "original"),
    [(8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192), (4.0, 2.0, 3.0, 1024)],
    ids=["Llama 3.1", "Llama 3.2", "others"],
)
def test_llama31_rope_has_the_frequencies_of_transformers(factor, low, high, original):
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
    config = transformers.LlamaConfig(
        head_dim=128, rope_theta=500000.0, rope_scaling=scaling
    )
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    rope = Llama31Rope(
        500000.0,
        d_k=128,
        max_seq_len=8,
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_seq_len=original,
    )
    assert rope.frequencies().dtype == torch.float64
    torch.testing.assert_close(rope.frequencies(), expected.double(), rtol=1e-6, atol=0)


def test_llama31_rope_defaults_are_those_of_llama_3_1():
    rope = Llama31Rope(500000.0, d_k=128, max_seq_len=8)
    plain = RotaryPositionalEmbedding(500000.0, d_k=128, max_seq_len=8).frequencies()
    wavelengths = 2 * math.pi / plain
    short, long = wavelengths < 8192 / 4, wavelengths > 8192
    assert torch.equal(rope.frequencies()[short], plain[short])
    assert torch.equal(rope.frequencies()[long], plain[long] / 8)


def test_llama31_rope_rotates_by_its_frequencies():
    rope = Llama31Rope(500000.0, d_k=128, max_seq_len=16)
    x = torch.randn(1, 16, 128, dtype=torch.float64)
    numbers = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    angles = torch.arange(16)[:, None] * rope.frequencies()
    rotations = torch.polar(torch.ones_like(angles), angles)
    expected = torch.view_as_real(numbers * rotations).flatten(-2)
    torch.testing.assert_close(rope(x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"factor": 0.5}, "factor must be at least 1, such as 8, got 0.5"),
        ({"low_freq_factor": 4.0}, "low_freq_factor must be positive and below"),
    ],
)
def test_llama31_rope_rejects(options, message):
    with pytest.raises(ValueError, match=message):
        Llama31Rope(500000.0, d_k=128, max_seq_len=8, **options)


def test_llama31_rope_main(capsys):
    llama31_rope.main()
    expected = "64 frequencies: 29 kept, 6 interpolated, 29 divided by 8\n"
    assert capsys.readouterr().out == expected
