"""The package as people take it: whole, or a file at a time."""

import importlib
import shutil
from pathlib import Path

from forked import run_pytest

import tinyblock
from tinyblock.contract import verify

HERE = Path(__file__).parent
PACKAGE = Path(tinyblock.__file__).parent
TOOLS = ("copies", "parallelize", "typecheck")
MODULES = [module.__name__.rpartition(".")[2] for module in tinyblock.LAYERS]


def test_leaf_files_work_alone(tmp_path):
    copy_to(tmp_path, "rmsnorm", "ffn", "rope", "attention")
    copy_to(tmp_path / "tools", "parallelize")
    run_beside_copies("use_leaves.py", tmp_path)


def test_a_copied_block_takes_an_attention_of_ones_own(tmp_path):
    copy_to(tmp_path / "my_layers", "block", "rmsnorm", "ffn", "rope")
    shutil.copy(HERE / "own_attention.py", tmp_path / "my_layers" / "attention.py")
    run_beside_copies("use_block.py", tmp_path)


def copy_to(folder, *names):
    folder.mkdir(exist_ok=True)
    for name in names:
        shutil.copy(PACKAGE / f"{name}.py", folder)


def run_beside_copies(file, folder):
    """Copies need neither tinyblock nor beartype."""
    shutil.copy(HERE / file, folder)
    code, printed = run_pytest(file, folder=folder, without=["tinyblock", "beartype"])
    assert code == 0, printed


def test_every_layer_file_is_listed_and_has_a_page_in_the_contract():
    files = {path.stem for path in PACKAGE.glob("[!_]*.py")}
    assert files - set(TOOLS) == set(MODULES), "LAYERS of tinyblock/__init__.py"
    pages = {path.stem for path in (PACKAGE / "contract").glob("test_*.py")}
    assert pages == {f"test_{name}" for name in MODULES}
    assert set(verify.LAYERS) == set(MODULES), "LAYERS of tinyblock/contract/verify.py"


def test_package_exports_what_its_modules_do():
    exported = set()
    for name in (*MODULES, "typecheck", "parallelize"):
        module = importlib.import_module(f"tinyblock.{name}")
        exported |= set(module.__all__)
        for member in module.__all__:
            assert getattr(tinyblock, member) is getattr(module, member)
    assert exported == set(tinyblock.__all__)
