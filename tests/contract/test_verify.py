"""`verify` reports which properties a copy violates, and which it could not check."""

import re
import sys
from pathlib import Path

import pytest
import torch
from contract.copying import copy_layers

from tinyblock.contract.harness import PROPERTIES
from tinyblock.contract.verify import verify

REJECTED = "invalid hyperparameters rejected"


def all_but(layer, *names):
    """Return the names of the other properties of a layer, to skip them."""
    return [
        f"{layer}: {prop.name}"
        for prop in PROPERTIES
        if prop.layer == layer and prop.name not in names
    ]


def test_verify_prints_only_the_failures_of_a_copy_and_everything_if_verbose(
    tmp_path, monkeypatch, capsys
):
    folder = copy_layers(tmp_path / "layers", "rmsnorm")
    monkeypatch.chdir(tmp_path)
    skip = ["compiles*", "*CUDA"]
    assert verify("layers", skip) == 0
    pristine = capsys.readouterr().out
    header = f"rmsnorm: {Path('layers', 'rmsnorm.py')}\n"
    assert re.fullmatch(
        rf"{re.escape(header)}(\d+) hold, 0 fail, 2 skipped, 0 not judged\n", pristine
    )
    assert verify("layers", skip, verbose=True) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{header}  ok    keys of the state dict\n")
    assert "  skip  compiles to one graph: as requested\n" in out
    assert f"\n{out.count('  ok    ')} hold, 0 fail, 2 skipped, 0 not judged\n" in out

    copy_layers(folder, "rmsnorm", edits=[("rmsnorm", "0 < eps", "0 <= eps")])
    assert verify(str(folder / "rmsnorm.py"), skip) == 1
    failure = f"  FAIL  {REJECTED}: RMSNorm(d_model=4, eps=0.0): was accepted, expected an error\n"
    assert capsys.readouterr().out.startswith(header + failure)
    assert verify(str(folder), [*skip, "rmsnorm: invalid*"]) == 0


def test_verify_reports_what_a_copy_lacks_and_rejects_names_that_match_nothing(
    tmp_path, capsys
):
    text = (copy_layers(tmp_path, "rmsnorm") / "rmsnorm.py").read_text(encoding="utf-8")
    function = re.search(
        r"^def rms_norm\(.*?(?=^class )", text, re.MULTILINE | re.DOTALL
    )[0]
    (tmp_path / "rmsnorm.py").write_text(text.replace(function, ""), encoding="utf-8")
    names = ["rms_norm: equation and gradients", "keys of the state dict"]
    assert verify(str(tmp_path), all_but("rmsnorm", *names)) == 0
    out = capsys.readouterr().out
    assert (
        f"  note  rms_norm is not in this copy; not checked, or only in part: {names[0]}\n"
        in out
    )
    with pytest.raises(
        LookupError, match=r"no property matches 'causalty': did you mean '.*'\?$"
    ):
        verify(str(tmp_path), ["autocast", "causalty"])


def test_verify_fails_for_a_layer_of_another_name(tmp_path, capsys):
    renamed = [
        ("rmsnorm", old, old.replace("RMSNorm", "Norm"))
        for old in ("class RMSNorm(", '["RMSNorm", ')
    ]
    copy_layers(tmp_path, "rmsnorm", edits=renamed)
    (tmp_path / "block.py").write_text("class DecoderLayer: ...\n")
    (tmp_path / "transformer.py").write_text("def stack(): ...\n")
    assert verify(str(tmp_path), ["compiles*"]) == 1
    out = capsys.readouterr().out
    for file, name in {
        "rmsnorm": "RMSNorm",
        "block": "Block",
        "transformer": "Transformer",
    }.items():
        failure = f"  FAIL  {file}.py does not define {name}, so it is not verified: "
        assert f"{failure}name it so, or skip '{file}: *'" in out
    assert verify(str(tmp_path), ["rmsnorm: *", "block: *", "transformer: *"]) == 0


def test_verify_uses_one_thread(tmp_path):
    torch.set_num_threads(2)
    assert verify(str(copy_layers(tmp_path, "rmsnorm")), ["*"]) == 0
    assert torch.get_num_threads() == 1


def test_verify_begins_with_the_meaning_and_wraps_lines(tmp_path, capsys):
    edit = (
        "attention",
        "rope(q, token_positions), rope(k, token_positions)",
        "q, rope(k, token_positions)",
    )
    copy_layers(tmp_path, "attention", edits=[edit])
    chosen = ["relative positions only", "equation and gradients in float64"]
    assert verify(str(tmp_path), all_but("attention", *chosen)) == 1
    header, *lines = capsys.readouterr().out.splitlines()
    assert header == f"attention: {tmp_path / 'attention.py'}"
    assert [line.partition(":")[0] for line in lines if "FAIL" in line] == [
        f"  FAIL  {name}" for name in chosen
    ]
    assert max(map(len, lines)) <= 200


def test_verify_does_not_judge_what_depends_on_a_violation(tmp_path, capsys):
    copy_layers(tmp_path, edits=[("rmsnorm", "0 < eps", "0 <= eps")])
    skip = [*all_but("rmsnorm", REJECTED), "ffn: *", "rope: *", "attention: *"]
    assert verify(str(tmp_path), skip) == 1
    out = capsys.readouterr().out
    assert re.search(
        r"block.py\n  note  not judged: \d+ properties that depend on rmsnorm\n", out
    )
    assert re.search(
        r"transformer.py\n  note  not judged: \d+ properties that depend on block and rmsnorm\n",
        out,
    )


@pytest.mark.parametrize(
    "target",
    [
        "tinyblock.rmsnorm",
        "host.layers.rmsnorm",
        "host/layers/rmsnorm.py",
        "host.layers",
    ],
)
def test_verify_takes_a_file_and_a_dotted_name(target, tmp_path, monkeypatch, capsys):
    copy_layers(
        tmp_path / "host",
        "rmsnorm",
        edits=[("rmsnorm", "import math", "import host.layers.rmsnorm, math")],
    )
    copy_layers(tmp_path / "host" / "layers", "rmsnorm")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert verify(target, ["*"]) == 0
    assert re.match(
        r"rmsnorm: \S*(host|layers|tinyblock).rmsnorm.py\n0 hold, 0 fail, ",
        capsys.readouterr().out,
    )


@pytest.mark.parametrize(
    "target",
    [
        "nowhere/layers",
        "nowhere.layers",
        "tinyblock.nothing",
        "sys",
        "",
        "data.zip",
        ".",
    ],
)
def test_verify_reports_a_missing_target_in_one_line(target, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(
        LookupError,
        match=r"^\S* (was not found|has no layer, none of .*rope\.py.*): give (a|the) f",
    ) as caught:
        verify(target, [])
    assert "\n" not in str(caught.value)
