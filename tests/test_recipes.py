"""The recipes of docs/recipes.md, run as they stand."""

import re
import sys
from pathlib import Path

import pytest
import torch

import tinyblock

RECIPES = dict(
    re.findall(
        r"^## (.*?)\n.*?^```python\n(.*?)^```",
        (Path(__file__).parents[1] / "docs" / "recipes.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
)


pytestmark = [
    pytest.mark.filterwarnings(
        "default::DeprecationWarning", "default::FutureWarning"
    ),  # of transformers' imports
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
]


def run(recipe):
    names = {}
    exec(RECIPES[recipe], names)
    return names


def sequence(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def test_recipe_of_a_mixture_of_experts_weights_the_two_best():
    layer, x = (
        run("A mixture of experts as the feed-forward layer")["model"]
        .layers[0]
        .ffn.double(),
        sequence(2, 7, 64),
    )
    for token, out in zip(x.flatten(0, 1), layer(x).flatten(0, 1), strict=True):
        probabilities = layer.router(token).softmax(-1).tolist()
        best = sorted(range(4), key=probabilities.__getitem__)[2:]
        total = sum(probabilities[expert] for expert in best)
        expected = sum(
            probabilities[expert] / total * layer.experts[expert](token)
            for expert in best
        )
        torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


def test_recipe_of_lora_trains_adapters_alone_and_merges_them():
    pytest.importorskip("peft")
    torch.manual_seed(0)
    plain = tinyblock.Transformer(2, d_model=64, num_heads=4, max_seq_len=128)
    torch.manual_seed(0)
    made = run("LoRA with peft")
    torch.testing.assert_close(
        made["merged"](made["x"]), made["adapted"], rtol=1e-4, atol=1e-5
    )
    assert (made["adapted"] - plain(made["x"])).abs().max() > 1e-3
    for (name, merged), before in zip(
        made["merged"].named_parameters(), plain.parameters(), strict=True
    ):
        assert torch.equal(merged, before) == ("ln" in name), name


def test_recipe_of_lora_over_processes_trains_the_adapters_of_one(monkeypatch, capsys):
    peft = pytest.importorskip("peft")
    monkeypatch.setenv("WORLD_SIZE", "1")
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        made = run("LoRA over several processes")
    finally:
        torch.distributed.destroy_process_group()
    torch.manual_seed(0)
    plain = tinyblock.Transformer(2, d_model=64, num_heads=4, max_seq_len=128)
    plain = peft.get_peft_model(plain, made["model"].peft_config["default"])
    optimizer = torch.optim.AdamW(plain.parameters())
    torch.manual_seed(0)
    for _ in range(2):
        x = torch.randn(4, 16, 64)
        (plain(x) - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = {
        name: weight.detach()
        for name, weight in plain.named_parameters()
        if weight.requires_grad
    }
    torch.testing.assert_close(made["adapters"], expected)
    assert capsys.readouterr().out == "trained 28 matrices of adapters\n"


@pytest.mark.filterwarnings("default")  # torchao's import has many
def test_recipe_of_int8_rounds_by_half_a_step_at_most():
    pytest.importorskip("torchao")
    made = run("Weights in int8 with torchao")
    pairs = zip(
        made["quantized"].named_parameters(), made["model"].parameters(), strict=True
    )
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
    monkeypatch.setattr(
        torch,
        "compile",
        lambda *args, **kwargs: compiler(*args, backend="eager", **kwargs),
    )
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
    model.zero_grad()
    x, saved = torch.randn(2, 9, 64), []
    for each in (model, plain):
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: saved[-1].append(t.nbytes) or t, lambda t: t
        ):
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
    with pytest.raises(TypeError, match=r"RotaryPositionalEmbedding\.forward"):
        rope.RotaryPositionalEmbedding(10000.0, 8, 16)(torch.randn(2, 9, 6))
