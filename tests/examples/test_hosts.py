"""Copied layers inside other people's models: the hosts that docs/vendoring.md names."""

import copy
import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tinyblock import copies

PAGE = Path(__file__).parents[2] / "docs" / "vendoring.md"
TOKENS = torch.arange(18).view(2, 9)


@pytest.fixture
def layers(tmp_path, monkeypatch):
    """Copies of all layers in a package of a user's."""
    folder = tmp_path / "my_package" / "layers"
    assert copies.main(["add", "transformer", "--to", str(folder)]) == 0
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("my_package.layers.transformer")
    for name in [name for name in sys.modules if name.startswith("my_package")]:
        del sys.modules[name]


def build(layers):
    torch.manual_seed(0)
    return layers.Transformer(2, 64, 4, num_kv_heads=2, max_seq_len=32)


@pytest.fixture
def of_transformers(layers):
    """The PreTrainedModel of the page."""
    pytest.importorskip("transformers")
    [code] = re.findall(
        r"```py\n(from my_package.*?PreTrainedModel.*?)```", PAGE.read_text(), re.DOTALL
    )
    names: dict[str, Any] = {"__name__": "my_model"}
    exec(code, names)
    torch.manual_seed(0)
    return names["MyModel"], names["MyModel"](names["MyConfig"]())


@pytest.mark.parametrize("device_map", [None, "cpu", "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_transformers_loads_what_it_saved(dtype, device_map, of_transformers, tmp_path):
    kind, model = of_transformers
    model.to(dtype).save_pretrained(tmp_path)
    loaded = kind.from_pretrained(tmp_path, dtype=dtype, device_map=device_map)
    assert torch.equal(loaded(TOKENS), model(TOKENS))


def test_transformers_keeps_the_initial_weights(of_transformers, layers):
    expected = layers.Transformer(1, 64, 4, max_seq_len=8).layers[0].ffn.w1.weight
    found = of_transformers[1].transformer.layers[0].ffn.w1.weight
    torch.testing.assert_close(found.std(), expected.std(), rtol=0.05, atol=0)


def test_peft_merges_adapters(layers):
    peft = pytest.importorskip("peft")
    model = build(layers)
    x = torch.randn(2, 9, 64)
    expected = model(x)
    config = peft.LoraConfig(target_modules=["q_proj", "w1"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    found = adapted(x)
    assert not torch.allclose(found, expected)
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(merged(x), found, rtol=1e-4, atol=1e-4)


def test_torchao_quantizes_weights(layers):
    quantization = pytest.importorskip("torchao.quantization")
    model = build(layers)
    x = torch.randn(2, 9, 64)
    expected = model(x)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    error = (model(x) - expected).norm() / expected.norm()
    assert 0 < error < 0.05


def test_safetensors_saves_and_loads_the_model(layers, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model = build(layers)
    safetensors.save_model(model, str(tmp_path / "model.safetensors"))
    loaded = layers.Transformer(2, 64, 4, num_kv_heads=2, max_seq_len=32)
    safetensors.load_model(loaded, str(tmp_path / "model.safetensors"))
    x = torch.randn(2, 9, 64)
    assert torch.equal(loaded(x), model(x))


def test_averaged_model_averages_weights_and_keeps_the_table(layers):
    model = build(layers)
    averaged = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    before = copy.deepcopy(model)
    for _ in range(2):
        averaged.update_parameters(model)
        with torch.no_grad():
            for weight in model.parameters():
                weight += 1
    with torch.no_grad():
        for weight in before.parameters():
            weight += 0.5
    x = torch.randn(2, 9, 64)
    torch.testing.assert_close(averaged(x), before(x), rtol=1e-4, atol=1e-4)


def test_torch_compiles_and_exports_copies(layers):
    model = nn.Sequential(build(layers))
    x = torch.randn(2, 9, 64)
    expected = model(x)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), expected)
    exported = torch.export.export(model, (x,)).module()
    torch.testing.assert_close(exported(x), expected)
