"""The layers under test: files in the folder above, or where `tinyblock verify` looks."""

import functools
import importlib
import importlib.util
import os
import re
import sys
from pathlib import Path
from types import ModuleType

ABOVE = Path(__file__).resolve().parents[1]
VARIABLE = "TINYBLOCK_VERIFY"  # of the environment: the folder that `verify` tests


def folder() -> Path:
    return Path(os.environ.get(VARIABLE, ABOVE))


def exists(layer: str) -> bool:
    return (folder() / f"{layer}.py").is_file()


def load(layer: str) -> ModuleType:
    """Import a layer as its project does, when a test runs."""
    return importlib.import_module(f"{_package_of(folder())}.{layer}")


def is_foreign(layer: str) -> bool:
    """Return whether a layer is no copy of tinyblock's, or imports one that is none."""
    return _is_foreign(folder(), layer)


def _package_of(folder: Path) -> str:
    """Return the name below which Python imports the layers of a folder."""
    outside = folder
    while (outside / "__init__.py").is_file():
        outside = outside.parent
    packages = folder.relative_to(outside).parts
    if packages:
        spec = importlib.util.find_spec(packages[0])
        origin = Path((spec and spec.origin) or "").resolve()
        if origin == outside / packages[0] / "__init__.py":
            return ".".join(packages)
    # Python does not find the folder, or finds another package of its name.
    root = ModuleType(re.sub(r"\W", "_", f"layers_in_{outside}"))
    root.__path__ = [str(outside)]
    sys.modules.setdefault(root.__name__, root)
    return ".".join((root.__name__, *packages))


@functools.cache
def _is_foreign(folder: Path, module: str) -> bool:
    path = folder / f"{module}.py"
    bases = folder / ".tinyblock"
    is_original = folder == ABOVE and not bases.exists()
    has_base = (bases / f"{path.name}.base").is_file()
    if not path.is_file() or not (is_original or has_base):
        return True
    imported = re.findall(
        r"^from \.(\w+) import", path.read_text("utf-8"), re.MULTILINE
    )
    return any(_is_foreign(folder, name) for name in imported)
