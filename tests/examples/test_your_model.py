"""Copied layers inside other people's models: the hosts that docs/your_model.md names."""

import importlib
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from float64 import in_float64
from pages import block_with, name_of, tables
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from tinyblock import SwiGLU, Transformer, copies

PAGE = Path(__file__).parents[2] / "docs" / "your_model.md"
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
    """A PreTrainedModel whose `_init_weights` is the page's."""
    transformers = pytest.importorskip(
        "transformers", reason="requires the extra examples"
    )
    page: dict[str, Any] = {"PreTrainedModel": transformers.PreTrainedModel}
    exec(block_with(PAGE, "class MyModel(PreTrainedModel)"), page)
    base: Any = page["MyModel"]

    class Model(base):  # type: ignore[misc]
        config_class = transformers.PreTrainedConfig

        def __init__(self, config):
            super().__init__(config)
            self.transformer = layers.Transformer(2, 64, 4, max_seq_len=128)
            self.head = nn.Linear(64, 256, bias=False)
            self.post_init()

    return Model(transformers.PreTrainedConfig())


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
    walk(model)
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


# --- Your checkpoint ----------------------------------------------------------------------


class NanoBlock(nn.Module):
    """The block of nanoGPT, with bias=False and without dropout."""

    def __init__(self, config):
        super().__init__()
        width = config.n_embd
        self.n_head = config.n_head
        self.ln_1 = nn.LayerNorm(width, bias=False)
        self.attn = nn.ModuleDict(
            {
                "c_attn": nn.Linear(width, 3 * width, bias=False),
                "c_proj": nn.Linear(width, width, bias=False),
            }
        )
        self.ln_2 = nn.LayerNorm(width, bias=False)
        self.mlp = nn.ModuleDict(
            {
                "c_fc": nn.Linear(width, 4 * width, bias=False),
                "c_proj": nn.Linear(4 * width, width, bias=False),
            }
        )

    def forward(self, x):
        batch, seq, width = x.shape
        qkv = self.attn["c_attn"](self.ln_1(x)).split(width, dim=2)
        q, k, v = (
            each.view(batch, seq, self.n_head, width // self.n_head).transpose(1, 2)
            for each in qkv
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(batch, seq, width)
        x = x + self.attn["c_proj"](y)
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x))))


