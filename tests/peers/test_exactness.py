"""Errors of layers and of RoPE are those that the formulas predict."""

import exactness
import pytest
import torch
from peers import ropes
from peers.projects import is_installed

from tinyblock import apply_rope

CPU = torch.device("cpu")
ROPES = ropes.OWN_ROPES | ropes.PROJECT_ROPES

pytestmark = pytest.mark.filterwarnings("ignore")  # the projects warn


def test_formula_of_rope_is_equation_8():
    x = torch.randn(1, 2, 3, ropes.D_HEAD, dtype=torch.float64)
    positions = torch.tensor([0, 7, 100])
    exponents = torch.arange(0, ropes.D_HEAD, 2, dtype=torch.float64) / ropes.D_HEAD
    angles = torch.outer(positions.double(), 10000**-exponents)
    actual = ropes.formula(torch.float64)(x, positions)
    torch.testing.assert_close(actual, apply_rope(x, angles))


@pytest.mark.parametrize("name", ROPES)
def test_rope_of_each_project_is_the_formula_at_near_positions(name, monkeypatch):
    monkeypatch.setattr(ropes, "MAX_SEQ_LEN", 16)
    if name in ropes.PROJECT_ROPES and not is_installed(name):
        pytest.skip(f"{name} is not installed")
    x = torch.randn(1, 2, 9, ropes.D_HEAD)
    positions = torch.arange(9)
    expected = ropes.formula(torch.float64)(x, positions)
    torch.testing.assert_close(ROPES[name]()(x, positions), expected, rtol=0, atol=1e-5)


def test_only_the_rope_of_tinyblock_is_exact_at_a_million(monkeypatch, tmp_path):
    monkeypatch.setattr(exactness, "SEEDS", range(1))
    monkeypatch.setattr(exactness, "STARTS", [0, exactness.STARTS[-1]])
    monkeypatch.setattr(exactness, "PROJECT_ROPES", {})
    errors = exactness.rope_errors(torch.float32, CPU)
    for what in (exactness.OUTPUTS, exactness.GRADIENTS):
        [ours] = errors["RoPE at 1,048,448", "tinyblock", what]
        [meta] = errors["RoPE at 1,048,448", "Meta's formula", what]
        assert ours < torch.finfo(torch.float32).eps
        assert meta > 1e-3
    exactness.plot(tmp_path / "rope.png", {"a": errors, "b": errors})
    assert (tmp_path / "rope.png").stat().st_size > 10_000


def test_error_is_relative_and_that_of_the_gradient_is_separate():
    errors = exactness.defaultdict(list)
    x = torch.randn(4, 8, dtype=torch.bfloat16)

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 1.25 * x

        @staticmethod
        def backward(ctx, dy):
            return 2 * dy

    runs = {"exact": lambda x: 1 * x, "wrong": Wrong.apply}
    exactness.record(errors, "layer", runs, x)
    [output] = errors["layer", "wrong", exactness.OUTPUTS]
    [gradient] = errors["layer", "wrong", exactness.GRADIENTS]
    assert output == pytest.approx(0.25, rel=0.02)
    assert gradient == pytest.approx(1)
    assert errors["layer", "rounded", exactness.OUTPUTS] == [0.0]


def test_layer_that_rounds_once_has_the_smallest_error(monkeypatch):
    monkeypatch.setattr(exactness, "SEEDS", range(1))
    monkeypatch.setattr(exactness, "PROJECTS", {})
    errors = exactness.layer_errors(torch.bfloat16, CPU)
    [ours] = errors["RMSNorm", "tinyblock", exactness.OUTPUTS]
    [rounded] = errors["RMSNorm", "rounded", exactness.OUTPUTS]
    assert ours == pytest.approx(rounded, rel=0.01)
    [block] = errors["Block", "tinyblock", exactness.OUTPUTS]
    assert rounded < block < 0.02
    found = {("Block", "tinyblock", exactness.OUTPUTS): [3e-3, 1e-3, 2e-3]}
    assert "2.00e-03" in exactness.table("bfloat16", found, exactness.OUTPUTS)


def test_exact_layers_are_in_float64(monkeypatch):
    """Otherwise, results in float32 would not differ from those that are rounded."""
    monkeypatch.setattr(exactness, "PROJECTS", {})
    errors = exactness.layer_errors(torch.float32, CPU)
    for layer in ("RMSNorm", "SwiGLU", "attention", "Block"):
        for what in (exactness.OUTPUTS, exactness.GRADIENTS):
            rounded = errors[layer, "rounded", what]
            assert len(rounded) == 3
            assert 1e-8 < min(rounded) < max(rounded) < 4e-8


def test_logits_of_a_real_model_are_compared_with_those_of_transformers(tmp_path):
    real_model = pytest.importorskip("peers.real_model")
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = {"?": 0, "the": 1, "a": 2, "of": 3, ".": 4, "is": 5}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.save_pretrained(tmp_path)
    config = transformers.LlamaConfig(
        vocab_size=6,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=10_000,
    )
    model = transformers.LlamaForCausalLM(config)
    model.model.layers[0].self_attn.q_proj.weight.data *= 1000  # attention, not means
    model.save_pretrained(tmp_path)
    lines = real_model.measure(str(tmp_path), CPU).splitlines()
    [far] = [line for line in lines if "float32, positions from 9,808" in line]
    ours, theirs, ratio = (float(cell.split()[0]) for cell in far.split("|")[2:5])
    assert 1e-8 < ours < 1e-6  # the exact logits are in float64
    assert ratio < 0.5
    assert ours / theirs == pytest.approx(ratio, rel=0.5)
    assert len(lines) == 6
    assert real_model.median_and_range([4.0, 1.0, 2.0], ".0f") == "2 (1 to 4)"
