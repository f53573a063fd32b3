"""scripts/models_without_row.py lists models, or names the package that it needs."""

from types import SimpleNamespace

import models_without_row
import pytest


def test_models_without_row_prints_their_decoder_layers(tmp_path, monkeypatch, capsys):
    for model in ("old", "new"):
        folder = tmp_path / "models" / model
        folder.mkdir(parents=True)
        source = "class ALayer: ...\nclass ADecoderLayer(Module): ...\n"
        source += f"class {model}DecoderLayer(Module): ...\n"
        (folder / f"modeling_{model}.py").write_text(source)
    page = tmp_path / "models.md"
    page.write_text("| Old | `old` | yes |\n| Removed | `removed` | yes |\n")
    package = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(models_without_row, "find_spec", lambda name: package)
    monkeypatch.setattr(models_without_row, "PAGE", page)
    models_without_row.main()
    assert capsys.readouterr().out.splitlines() == [
        "new: ADecoderLayer, newDecoderLayer",
        "1 of 2 models have a row",
    ]


def test_without_transformers_the_list_names_the_repair(monkeypatch):
    monkeypatch.setattr(models_without_row, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="must be installed: pip install transformers"):
        models_without_row.main()
