"""Compiled and exported models against the model, at lengths that were not traced."""

import io
import re
from functools import partial

import compile_and_export
import pytest
import torch
from compile_and_export import compile_for_all_lengths, export_for_all_lengths

from tinyblock import Transformer


@pytest.fixture(autouse=True)
def _trace_only(monkeypatch):
    """Trace graphs, but generate no code, which takes long."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))


@torch.no_grad()
def test_one_graph_has_the_outputs_of_the_model_at_all_lengths():
    model = Transformer(2, d_model=64, num_heads=4, max_seq_len=128)
    compiled = compile_for_all_lengths(model)
    for seq in (5, 32, 128):
        x = torch.randn(2, seq, 64)
        torch.testing.assert_close(compiled(x), model(x))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


@torch.no_grad()
def test_an_exported_file_has_the_outputs_of_the_model_at_all_lengths():
    model = Transformer(2, d_model=64, num_heads=4, max_seq_len=128)
    file = io.BytesIO()
    torch.export.save(export_for_all_lengths(model, batch=2), file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for seq in (1, 2, 5, 32, 128):
        x = torch.randn(2, seq, 64)
        torch.testing.assert_close(loaded(x), model(x))


def test_compile_and_export_main(capsys):
    compile_and_export.main()
    out = capsys.readouterr().out
    assert re.findall(r"^(\d+) tokens", out, re.MULTILINE) == ["7", "32"]
    differences = re.findall(r"by (\d\S*\d)", out)
    assert len(differences) == 4
    assert all(float(difference) < 1e-5 for difference in differences)
