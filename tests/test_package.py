"""The package as people take it: whole, or a file at a time."""

import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import tinyblock

PACKAGE = Path(tinyblock.__file__).parent
USES = {
    "rmsnorm": "rmsnorm.RMSNorm(8)(x)",
    "ffn": "ffn.SwiGLU(8)(x)",
    "rope": "rope.RotaryPositionalEmbedding(1e4, 8, 9)(x)",
    "attention": "attention.CausalMultiHeadSelfAttention(8, 2)(x)",
    "parallelize": "parallelize.parallelize",
}
# Only these may be imported, as where neither tinyblock nor beartype is installed.
REFUSE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("tinyblock", "beartype"):
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
import torch
x = torch.randn(2, 3, 8)
"""


def test_leaf_files_work_alone(tmp_path):
    code = REFUSE
    for name, use in USES.items():
        shutil.copy(PACKAGE / f"{name}.py", tmp_path)
        code += f"import {name}\n{use}\n"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


def test_a_copied_block_takes_an_attention_of_ones_own(tmp_path):
    folder = tmp_path / "my_layers"
    folder.mkdir()
    for name in ("block", "rmsnorm", "ffn", "rope"):
        shutil.copy(PACKAGE / f"{name}.py", folder)
    (folder / "attention.py").write_text(
        """
from torch import nn
class CausalMultiHeadSelfAttention(nn.Module):
    def __init__(self, d_model, num_heads, *, rope, eps, device, dtype):
        super().__init__()
        self.rope = rope
    def forward(self, x, token_positions=None, mask=None):
        return self.rope(x, token_positions)
"""
    )
    code = REFUSE + "from my_layers import block, rope\n"
    code += "rotate = rope.RotaryPositionalEmbedding(1e4, 8, 9)\n"
    code += "layer = block.Block(8, 2, rope=rotate)\n"
    code += "layer.reset_parameters()\nassert layer(x).shape == x.shape\n"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


def test_package_exports_what_its_modules_do():
    exported = set()
    for name in ("typecheck", *USES, "block", "transformer"):
        module = importlib.import_module(f"tinyblock.{name}")
        exported |= set(module.__all__)
        for member in module.__all__:
            assert getattr(tinyblock, member) is getattr(module, member)
    assert exported == set(tinyblock.__all__)
