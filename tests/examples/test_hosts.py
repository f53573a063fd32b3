"""Copied layers inside other people's models: the hosts that docs/hosts.md names."""

import importlib
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pages import block_with
from torch import nn

from tinyblock import SwiGLU, copies

PAGE = Path(__file__).parents[2] / "docs" / "hosts.md"
X = torch.linspace(-1, 1, 2 * 9 * 64).view(2, 9, 64)


@pytest.fixture(scope="module")
def layers(tmp_path_factory):
    """Copies of all layers in a package of a user's."""
    path = tmp_path_factory.mktemp("project")
    assert copies.main(["add", "transformer", "--to", f"{path}/my_package/layers"]) == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path)
        yield importlib.import_module("my_package.layers.transformer")
    for name in [name for name in sys.modules if name.startswith("my_package")]:
        del sys.modules[name]


@pytest.fixture
def model(layers):
    return layers.Transformer(2, 64, 4, num_kv_heads=2, max_seq_len=32)


@pytest.fixture
def of_transformers(layers):
    """The PreTrainedModel of the page."""
    pytest.importorskip("transformers", reason="requires the extra examples")
    names: dict[str, Any] = {"__name__": "my_model"}
    exec(block_with(PAGE, "class MyModel(PreTrainedModel)"), names)
    return names["MyModel"](names["MyConfig"]())


@pytest.mark.parametrize("device_map", [None, "auto"])
def test_transformers_loads_what_it_saved_and_initializes_what_is_missing(
    device_map, of_transformers, tmp_path
):
    """The second of two layers, the head, a bias, and a parameter beside a layer."""

    class Scaled(nn.Sequential):
        def __init__(self, *layers):
            super().__init__(*layers)
            self.scale = nn.Parameter(torch.empty(3))

        def reset_parameters(self):
            nn.init.ones_(self.scale)

    class Larger(type(of_transformers)):  # type: ignore[misc]
        def __init__(self, config):
            super().__init__(config)
            self.scaled = Scaled(nn.Identity())
            w1 = self.transformer.layers[0].ffn.w1
            w1.bias = nn.Parameter(torch.empty(w1.out_features))

    saved = {
        name: weight + 1
        for name, weight in of_transformers.bfloat16().state_dict().items()
        if not name.startswith(("transformer.layers.1.", "head."))
    }
    # It empties the dict that it gets.
    of_transformers.save_pretrained(tmp_path, state_dict=dict(saved))
    # Fill the memory that the next tensors get, of all sizes in the model.
    sizes = {weight.numel() for weight in of_transformers.parameters()}
    hoard = [
        torch.full((size,), 1e30, dtype=torch.bfloat16)
        for size in sizes
        for _ in range(300)
    ]
    del hoard
    loaded = Larger.from_pretrained(
        tmp_path, dtype=torch.bfloat16, device_map=device_map
    )
    assert torch.equal(
        loaded.transformer.rope.cos_sin, of_transformers.transformer.rope.cos_sin
    )
    for name, weight in loaded.state_dict().items():
        if name in saved:
            assert torch.equal(weight, saved[name]), name
        elif weight.ndim == 1:
            assert (weight == (0 if name.endswith("bias") else 1)).all(), name
        else:  # of the new layer as documented, of the head as torch's
            variance = 1 / 3 / 64 if name == "head.weight" else 2 / sum(weight.shape)
            size = float(weight.square().mean())
            assert abs(size / variance - 1) < 0.1, name


def test_swiglu_overflows_in_float16_as_in_transformers():
    """Its product is 256 * 256 here, and the greatest number in float16 is 65,504."""
    llama = pytest.importorskip(
        "transformers.models.llama.modeling_llama", reason="requires the extra examples"
    )
    config = llama.LlamaConfig(
        hidden_size=1, intermediate_size=1, num_attention_heads=1
    )
    for layer in (SwiGLU(1, 1), llama.LlamaMLP(config)):
        for weight in layer.parameters():
            nn.init.ones_(weight)
        for dtype, expected in ((torch.float16, math.inf), (torch.bfloat16, 65_536.0)):
            x = torch.full((1, 1), 256.0, dtype=dtype)
            assert layer.to(dtype)(x).item() == expected


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantize_dynamic_takes_only_plain_linear_layers(model):
    def quantized():
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear})

    expected = model(X)
    assert torch.equal(quantized()(X), expected)  # a release may change this
    code = block_with(PAGE, "module.__class__ = nn.Linear")
    exec(code, {"model": model, "nn": nn})
    error = (quantized()(X) - expected).norm() / expected.norm()
    assert 0 < error < 0.05


def test_a_walk_over_copied_layers_leaves_the_rest_of_nanogpt_alone(layers):
    """Its rule for weights is `_init_weights`, which it applies to each module."""

    class NanoGPT(nn.Module):
        def __init__(self):
            super().__init__()
            blocks = nn.ModuleList([layers.Block(64, 4) for _ in range(2)])
            embedding = nn.Embedding(50, 64)
            self.transformer: Any = nn.ModuleDict({"wte": embedding, "h": blocks})
            self.lm_head = nn.Linear(64, 50)
            exec(block_with(PAGE, "nanoGPT's rule"), {"self": self})

        def _init_weights(self, module: Any):
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, mean=0.0, std=0.02)

    model: Any = NanoGPT()
    own = [model.transformer["wte"].weight, model.lm_head.weight]
    assert all(0.019 < weight.std() < 0.021 for weight in own)
    weight = model.transformer["h"][1].attn.q_proj.weight
    assert abs(weight.std() - math.sqrt(2 / sum(weight.shape))) < 0.01
    # A walk over the whole model, against which the page warns, draws torch's weights.
    exec(block_with(PAGE, 'model.to_empty(device="cuda")').partition("\n")[2])
    assert own[0].std() > 0.9
    assert abs(own[1].std() - 1 / math.sqrt(3 * 64)) < 0.005


def test_safetensors_saves_and_loads_the_model(model, tmp_path):
    safetensors = pytest.importorskip(
        "safetensors.torch", reason="requires the extra examples"
    )
    path = str(tmp_path / "model.safetensors")
    safetensors.save_model(model, path)
    expected = model(X)
    for weight in model.parameters():
        weight.data.zero_()
    safetensors.load_model(model, path)
    assert torch.equal(model(X), expected)


def test_averaged_model_averages_weights_and_keeps_the_table(model):
    """The mean of w and 3 w is 2 w."""
    averaged = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    for factor in (1, 3):
        for weight in model.parameters():
            weight.data *= factor
        averaged.update_parameters(model)
    for weight in averaged.parameters():
        weight.data *= 3 / 2
    torch.testing.assert_close(averaged(X), model(X), rtol=1e-4, atol=1e-4)
