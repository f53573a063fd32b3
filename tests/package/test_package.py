"""The package as people take it: whole, or a file at a time."""

import importlib
from pathlib import Path

from forked import run_pytest

import tinyblock
from tinyblock import copies, verify

PACKAGE = Path(tinyblock.__file__).parent
TOOLS = ("copies", "parallelize", "typecheck")
MODULES = [module.__name__.rpartition(".")[2] for module in tinyblock.LAYERS]


def test_copies_need_neither_tinyblock_nor_beartype(tmp_path):
    add = ["add", *MODULES, "--with-tests", "--to", str(tmp_path / "layers")]
    assert copies.main(add) == 0
    copied = {path.name for path in (tmp_path / "layers" / "contract").glob("*.py")}
    assert copied == {path.name for path in (PACKAGE / "contract").glob("*.py")}
    tests = ["layers", "-k", "test_equation and float32"]
    missing = ["tinyblock", "beartype"]
    code, printed = run_pytest(*tests, folder=tmp_path, without=missing)
    assert code == 0, printed


def test_every_layer_file_is_listed_and_has_a_page_in_the_contract():
    files = {path.stem for path in PACKAGE.glob("[!_]*.py")}
    assert files - set(TOOLS) == set(MODULES), "LAYERS of tinyblock/__init__.py"
    pages = {path.stem for path in (PACKAGE / "contract").glob("test_*.py")}
    assert pages == {f"test_{name}" for name in MODULES}
    assert set(verify.LAYERS) == set(MODULES), "LAYERS of tinyblock/verify/__init__.py"


def test_package_exports_what_its_modules_do():
    exported = set()
    for name in (*MODULES, "typecheck", "parallelize"):
        module = importlib.import_module(f"tinyblock.{name}")
        exported |= set(module.__all__)
        for member in module.__all__:
            assert getattr(tinyblock, member) is getattr(module, member)
    assert exported == set(tinyblock.__all__)
