"""The package as people take it: whole, or a file at a time."""

import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import tinyblock
from tinyblock.contract import target

HERE = Path(__file__).parent
PACKAGE = Path(tinyblock.__file__).parent
TOOLS = ("copies", "parallelize", "typecheck")
MODULES = [module.__name__.rpartition(".")[2] for module in tinyblock.LAYERS]


def test_leaf_files_work_alone(tmp_path):
    for name in ("rmsnorm", "ffn", "rope", "attention", "parallelize"):
        shutil.copy(PACKAGE / f"{name}.py", tmp_path)
    run_beside_copies("use_leaves.py", tmp_path)


def test_a_copied_block_takes_an_attention_of_ones_own(tmp_path):
    folder = tmp_path / "my_layers"
    folder.mkdir()
    for name in ("block", "rmsnorm", "ffn", "rope"):
        shutil.copy(PACKAGE / f"{name}.py", folder)
    shutil.copy(HERE / "own_attention.py", folder / "attention.py")
    run_beside_copies("use_block.py", tmp_path)


def run_beside_copies(program, folder):
    for file in (program, "refuse.py"):
        shutil.copy(HERE / file, folder)
    subprocess.run([sys.executable, folder / program], cwd=folder, check=True)


def test_every_layer_file_is_listed_and_has_a_page_in_the_contract():
    files = {path.stem for path in PACKAGE.glob("[!_]*.py")}
    assert files - set(TOOLS) == set(MODULES), "LAYERS of tinyblock/__init__.py"
    pages = {path.stem for path in (PACKAGE / "contract").glob("test_*.py")}
    assert pages == {f"test_{name}" for name in MODULES}
    assert set(target.ALL) == set(MODULES), "ALL of tinyblock/contract/target.py"


def test_package_exports_what_its_modules_do():
    exported = set()
    for name in (*MODULES, "typecheck", "parallelize"):
        module = importlib.import_module(f"tinyblock.{name}")
        exported |= set(module.__all__)
        for member in module.__all__:
            assert getattr(tinyblock, member) is getattr(module, member)
    assert exported == set(tinyblock.__all__)
