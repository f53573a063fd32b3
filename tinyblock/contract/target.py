"""The layers under test, by the names of their files."""

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ALL = ("rmsnorm", "ffn", "rope", "attention", "block", "transformer")
# The layers are imported from below this name. So no installed package hides them.
ROOT = re.sub(r"\W", "_", f"layers_of_{__package__}")
found: dict[str, str] = {}  # the full name of each layer's module


def select(path: Path) -> None:
    """Find the layers in a folder, or the one in a file. Files share one folder."""
    path = path.resolve()
    folder = path if path.is_dir() else path.parent
    outside = folder
    while (outside / "__init__.py").is_file():
        outside = outside.parent
    root = ModuleType(ROOT)
    root.__path__ = [str(outside)]
    sys.modules[ROOT] = root
    package = ".".join((ROOT, *folder.relative_to(outside).parts))
    selected = {}
    for layer in ALL:
        file = folder / f"{layer}.py"
        if path in (folder, file) and file.is_file():
            selected[layer] = f"{package}.{layer}"
    found.update(selected)
    if not selected:
        raise pytest.UsageError(f"{path} must be or contain one of {', '.join(ALL)}")


def load(layer: str) -> ModuleType:
    """Import a layer; skip the test if it is not there."""
    if layer not in found:
        pytest.skip(f"there is no {layer}.py")
    return importlib.import_module(found[layer])
