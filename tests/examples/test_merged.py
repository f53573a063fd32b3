"""Merged projections compute and hold what they did before, or raise an error."""

import copy
from typing import Any

import pytest
import torch
from language_model import CachedAttention, LanguageModel
from merged import merge
from static_cache import StaticCache
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from windows import WindowAttention

from tinyblock import FeedForward, SwiGLU


class WithBiases(CachedAttention):
    def __init__(self, *sizes, **options):
        super().__init__(*sizes, **options)
        for linear in (self.q_proj, self.k_proj, self.v_proj):
            linear.bias = nn.Parameter(torch.randn(linear.out_features))


class CachedWindow(CachedAttention, WindowAttention):
    pass


class Clamped(SwiGLU):
    def forward(self, x):
        return super().forward(x).clamp(-0.1, 0.1)


def scale_heads(x, token_positions):
    return x * torch.linspace(0.1, 2, x.shape[-3])[:, None, None]


MODELS: dict[str, dict[str, Any]] = {
    "a key head per head": {},
    "shared key heads, q/k norm and a head size": {
        "num_kv_heads": 2,
        "qk_norm": True,
        "d_head": 6,
    },
    "biases": {"attention": WithBiases, "num_kv_heads": 1},
    "windows": {"attention": CachedWindow, "window": 3},
    "no positions": {"theta": None},
    "a rope that tells heads apart": {"theta": None, "rope": scale_heads},
    "layers without a merged form": {"ffn": Clamped, "tied": True},
    "no gate": {"ffn": FeedForward},
}


def build(**options):
    return LanguageModel(37, 2, 32, 4, 40, max_seq_len=30, **options)


def held_bytes(model):
    storages = [weight.untyped_storage() for weight in model.parameters()]
    sizes = {each.data_ptr(): each.nbytes() for each in storages}
    return sum(sizes.values())


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
@torch.no_grad()
def test_a_merged_model_has_the_logits_the_memory_and_the_checkpoint_of_before(
    options, tmp_path
):
    model = build(**options)
    merged = copy.deepcopy(model)
    merge(merged)
    assert held_bytes(merged) == held_bytes(model)
    tokens = torch.randint(37, (2, 9))
    torch.testing.assert_close(merged(tokens), model(tokens))
    texts = [
        each.generate(tokens, 9, cache=make())
        for each in (model, merged)
        for make in (lambda: None, lambda: StaticCache(20))
    ]
    assert all(torch.equal(text, texts[0]) for text in texts)
    torch.save(merged.state_dict(), tmp_path / "merged.pt")
    loaded = build(**options)
    loaded.load_state_dict(torch.load(tmp_path / "merged.pt"))
    assert torch.equal(loaded(tokens), model(tokens))
    # Other weights reach the merged ones.
    other = build(**options)
    merged.load_state_dict(other.state_dict())
    torch.testing.assert_close(merged(tokens), other(tokens))


def test_q_k_v_and_both_parts_of_a_gate_are_one_product_each():
    """A block has four products with weights: these, and those of the results."""
    model = build()
    merge(model)
    with torch.profiler.profile() as profile:
        model(torch.tensor([[1]]))
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["aten::linear"] == 2 * 4 + 1  # and one with the head


@pytest.mark.filterwarnings("default::DeprecationWarning")  # of torchao's imports
@pytest.mark.parametrize("name", ["q_proj", "v_proj", "w3"])
def test_a_projection_that_is_not_plain_raises(name):
    """Its own weight alone is not what it computes, before a merge or after it."""
    peft = pytest.importorskip("peft", reason="requires the extra examples")
    torchao = pytest.importorskip("torchao", reason="requires the extra examples")
    int8 = torchao.quantization.Int8WeightOnlyConfig()
    path = f"transformer.layers.1.{'ffn' if name == 'w3' else 'attn'}.{name}"
    changes = (
        lambda model: peft.get_peft_model(
            model, peft.LoraConfig(target_modules=[name])
        ),
        lambda model: torchao.quantization.quantize_(
            model, int8, lambda _, each: each == path
        ),
        lambda model: weight_norm(model.get_submodule(path)),
        lambda model: model.get_submodule(path).register_forward_hook(print),
    )
    for change in changes:
        changed, merged = build(), build()
        change(changed)
        with pytest.raises(ValueError, match="must be plain and without hooks"):
            merge(changed)
        merge(merged)
        change(merged)
        with pytest.raises(ValueError, match="must be plain and without hooks"):
            merged(torch.tensor([[1]]))


def test_a_weight_of_two_layers_raises():
    """The second merge would take it away from the first."""
    model = build()
    first, second = (each.attn for each in model.transformer.layers)
    second.q_proj.weight = first.q_proj.weight
    with pytest.raises(ValueError, match="must not be shared"):
        merge(model)


def given_weights_of_one_storage(model):
    """Load weights as from a file that is mapped to memory, as by safetensors."""
    weights = sorted(build().state_dict().items())
    whole = torch.cat([weight.flatten() for _, weight in weights])
    parts = whole.split([weight.numel() for _, weight in weights])
    pairs = zip(weights, parts, strict=True)
    views = {name: part.view_as(weight) for (name, weight), part in pairs}
    model.load_state_dict(views, assign=True)
    return model


@pytest.mark.parametrize(
    "change",
    [
        copy.deepcopy,
        given_weights_of_one_storage,
        lambda model: model.double(),
        lambda model: (
            model.load_state_dict(build().state_dict(), assign=True) and model
        ),
    ],
    ids=["copied", "given weights of one storage", "cast", "given new weights"],
)
def test_weights_that_do_not_lie_together_any_more_raise(change):
    model = build()
    merge(model)
    changed = change(model)
    with pytest.raises(ValueError, match="must lie one after another"):
        changed(torch.tensor([[1]]))
    merge(changed)
    changed(torch.tensor([[1]]))
