"""The command `tinyblock verify`: test layers, and explain what is wrong.

No project copies this folder.
"""

import os
from pathlib import Path

import pytest
import torch

from .report import Report

CONFIGURATION = Path(__file__).with_name("pytest.ini")
CONTRACT = Path(__file__).parents[1] / "contract"
# A wrong norm makes the block fail, too, so the norm comes first.
LAYERS = ("rmsnorm", "ffn", "rope", "attention", "block", "transformer")


def run(path: Path, layers: list[str], options: list[str]) -> int:
    """Test these layers of a folder, or all, or the layer of a file.

    Return the exit code: 0 if all are right, 1 if not, 2 for an error.
    """
    folder = path if path.is_dir() else path.parent
    contract = folder / "contract"
    if not (contract / "conftest.py").is_file():
        contract = CONTRACT
    layers = layers or ([path.stem] if path.is_file() else list(LAYERS))
    found = [layer for layer in layers if (folder / f"{layer}.py").is_file()]
    if not found:
        raise FileNotFoundError(
            f"{path} must exist, and be or contain one of {', '.join(LAYERS)}"
        )
    pages = [contract / f"test_{layer}.py" for layer in found]
    missing = [page.stem.removeprefix("test_") for page in pages if not page.exists()]
    if missing:
        add = f"`tinyblock add {' '.join(missing)} --to DIR --with-tests` copies them"
        raise FileNotFoundError(f"{contract} lacks the tests of {missing}: {add}")
    torch.set_num_threads(1)  # the tensors are small, and threads wait for each other
    os.environ["TINYBLOCK_VERIFY"] = str(folder)  # the contract's target.py reads it
    report = Report(folder, found)
    code = pytest.main(
        [
            *map(str, pages),
            f"--config-file={CONFIGURATION}",
            f"--rootdir={contract}",
            f"--confcutdir={contract}",
            *options,
        ],
        plugins=[report],
    )
    return int(code) if code in (0, 1) and not report.broken else 2
