"""`verify` says of each property of a copy whether it holds."""

import re
import sys
from pathlib import Path

import pytest
import torch
from contract.copying import copy_layers

from tinyblock.contract.harness import PROPERTIES
from tinyblock.contract.verify import verify

BAD = "bad hyperparameters refused"


def test_verify_passes_a_pristine_copy_and_says_where_an_edited_one_fails(tmp_path, monkeypatch, capsys):
    folder = copy_layers(tmp_path / "layers", "rmsnorm")
    monkeypatch.chdir(tmp_path)
    assert verify("layers", []) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"rmsnorm: {Path('layers', 'rmsnorm.py')}\n  ok    equation and gradients in float64\n")
    held, skipped = out.count("  ok    "), 0 if torch.cuda.is_available() else 1  # the equation there
    assert out.endswith(f"\n{held} hold, 0 fail, {skipped} skipped\n")

    copy_layers(folder, "rmsnorm", edits=[("rmsnorm", "0 < eps", "0 <= eps")])
    assert verify(str(folder / "rmsnorm.py"), []) == 1
    out = capsys.readouterr().out
    assert f"  FAIL  {BAD}: RMSNorm(4, 0.0): was accepted, expected an error\n" in out
    assert out.endswith(f"\n{held - 1} hold, 1 fail, {skipped} skipped\n")
    assert verify(str(folder), [BAD]) == 0
    assert f"  skip  {BAD}: as you asked\n" in capsys.readouterr().out


def test_verify_skips_what_a_copy_dropped_and_a_property_of_one_layer_only(tmp_path, capsys):
    text = (copy_layers(tmp_path, "rmsnorm", "ffn") / "rmsnorm.py").read_text(encoding="utf-8")
    function = re.search(r"^def rms_norm\(.*?(?=^class )", text, re.MULTILINE | re.DOTALL)[0]
    (tmp_path / "rmsnorm.py").write_text(text.replace(function, ""), encoding="utf-8")
    assert verify(str(tmp_path), ["rmsnorm: autocast", "keys of the state dict"]) == 0
    out = capsys.readouterr().out
    assert "  skip  rms_norm: equation and gradients: rms_norm is not in this copy\n" in out
    assert re.findall(r"^  skip  (.*): as you asked$", out, re.MULTILINE) == ["autocast", "keys of the state dict"]
    assert out.index("rmsnorm: ") < out.index("\nffn: ")
    with pytest.raises(LookupError, match=r"no property 'causality' to skip here: did you mean '.*'\?$"):
        verify(str(tmp_path), ["autocast", "causality"])


def test_verify_of_attention_alone_borrows_rope(tmp_path, monkeypatch, capsys):
    edit = (
        "attention",
        "self.rope(q, token_positions), self.rope(k, token_positions)",
        "q, self.rope(k, token_positions)",
    )
    copy_layers(tmp_path, "attention", edits=[edit])
    names = {promised.name for promised in PROPERTIES if promised.layer == "attention"}
    chosen = {"relative positions only (with RoPE)", "keys of the state dict"}
    assert verify(str(tmp_path), sorted(names - chosen)) == 1
    out = capsys.readouterr().out
    assert out.startswith(f"attention: {tmp_path / 'attention.py'} (with the rope of tinyblock)\n")
    assert "  FAIL  relative positions only (with RoPE): " in out
    assert "  ok    keys of the state dict\n" in out


def test_verify_does_not_pass_over_a_class_of_another_name(tmp_path, capsys):
    renamed = [
        ("rmsnorm", "class RMSNorm(nn.Module)", "class Norm(nn.Module)"),
        ("rmsnorm", '["RMSNorm", ', '["Norm", '),
    ]
    copy_layers(tmp_path, "rmsnorm", edits=renamed)
    (tmp_path / "block.py").write_text("class DecoderLayer: ...\n")
    assert verify(str(tmp_path), []) == 1
    out = capsys.readouterr().out
    assert "  FAIL  RMSNorm is there: rmsnorm.py does not define it, and it is not verified\n" in out
    assert "  FAIL  Block is there: block.py does not define it, and it is not verified\n" in out


@pytest.mark.parametrize(
    "target", ["tinyblock.rmsnorm", "host.layers.rmsnorm", "host/layers/rmsnorm.py", "host.layers"]
)
def test_verify_takes_a_file_and_a_dotted_name(target, tmp_path, monkeypatch, capsys):
    copy_layers(tmp_path / "host", "rmsnorm", edits=[("rmsnorm", "import math", "import host.layers.rmsnorm, math")])
    copy_layers(tmp_path / "host" / "layers", "rmsnorm")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert verify(target, [promised.name for promised in PROPERTIES if promised.layer == "rmsnorm"]) == 0
    assert re.match(r"rmsnorm: \S*(host|layers|tinyblock).rmsnorm.py\n  skip ", capsys.readouterr().out)


@pytest.mark.parametrize("target", ["nowhere/layers", "nowhere.layers", "tinyblock.nothing", "sys", "", "data.zip"])
def test_verify_says_in_one_line_what_is_not_there(target, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(LookupError, match=r"^\S* (is not there: give a folder|holds no layer)") as caught:
        verify(target, [])
    assert "\n" not in str(caught.value)


def test_verify_of_a_folder_without_layers_names_what_it_looks_for(tmp_path):
    (tmp_path / "text.py").write_text("x = 1")
    with pytest.raises(LookupError, match=r"holds no layer, none of .*RMSNorm.*: give the folder or the file"):
        verify(str(tmp_path), [])
