"""Errors of layers and of RoPE are those that the formulas predict."""

import runpy
import sys
from importlib.machinery import PathFinder
from itertools import pairwise
from pathlib import Path
from unittest.mock import Mock, patch

import exactness
import pytest
import torch
from exactness import GRADIENTS, OUTPUTS
from lab.sizes import Size
from peers import own, projects, ropes

CPU = torch.device("cpu")

pytestmark = pytest.mark.filterwarnings("ignore")  # the projects warn


def test_layers_and_near_ropes_have_the_errors_of_their_dtype(monkeypatch, capsys):
    """The RoPEs of transformers and other projects are included, if they are installed."""
    monkeypatch.setattr(sys, "argv", ["exactness.py"])
    monkeypatch.setattr(exactness, "SEEDS", range(1))
    monkeypatch.setattr(exactness, "STARTS", [0])
    monkeypatch.setattr(ropes, "MAX_SEQ_LEN", 128)
    exactness.main()
    _, *sections = capsys.readouterr().out.split("## ")
    eps_of = {
        "float32, outputs": 2**-24,
        "float32, gradients of the input": 2**-24,
        "bfloat16, outputs": 2**-8,
        "bfloat16, gradients of the input": 2**-8,
        "float16, outputs": 2**-11,
        "float16, gradients of the input": 2**-11,
    }
    assert [section.splitlines()[0] for section in sections] == list(eps_of)
    for section in sections:
        eps = eps_of[section.splitlines()[0]]
        lines = section.splitlines()[4:]  # below the title and the table's header
        rows = [line.split("|")[1].strip() for line in lines if line]
        assert rows[-1] == "RoPE at 0", section
        assert len(rows) >= 5, section
        for line in lines[:5]:
            cells = line.split("|")[2:-1]
            rounded, *errors = [float(cell) for cell in cells if cell.strip()]
            assert 0.2 * eps < rounded < 0.6 * eps, line
            assert errors[0] < 20 * eps, line
            assert rounded < 1.01 * min(errors), section
            assert max(errors) < 200 * eps, section


def test_a_cell_is_the_median_of_the_seeds():
    found = {
        ("Block", "tinyblock", GRADIENTS): [9e-3, 1e-3, 2e-3],
        ("Block", "tinyblock", OUTPUTS): [5e-3],
    }
    assert " 2.00e-03 |" in exactness.table("bfloat16", found, GRADIENTS)
    assert " 5.00e-03 |" in exactness.table("bfloat16", found, OUTPUTS)


def test_rope_is_measured_at_each_doubling_up_to_a_million():
    assert exactness.STARTS[0] == 0
    starts = exactness.STARTS[1:]
    assert starts[0] == exactness.SIZE.seq_len
    assert starts[-1] == 2**20 - exactness.SIZE.seq_len
    assert all(2 * a >= b > a for a, b in pairwise(starts))


def test_the_table_has_four_of_the_starts_of_rope():
    found = {("Block", "ours", OUTPUTS): [1.0]}
    for start in exactness.STARTS:
        found[exactness.rope_at(start), "ours", OUTPUTS] = [1.0]
    lines = exactness.table("float32", found, OUTPUTS).splitlines()
    assert [line.split("|")[1].strip() for line in lines[4:]] == [
        "Block",
        "RoPE at 0",
        "RoPE at 8,192",
        "RoPE at 131,072",
        "RoPE at 1,048,448",
    ]


def test_each_seed_has_its_own_numbers_and_the_same_in_each_run(monkeypatch):
    monkeypatch.setattr(exactness, "SIZE", Size(1, 3, d_model=8, num_heads=2, d_ff=8))
    monkeypatch.setattr(exactness, "PROJECTS", {})
    monkeypatch.setattr(exactness, "PROJECT_ROPES", {})
    monkeypatch.setattr(exactness, "STARTS", [0])
    monkeypatch.setattr(ropes, "MAX_SEQ_LEN", 128)
    for measure in (exactness.layer_errors, exactness.rope_errors):
        found = measure(torch.bfloat16, CPU)
        assert found, measure
        for (layer, project, what), errors in found.items():
            assert len(set(errors)) == 3, (layer, project, what, errors)
        assert measure(torch.bfloat16, CPU) == found


def test_the_eps_is_far_below_the_precision_as_in_a_norm_without_one():
    block = Mock(return_value=own.make_block(exactness.SIZE, torch.float32, CPU))
    with (
        patch.object(exactness, "make_block", block),
        patch.object(exactness, "SEEDS", range(1)),
        patch.object(exactness, "PROJECTS", {}),
    ):
        exactness.layer_errors(torch.float32, CPU)
    *_, seed, eps = block.call_args.args
    assert seed == 0
    assert 0 < eps < 1e-4 * torch.finfo(torch.float32).eps


def test_the_script_finds_the_repository_and_its_examples(monkeypatch):
    script = Path(exactness.__file__)
    monkeypatch.setattr(sys, "path", [str(script.parent)])  # as Python starts it
    runpy.run_path(str(script))
    for name in ("tinyblock", "hugging_face"):
        assert PathFinder.find_spec(name), name


def test_option_model_measures_the_logits_alone_on_one_thread(monkeypatch, capsys):
    real_model = pytest.importorskip(
        "peers.real_model", reason="requires the extra examples"
    )
    measure = Mock(return_value="the table")
    monkeypatch.setattr(real_model, "measure", measure)
    argv = ["exactness.py", "--model", "folder", "--device", "meta"]
    monkeypatch.setattr(sys, "argv", argv)
    torch.set_num_threads(2)
    try:
        exactness.main()
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(1)
    measure.assert_called_once_with("folder", torch.device("meta"))
    assert capsys.readouterr().out.endswith(
        "`exactness.py --model folder --device meta`\n\nthe table\n"
    )


