"""The recipes of docs/recipes.md, run as they stand."""

import math
import re
from pathlib import Path

import pytest
import torch

RECIPES = dict(
    re.findall(
        r"^## (.*?)\n.*?^```python\n(.*?)^```",
        (Path(__file__).parents[1] / "docs" / "recipes.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
)


def run(recipe):
    names = {}
    exec(RECIPES[recipe], names)
    return names


def test_recipe_of_llama_3_1_scales_by_wavelength():
    made = run("Llama 3.1's frequencies")
    for k, frequency in enumerate(made["rope"].frequencies().tolist()):
        plain = 500000.0 ** (-2 * k / 128)
        wavelength = 2 * math.pi / plain
        if wavelength < 8192 / 4:
            assert frequency == pytest.approx(plain)
        elif wavelength > 8192:
            assert frequency == pytest.approx(plain / 8)
        else:
            assert plain / 8 < frequency < plain
    assert made["model"].layers[1].attn.rope is made["rope"]


@pytest.mark.filterwarnings("default::DeprecationWarning", "default::FutureWarning")  # those of transformers' imports
def test_recipe_of_llama_3_1_has_the_frequencies_of_transformers():
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = transformers.LlamaConfig(
        hidden_size=512,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_theta=500000.0,
        rope_scaling=scaling,
    )
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    frequencies = run("Llama 3.1's frequencies")["rope"].frequencies()
    torch.testing.assert_close(frequencies, expected.double(), rtol=1e-6, atol=0)
