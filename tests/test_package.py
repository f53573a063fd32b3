"""The package as people take it: whole, or a file at a time."""

import importlib
import inspect
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from isolated import REFUSE_TINYBLOCK_AND_BEARTYPE, WITHOUT_PACKAGE
from torch import nn

import tinyblock

ROOT = Path(__file__).parents[1]
MODULES = [module.__name__.rpartition(".")[2] for module in tinyblock.LAYERS]
MODULES.append("parallelize")
USES = {
    "rmsnorm": "norm = rmsnorm.RMSNorm(8); assert norm(x).shape == x.shape; rmsnorm.rms_norm(x, norm.weight)",
    "ffn": "assert ffn.SwiGLU(8)(x).shape == ffn.FeedForward(8)(x).shape == x.shape",
    "rope": "r = rope.RotaryPositionalEmbedding(1e4, 8, 9); assert r(x, torch.arange(3)).shape == x.shape",
    "attention": "assert attention.CausalMultiHeadSelfAttention(8, 2, qk_norm=True)(x).shape == x.shape",
    "parallelize": "assert callable(parallelize.parallelize) and 'torch.distributed.tensor' not in sys.modules",
}
ONLY = (
    REFUSE_TINYBLOCK_AND_BEARTYPE
    + "import torch, einops, jaxtyping\nx = torch.randn(2, 3, 8)\n"
)


def source_of(module):
    return (ROOT / "tinyblock" / f"{module}.py").read_text()


LEAVES = [module for module in MODULES if "\nfrom ." not in source_of(module)]


def test_leaf_files_work_alone(tmp_path):
    code = ONLY
    for leaf in LEAVES:
        folder = tmp_path / leaf
        folder.mkdir()
        shutil.copy(ROOT / "tinyblock" / f"{leaf}.py", folder)
        code += f"sys.path[0] = {str(folder)!r}\nimport {leaf}\n"
        code += f"assert {leaf}.__file__.startswith(sys.path[0])\n"
        code += USES.get(leaf, "") + "\n"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=WITHOUT_PACKAGE,
    )
    assert done.returncode == 0, done.stderr


def test_leaf_files_import_no_other_package():
    for leaf in LEAVES:
        imports = re.findall(r"^(?:from|import) (\w+)", source_of(leaf), re.MULTILINE)
        packages = set(imports)
        assert packages - set(sys.stdlib_module_names) <= {
            "torch",
            "einops",
            "jaxtyping",
        }, leaf


def test_package_exports_the_api():
    names = set()
    for module in [*MODULES, "typecheck"]:
        layer = importlib.import_module(f"tinyblock.{module}")
        names |= set(layer.__all__)
        for name in layer.__all__:
            assert getattr(tinyblock, name) is getattr(layer, name)
    assert names == set(tinyblock.__all__)
    assert re.fullmatch(r"\d+\.\d+\.\d+", tinyblock.__version__)
    assert (
        f'__version__ = "{tinyblock.__version__}"'
        in (ROOT / "tinyblock" / "__init__.py").read_text()
    )


def test_typecheck_can_be_imported_from_the_package_and_from_its_module():
    module = importlib.import_module("tinyblock.typecheck")
    assert tinyblock.typecheck is module.typecheck
    assert pickle.loads(pickle.dumps(tinyblock.typecheck)) is tinyblock.typecheck


@pytest.mark.parametrize(
    "name", sorted({*tinyblock.__all__} - {"parallelize", "typecheck"})
)  # these take no tensor to check
def test_everything_public_is_documented_and_checked(name):
    member = getattr(tinyblock, name)
    assert inspect.getdoc(member)
    if isinstance(member, type):
        assert issubclass(member, nn.Module)
        assert "reset_parameters" in vars(member)
        assert member.forward.__typechecked__
        assert member.__init__.__typechecked__
    else:
        assert member.__typechecked__
