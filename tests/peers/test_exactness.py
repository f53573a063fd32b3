"""Errors of layers and of RoPE are those that the formulas predict."""

import sys
from unittest.mock import Mock

import exactness
import pytest
import torch
from exactness import GRADIENTS, OUTPUTS
from peers import ropes

CPU = torch.device("cpu")

pytestmark = pytest.mark.filterwarnings("ignore")  # the projects warn


def test_layers_and_near_ropes_have_the_errors_of_their_dtype(monkeypatch, capsys):
    """The RoPEs of transformers and other projects are included, if they are installed."""
    monkeypatch.setattr(sys, "argv", ["exactness.py"])
    monkeypatch.setattr(exactness, "STARTS", [0])
    monkeypatch.setattr(ropes, "MAX_SEQ_LEN", 128)
    exactness.main()
    _, *sections = capsys.readouterr().out.split("## ")
    precisions = [2**-24, 2**-24, 2**-8, 2**-8, 2**-11, 2**-11]
    for section, eps in zip(sections, precisions, strict=True):
        assert "| RoPE at 0 " in section
        for line in section.splitlines()[4:9]:
            cells = line.split("|")[2:-1]
            rounded, *errors = [float(cell) for cell in cells if cell.strip()]
            assert 0.2 * eps < rounded < 0.6 * eps, line
            assert errors[0] < 20 * eps, line
            assert rounded < 1.01 * min(errors), section
            assert max(errors) < 200 * eps, section
    found = {("Block", "tinyblock", GRADIENTS): [3e-3, 1e-3, 2e-3]}
    assert "2.00e-03" in exactness.table("bfloat16", found, GRADIENTS)


def test_option_plot_saves_a_picture_of_all_dtypes(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib", reason="requires the extra dev")
    path = tmp_path / "rope.png"
    monkeypatch.setattr(sys, "argv", ["exactness.py", "--plot", str(path)])
    monkeypatch.setattr(exactness, "STARTS", [0])
    monkeypatch.setattr(exactness, "layer_errors", lambda dtype, device: {})
    errors = {("RoPE at 0", "ours", OUTPUTS): [1.0]}
    monkeypatch.setattr(exactness, "rope_errors", lambda dtype, device: errors)
    plot = Mock(wraps=exactness.plot)
    monkeypatch.setattr(exactness, "plot", plot)
    exactness.main()
    plot.assert_called_once_with(
        path, {"float32": errors, "bfloat16": errors, "float16": errors}
    )
    assert path.read_bytes().startswith(b"\x89PNG")


def test_plot_shows_errors_of_outputs_over_positions(monkeypatch, tmp_path):
    matplotlib = pytest.importorskip(
        "matplotlib.figure", reason="requires the extra dev"
    )
    drawn = []
    monkeypatch.setattr(
        matplotlib.Figure, "savefig", lambda figure, path: drawn.append(figure)
    )
    monkeypatch.setattr(exactness, "STARTS", [0, 1024])
    errors = {
        ("RoPE at 0", "ours", OUTPUTS): [3e-8, 1e-8, 2e-8],
        ("RoPE at 1,024", "ours", OUTPUTS): [4e-8, 4e-8, 4e-8],
        ("RoPE at 0", "ours", GRADIENTS): [1.0],
        ("RoPE at 1,024", "ours", GRADIENTS): [1.0],
    }
    exactness.plot(tmp_path / "rope.png", {"float32": errors, "bfloat16": errors})
    left, right = drawn[0].axes
    assert (left.get_title(), right.get_title()) == ("float32", "bfloat16")
    assert left.get_xlabel() == "position in tokens"
    assert left.get_ylabel() == "relative error of RoPE"
    assert (left.get_xscale(), left.get_yscale()) == ("log", "log")
    [line] = left.get_lines()
    assert line.get_label() == "ours"
    assert list(line.get_xdata()) == [64, 1088]  # the middles of 128 positions
    assert list(line.get_ydata()) == [2e-8, 4e-8]


def test_only_the_rope_of_tinyblock_is_exact_at_a_million(monkeypatch):
    monkeypatch.setattr(exactness, "SEEDS", range(1))
    monkeypatch.setattr(exactness, "STARTS", exactness.STARTS[-1:])
    monkeypatch.setattr(exactness, "PROJECT_ROPES", {})
    errors = exactness.rope_errors(torch.float32, CPU)
    [ours] = errors["RoPE at 1,048,448", "tinyblock", OUTPUTS]
    [meta] = errors["RoPE at 1,048,448", "Meta's formula", OUTPUTS]
    assert ours < torch.finfo(torch.float32).eps
    assert meta > 1e-3


def test_error_is_relative_and_gradients_have_their_own():
    errors = exactness.defaultdict(list)
    x = torch.randn(4, 8, dtype=torch.bfloat16)

    def wrong(x):
        return 1.25 * x.detach() + 2 * (x - x.detach())

    exactness.record(errors, "layer", {"exact": lambda x: 1 * x, "wrong": wrong}, x)
    [output] = errors["layer", "wrong", OUTPUTS]
    [gradient] = errors["layer", "wrong", GRADIENTS]
    assert output == pytest.approx(0.25, rel=0.02)
    assert gradient == pytest.approx(1)
    assert errors["layer", "rounded", OUTPUTS] == [0.0]


def test_logits_of_a_real_model_are_compared_with_those_of_transformers(
    monkeypatch, tmp_path
):
    transformers = pytest.importorskip(
        "transformers", reason="requires the extra examples"
    )
    real_model = pytest.importorskip(
        "peers.real_model", reason="requires the extra examples"
    )
    tokenizer = Mock()
    tokenizer.return_value.input_ids = torch.arange(300)[None] % 6
    loaded = Mock(return_value=tokenizer)
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
