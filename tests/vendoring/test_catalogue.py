"""What there is to copy, and what a wish brings along."""

import ast
import json
import re
import sys

import pytest
from vendoring.project import PACKAGE, release

import tinyblock
from tinyblock.vendoring import Refusal
from tinyblock.vendoring.catalogue import NAMES, Layer, Upstream

HARNESS = {f"contract/{name}.py" for name in ("__init__", "test_contract", "harness", "loading")}


def test_layer_is_described_by_its_text(project, new):
    *_, transformer, _ = new.layers()
    assert transformer == Layer(
        name="transformer",
        summary="The transformer, in short.",
        convention="transformer stays as it is. The rest is longer.",
        siblings=("block", "ffn", "rmsnorm", "rope"),
        packages=("einops", "torch"),
        exports=("Transformer",),
    )
    out = project.run("list").out
    assert [line.split()[0] for line in out.splitlines()] == list(NAMES)
    assert re.search(r"^block +needs attention.py, ffn.py, rmsnorm.py, einops, torch +block stays as it is$", out, re.M)


def test_list_describes_the_layers_of_this_tinyblock(project):
    listed = json.loads(project.run("list", "--json", upstream=Upstream.installed()).out)
    assert listed["tinyblock"] == tinyblock.__version__
    assert [layer["name"] for layer in listed["layers"]] == list(NAMES)
    for layer in listed["layers"]:
        text = (PACKAGE / layer["file"]).read_text(encoding="utf-8")
        assert set(layer["siblings"]) == set(re.findall(r"^from \.(\w+) import", text, re.MULTILINE))
        imported = set(re.findall(r"^(?:from|import) ([a-z]\w*)", text, re.MULTILINE))
        assert set(layer["packages"]) == imported - sys.stdlib_module_names
        assert layer["exports"] == sys.modules[f"tinyblock.{layer['name']}"].__all__
        assert len(layer["convention"]) > 20


@pytest.mark.parametrize(
    ("layer", "siblings", "with_tests"),
    [
        ("rmsnorm", (), ()),
        ("attention", (), ("rope",)),  # whose promises those of attention import
        ("block", ("attention", "ffn", "rmsnorm"), ("rope",)),
        ("transformer", ("attention", "block", "ffn", "rmsnorm", "rope"), ()),
    ],
)
def test_layer_needs_what_it_imports_and_with_tests_its_promises(layer, siblings, with_tests, new):
    assert sorted(new.with_needs([f"{layer}.py"])) == sorted(f"{name}.py" for name in (layer, *siblings))
    tested = {layer, *siblings, *with_tests}
    needed = new.with_needs([f"{layer}.py"], with_tests=True)
    expected = {f"{name}.py" for name in tested} | {f"contract/{name}.py" for name in tested} | HARNESS
    assert sorted(needed) == sorted(expected)
    assert ["/" in name for name in needed] == sorted("/" in name for name in needed)


def test_promises_may_import_from_the_folder_above(tmp_path):
    changed = {"contract/ffn.py": "from ..typecheck import typecheck\nfrom .. import rope, nothing\n"}
    needed = release(tmp_path / "above", "1.0", changed).with_needs(["ffn.py"], with_tests=True)
    assert set(needed) - HARNESS == {"ffn.py", "contract/ffn.py", "typecheck.py", "rope.py", "contract/rope.py"}


@pytest.mark.parametrize("layer", NAMES)
def test_copies_of_this_tinyblock_import_nothing_that_is_left_behind(layer, project):
    project.add(layer, "--with-tests", "--with-typecheck", upstream=Upstream.installed())
    for name in project.names():
        for node in ast.walk(ast.parse(project.path(name).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level:
                folder = (PACKAGE / name).parents[node.level - 1]
                modules = [node.module] if node.module else [alias.name for alias in node.names]
                paths = [(folder / f"{module}.py").relative_to(PACKAGE).as_posix() for module in modules]
                assert {path for path in paths if (PACKAGE / path).is_file()} <= project.names()
            elif isinstance(node, ast.ImportFrom):
                assert str(node.module).partition(".")[0] != "tinyblock"
    if layer == "rmsnorm":  # without the three lines of each header
        wanted = [name for name in project.names() if name.endswith(".py") and name != "typecheck.py"]
        assert sum(len(project.path(name).read_bytes().splitlines()) - 3 for name in wanted) <= 650


def test_unknown_layer_is_refused_with_the_nearest_name():
    for asked, expected in {
        "rop": "no layer 'rop': did you mean rope",
        "rope.py": "did you mean rope",
        "SwiGLU": "did you mean ffn",
        "rms_norm": "did you mean rmsnorm",
        "": "there are rmsnorm, ffn",
    }.items():
        with pytest.raises(Refusal, match=expected):
            Upstream.installed().require_layer(asked)


def test_licence_of_the_package_is_that_of_the_project():
    assert (PACKAGE / "LICENSE").read_bytes() == (PACKAGE.parent / "LICENSE").read_bytes()