class NanoGPT(nn.Module):
    def __init__(self, config, block=NanoBlock):
        super().__init__()
        embedding = nn.Embedding(50, config.n_embd)
        self.transformer: Any = nn.ModuleDict(
            {
                "wte": embedding,
                "wpe": nn.Embedding(32, config.n_embd),
                "h": nn.ModuleList([block(config) for _ in range(2)]),
                "ln_f": nn.LayerNorm(config.n_embd, bias=False),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, 50, bias=False)
        self.lm_head.weight = embedding.weight

    def forward(self, tokens, targets):
        positions = torch.arange(tokens.shape[1])
        x = self.transformer.wte(tokens) + self.transformer.wpe(positions)
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.usefixtures("layers")
def test_a_checkpoint_of_nanogpt_has_an_equal_loss():
    page: dict[str, Any] = {}
    exec(block_with(PAGE, "def renamed"), page)
    config = SimpleNamespace(n_embd=64, n_head=4)
    theirs = NanoGPT(config).double()
    for weight in theirs.parameters():
        nn.init.normal_(weight, mean=float(weight.ndim == 1), std=0.2)
    ours = NanoGPT(config, page["block"]).double()
    compiled = {f"_orig_mod.{name}": each for name, each in theirs.state_dict().items()}
    state = page["renamed"](compiled)
    ours.load_state_dict(state)
    tokens, targets = torch.randint(50, (2, 3, 20))
    torch.testing.assert_close(
        ours(tokens, targets), theirs(tokens, targets), rtol=2.0**-40, atol=0
    )
    # An RMSNorm takes the same weights, and computes something else.
    layers = sys.modules["my_package.layers.block"]
    for block in ours.transformer.h:
        block.ln1 = layers.RMSNorm(64, dtype=torch.float64)
    assert str(ours.load_state_dict(state)) == "<All keys matched successfully>"
    assert abs(ours(tokens, targets) / theirs(tokens, targets) - 1) > 1e-4
    with_bias = {
        **theirs.state_dict(),
        "transformer.h.0.attn.c_attn.bias": state["transformer.h.0.attn.q_proj.weight"],
    }
    with pytest.raises(RuntimeError, match=r"Unexpected key.*q_proj\.bias"):
        ours.load_state_dict(page["renamed"](with_bias))


def test_rows_of_phi3_are_divided_as_the_table_says():
    transformers = pytest.importorskip(
        "transformers", reason="requires the extra examples"
    )
    rows = {
        name_of(row): row["rows"]
        for table in tables(PAGE.read_text())
        for row in table
        if "your weight" in row
    }
    assert rows["qkv_proj`, as in Phi-3"].startswith("heads * d_head, then twice")
    assert rows["gate_up_proj`, as in Phi-3"] == "two equal parts, in this order"
    pattern = rows["q_proj`, `k_proj` with RoPE of transformers"]
    config = transformers.Phi3Config(
        vocab_size=50,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    with in_float64():
        theirs = transformers.Phi3Model(config)
    state = theirs.state_dict()
    q, k, v = state.pop("layers.0.self_attn.qkv_proj.weight").split([64, 32, 32])
    w1, w3 = state.pop("layers.0.mlp.gate_up_proj.weight").chunk(2)
    names = {
        "norm": "ln_final",
        "layers.0.input_layernorm": "layers.0.ln1",
        "layers.0.post_attention_layernorm": "layers.0.ln2",
        "layers.0.self_attn.o_proj": "layers.0.attn.output_proj",
        "layers.0.mlp.down_proj": "layers.0.ffn.w2",
    }
    ours = Transformer(
        1, 64, 4, 96, num_kv_heads=2, max_seq_len=32, eps=config.rms_norm_eps
    ).double()
    ours.load_state_dict(
        {f"{our}.weight": state[f"{their}.weight"] for their, our in names.items()}
        | {
            "layers.0.attn.q_proj.weight": rearrange(q, pattern, pair=2, half=8),
            "layers.0.attn.k_proj.weight": rearrange(k, pattern, pair=2, half=8),
            "layers.0.attn.v_proj.weight": v,
            "layers.0.ffn.w1.weight": w1,
            "layers.0.ffn.w3.weight": w3,
        }
    )
    with in_float64():
        expected = theirs(inputs_embeds=X.double()).last_hidden_state
    torch.testing.assert_close(ours(X.double()), expected, rtol=2.0**-40, atol=2.0**-40)


# --- Weight decay and dropout -------------------------------------------------------------


def decayed(trainer):
    """Return the names of the weights that an optimizer decays."""
    groups = trainer.create_optimizer().param_groups
    ids = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    return {name for name, p in trainer.model.named_parameters() if id(p) in ids}


def test_a_trainer_decays_norm_weights_unless_groups_go_by_ndim(model, tmp_path):
    transformers = pytest.importorskip(
        "transformers", reason="requires the extra examples"
    )
    page: dict[str, Any] = {}
    exec(block_with(PAGE, "get_decay_parameter_names"), page)
    arguments = transformers.TrainingArguments(
        str(tmp_path), weight_decay=0.1, use_cpu=True, report_to=[]
    )
    by_names = decayed(transformers.Trainer(model, arguments))
    by_ndim = decayed(page["MyTrainer"](model, arguments))
    norms = {name for name, weight in model.named_parameters() if weight.ndim == 1}
    assert by_names & norms == norms
    assert by_ndim == {name for name, _ in model.named_parameters()} - norms
    assert "leave 0.61 of" in " ".join(PAGE.read_text().split())
    assert round((1 - 1e-3 * 0.1) ** 5000, 2) == 0.61


def test_dropout_of_a_copy_keeps_the_mean_and_the_result_of_evaluation(layers):
    """The page's three lines make the edit."""
    lines = block_with(PAGE, "dropout_p=").splitlines()
    option, attribute, argument = (line.partition("  #")[0] for line in lines)
    original = sys.modules[layers.__name__.replace("transformer", "attention")]
    source = Path(str(original.__file__)).read_text()
    for before, added in (
        ("        eps: float = 1e-5,\n", f"{option}\n"),
        ("        super().__init__()\n", f"{attribute}\n"),
        ("is_causal=is_causal,", argument),
    ):
        assert source.count(before) == 1
        source = source.replace(before, before + added)
    names: dict[str, Any] = {"__name__": "edited"}
    exec(source, names)
    edited = names["CausalMultiHeadSelfAttention"](64, 4, dropout=0.5)
    plain = original.CausalMultiHeadSelfAttention(64, 4)
    plain.load_state_dict(edited.state_dict())
    x = X[:1].expand(4000, -1, -1)
    expected = plain(X[:1])
    assert torch.equal(edited.eval()(X[:1]), expected)
    drawn = edited.train()(x)
    error = (drawn.mean(0) - expected[0]).norm() / expected.norm()
    spread = (drawn - expected).norm() / (4000**0.5 * expected.norm())
    assert spread > 0.3
    assert error < 5 * spread / 4000**0.5


# --- Weights of adapted layers ------------------------------------------------------------


def walk(model):
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def test_a_walk_fills_the_zeros_of_an_adapter_and_not_the_weights_of_weight_norm(model):
    peft = pytest.importorskip("peft", reason="requires the extra examples")
    normalized = model.layers[0].attn.v_proj
    weight_norm(normalized)
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    adapted = model.layers[0].attn.q_proj
    before = normalized.weight.clone()
    walk(adapted)
    walk(normalized)
    assert torch.equal(normalized.weight, before)
    assert adapted.lora_B["default"].weight.abs().max() > 0
    adapted.reset_lora_parameters("default", True)
    assert (adapted.lora_B["default"].weight == 0).all()