def test_option_device_is_where_layers_and_ropes_are(monkeypatch):
    devices = []

    def note(dtype, device):
        devices.append(device.type)
        return {}

    monkeypatch.setattr(exactness, "layer_errors", note)
    monkeypatch.setattr(exactness, "rope_errors", note)
    left_out = Mock()
    monkeypatch.setattr(exactness, "print_left_out", left_out)
    monkeypatch.setattr(sys, "argv", ["exactness.py", "--device", "meta"])
    exactness.main()
    left_out.assert_called_once_with(exactness.PROJECTS, torch.device("meta"))
    assert devices == ["meta"] * 6


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
    pytest.importorskip("matplotlib", reason="requires the extra dev")
    drawn = []
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig", lambda figure, path: drawn.append(figure)
    )
    monkeypatch.setattr(exactness, "STARTS", [0, 1024])
    errors = {
        ("RoPE at 0", "ours", OUTPUTS): [9e-8, 1e-8, 2e-8],
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
    assert left.get_shared_y_axes().joined(left, right)  # only the left one has a scale
    [line] = left.get_lines()
    assert line.get_label() == "ours"
    assert list(line.get_xdata()) == [64, 1088]  # the middles of 128 positions
    assert list(line.get_ydata()) == [2e-8, 4e-8]
    assert [text.get_text() for text in left.get_legend().texts] == ["ours"]


@pytest.mark.parametrize("name", projects.installed(ropes.PROJECT_ROPES, CPU))
def test_the_rope_of_a_project_is_at_the_given_positions(name, monkeypatch):
    monkeypatch.setattr(ropes, "MAX_SEQ_LEN", 2048)
    x = torch.randn(1, 2, 5, ropes.D_HEAD)
    positions = torch.tensor([3, 1000, 0, 7, 2047])
    exact = ropes.formula(torch.float64)(x.double(), positions)
    found = ropes.PROJECT_ROPES[name]()(x, positions)
    assert own.relative_error(found, exact) < 1e-3


def test_only_the_rope_of_tinyblock_is_exact_at_a_million(monkeypatch):
    monkeypatch.setattr(exactness, "SEEDS", range(1))
    monkeypatch.setattr(exactness, "STARTS", exactness.STARTS[-1:])
    monkeypatch.setattr(exactness, "PROJECT_ROPES", {})
    for module in (exactness, ropes):  # smaller tables of a million positions
        monkeypatch.setattr(module, "D_HEAD", 8)
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
    tokenizer.return_value.input_ids = torch.arange(300)[None] % 7
    loaded = Mock(return_value=tokenizer)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", loaded)
    config = transformers.LlamaConfig(
        vocab_size=7,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=10_000,
    )
    model = transformers.LlamaForCausalLM(config)
    model.model.layers[0].self_attn.q_proj.weight.data *= 1000  # attention, not means
    model.save_pretrained(tmp_path)
    logits = Mock(wraps=real_model.logits)
    monkeypatch.setattr(real_model, "logits", logits)
    lines = real_model.measure(str(tmp_path), CPU).splitlines()
    calls = logits.call_args_list
    # In each of two dtypes, tinyblock's model and the exact one read eight texts, first
    # at the first positions, then at the last ones.
    last = [call.args[2][-1].item() for call in calls]
    at_the_start, at_the_end = [191] * (2 * 8), [9_999] * (2 * 8)
    assert last == (at_the_start + at_the_end) * 2
    first = {call.args[1][0, 0].item() for call in calls}
    assert first == {0}, "texts must be read from their first token on"
    names = ["float32, positions from 0", "float32, positions from 9,808"]
    names += ["bfloat16, positions from 0", "bfloat16, positions from 9,808"]
    assert [line.split("|")[1].strip() for line in lines[2:]] == names
    far = lines[3]
    ours, theirs, ratio = (float(cell.split()[0]) for cell in far.split("|")[2:5])
    assert 1e-8 < ours < 1e-6  # the exact logits are in float64
    assert ratio < 0.5
    assert ours / theirs == pytest.approx(ratio, rel=0.5)
    titles = [cell.strip() for cell in lines[0].split("|")[2:5]]
    assert titles == ["tinyblock", "transformers", "ratio"]
    for line in lines[4:]:
        ours, theirs, _ = (float(cell.split()[0]) for cell in line.split("|")[2:5])
        assert 1e-3 < ours < 1e-1, line
        assert 1e-3 < theirs < 1e-1, line


def test_a_gguf_file_is_read_by_both_projects(monkeypatch):
    transformers = pytest.importorskip(
        "transformers", reason="requires the extra examples"
    )
    real_model = pytest.importorskip(
        "peers.real_model", reason="requires the extra examples"
    )
    source = {
        "pretrained_model_name_or_path": Path("folder"),
        "gguf_file": "model.gguf",
    }
    monkeypatch.setattr(real_model, "MODULES", [])
    tokenizer = Mock()
    ours = Mock()
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", tokenizer)
    monkeypatch.setattr(real_model, "load", ours)
    load = Mock(side_effect=InterruptedError)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", load)
    with pytest.raises(InterruptedError):
        real_model.measure("folder/model.gguf", CPU)
    tokenizer.assert_called_once_with(**source)
    ours.assert_called_once_with("folder/model.gguf")
    load.assert_called_once_with(**source, dtype=torch.float32)


def test_a_cell_is_the_median_and_the_range_of_the_texts():
    real_model = pytest.importorskip(
        "peers.real_model", reason="requires the extra examples"
    )
    assert real_model.median_and_range([9.0, 1.0, 2.0], ".0f") == "2 (1 to 9)"
