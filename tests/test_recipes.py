"""The recipes of docs/recipes.md, run as they stand."""

import math
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import tinyblock

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


@pytest.mark.filterwarnings("default::DeprecationWarning", "default::FutureWarning")
@pytest.mark.parametrize("kind", ["Llama", "Llama with shared key heads", "Qwen3"])
def test_recipe_of_hugging_face_gives_its_logits_and_its_weights_back(kind):
    transformers = pytest.importorskip("transformers")
    made = run("Llama and Qwen weights from Hugging Face, and back")
    name, options = ("Qwen3", {"qk_norm": True}) if kind == "Qwen3" else ("Llama", {})
    config = getattr(transformers, f"{name}Config")(
        vocab_size=99,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4 if kind == "Llama" else 2,
        head_dim=24 if kind == "Qwen3" else 16,
        initializer_range=0.15,  # logits of about 1
    )
    theirs = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for gains in theirs.parameters():
        if gains.ndim == 1:
            nn.init.uniform_(gains, 0.5, 1.5)
    ours = made["LanguageModel"](config, **options)
    ours.load_state_dict(made["from_hugging_face"](theirs.state_dict(), config.head_dim))
    tokens = torch.randint(0, 99, (2, 17))
    expected = theirs(tokens).logits
    assert expected.std() > 0.5
    torch.testing.assert_close(ours(tokens), expected, rtol=0, atol=2e-5)
    back = made["to_hugging_face"](ours.state_dict(), config.head_dim)
    assert back.keys() == theirs.state_dict().keys()
    assert all(torch.equal(back[key], weight) for key, weight in theirs.state_dict().items())


@pytest.mark.filterwarnings("default::DeprecationWarning", "default::FutureWarning")
def test_recipe_of_lora_trains_adapters_alone_and_merges_them():
    pytest.importorskip("peft")
    torch.manual_seed(0)
    plain = tinyblock.Transformer(2, d_model=64, num_heads=4, max_seq_len=128)
    torch.manual_seed(0)
    made = run("LoRA with peft")
    torch.testing.assert_close(made["merged"](made["x"]), made["adapted"], rtol=1e-4, atol=1e-5)
    assert (made["adapted"] - plain(made["x"])).abs().max() > 1e-3
    for (name, merged), before in zip(made["merged"].named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(merged, before) == ("ln" in name), name


@pytest.mark.filterwarnings("default")  # torchao's import has many
def test_recipe_of_int8_rounds_by_half_a_step_at_most():
    pytest.importorskip("torchao")
    made = run("Weights in int8 with torchao")
    pairs = zip(made["quantized"].named_parameters(), made["model"].parameters(), strict=True)
    for (name, quantized), weight in pairs:
        if weight.ndim == 1:
            continue
        assert quantized.qdata.dtype == torch.int8
        step = weight.abs().amax(dim=1, keepdim=True) / 127
        error = (quantized.dequantize() - weight).abs()
        assert (error <= 0.51 * step).all(), name
    x = torch.randn(2, 7, 64)
    expected = made["model"](x)
    assert (made["quantized"](x) - expected).norm() < 0.02 * expected.norm()


@torch.no_grad()
def test_recipe_of_compile_and_export_gives_the_model_at_other_lengths(monkeypatch):
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: compiler(*args, backend="eager", **kwargs))
    made = run("Compile and export")
    for length in (5, 32):
        x = torch.randn(2, length, 64)
        expected = made["model"](x)
        torch.testing.assert_close(made["compiled"](x), expected)
        torch.testing.assert_close(made["exported"](x), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_recipe_of_checkpointing_gives_the_gradients_and_saves_less():
    model = run("Activation checkpointing")["model"]
    plain = tinyblock.Transformer(4, d_model=64, num_heads=4, max_seq_len=128)
    plain.load_state_dict(model.state_dict())
    x, saved = torch.randn(2, 9, 64), []
    for each in (model, plain):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved[-1].append(t.nbytes) or t, lambda t: t):
            saved.append([])
            each(x).sum().backward()
    for ours, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad, rtol=0, atol=0)
    assert sum(saved[0]) < sum(saved[1]) / 2


def test_recipes_of_copies_work_and_are_checked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    run("Copy one file by hand")
    try:
        rope = run("Shape checks in your own tests")["rope"]
    finally:
        sys.modules.pop("rope", None)
    assert Path(rope.__file__).parent == tmp_path
    x, arguments = torch.randn(2, 9, 8), (10000.0, 8, 16)
    copied, packaged = (
        cls(*arguments) for cls in (rope.RotaryPositionalEmbedding, tinyblock.RotaryPositionalEmbedding)
    )
    assert torch.equal(copied(x), packaged(x))
    with pytest.raises(TypeError, match=r"RotaryPositionalEmbedding\.forward"):
        copied(torch.randn(2, 9, 6))
