"""Errors of layers and of RoPE are those that the formulas predict."""

import sys
from unittest.mock import Mock

import exactness
import pytest
import torch
from exactness import GRADIENTS, OUTPUTS
from peers import ropes
from peers.projects import is_installed

from tinyblock import apply_rope

CPU = torch.device("cpu")
ROPES = ropes.OWN_ROPES | ropes.PROJECT_ROPES

pytestmark = pytest.mark.filterwarnings("ignore")  # the projects warn


@pytest.mark.parametrize("name", ROPES)
def test_each_rope_is_equation_8_at_near_positions(name, monkeypatch):
    monkeypatch.setattr(ropes, "MAX_SEQ_LEN", 16)
    if name in ropes.PROJECT_ROPES and not is_installed(name):
        pytest.skip(f"{name} is not installed")
    x = torch.randn(1, 2, 9, ropes.D_HEAD)
    positions = torch.arange(9)
    exponents = torch.arange(0, ropes.D_HEAD, 2, dtype=torch.float64) / ropes.D_HEAD
    angles = torch.outer(positions.double(), 10000**-exponents)
    expected = apply_rope(x.double(), angles).float()
    actual = ROPES[name]()(x, positions)
    atol = 0 if name == "exact" else 1e-5
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=atol)


def test_only_the_rope_of_tinyblock_is_exact_at_a_million(monkeypatch):
    monkeypatch.setattr(exactness, "SEEDS", range(1))
    monkeypatch.setattr(exactness, "STARTS", exactness.STARTS[-1:])
    monkeypatch.setattr(exactness, "PROJECT_ROPES", {})
    errors = exactness.rope_errors(torch.float32, CPU)
    for what in (OUTPUTS, GRADIENTS):
        [ours] = errors["RoPE at 1,048,448", "tinyblock", what]
        [meta] = errors["RoPE at 1,048,448", "Meta's formula", what]
        assert ours < torch.finfo(torch.float32).eps
        assert meta > 1e-3


def test_error_is_relative_and_gradients_have_their_own():
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
    [output] = errors["layer", "wrong", OUTPUTS]
    [gradient] = errors["layer", "wrong", GRADIENTS]
    assert output == pytest.approx(0.25, rel=0.02)
    assert gradient == pytest.approx(1)
    assert errors["layer", "rounded", OUTPUTS] == [0.0]


def test_command_prints_medians_of_layers_and_draws_ropes(
    monkeypatch, tmp_path, capsys
):
    """In float32, results in float32 would not differ from those that are rounded."""
    path = tmp_path / "rope.png"
    monkeypatch.setattr(sys, "argv", ["exactness.py", "--plot", str(path)])
    monkeypatch.setattr(exactness, "PROJECTS", {})
    monkeypatch.setattr(exactness, "PROJECT_ROPES", {})
    monkeypatch.setattr(exactness, "STARTS", [0])
    exactness.main()
    assert path.stat().st_size > 10_000
    sections = capsys.readouterr().out.split("## ")
    for dtype, eps in (("float32", 2**-24), ("bfloat16", 2**-8)):
        for what in (OUTPUTS, GRADIENTS):
            [text] = [each for each in sections if each.startswith(f"{dtype}, {what}")]
            for line in text.splitlines()[4:8]:  # RMSNorm, SwiGLU, attention, Block
                rounded, ours = map(float, line.split("|")[2:4])
                assert 0.2 * eps < rounded < 0.6 * eps
                assert rounded < 1.01 * ours < 20 * eps
    found = {("Block", "tinyblock", OUTPUTS): [3e-3, 1e-3, 2e-3]}
    assert "2.00e-03" in exactness.table("bfloat16", found, OUTPUTS)


def test_logits_of_a_real_model_are_compared_with_those_of_transformers(
    monkeypatch, tmp_path
):
    transformers = pytest.importorskip("transformers")
    real_model = pytest.importorskip("peers.real_model")
    tokens = Mock(input_ids=torch.arange(300)[None] % 6)
    monkeypatch.setattr(transformers, "AutoTokenizer", Mock(return_value=tokens))
    loaded = Mock(return_value=lambda text, return_tensors: tokens)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", loaded)
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
