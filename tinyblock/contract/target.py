"""The layers under test, by the names of their files."""

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ALL = ("rmsnorm", "ffn", "rope", "attention", "block", "transformer")
ABOVE = Path(__file__).resolve().parents[1]
found: dict[str, str] = {}  # the full name of each layer's module
foreign: set[str] = set()  # layers that are not copies of tinyblock's, or import one


def select(path: Path) -> None:
    """Find the layers in a folder, or the one in a file."""
    path = path.resolve()
    folder = path if path.is_dir() else path.parent
    selected = [
        layer
        for layer in ALL
        if path in (folder, folder / f"{layer}.py")
        and (folder / f"{layer}.py").is_file()
    ]
    if not selected:
        raise pytest.UsageError(
            f"{path} must exist, and be or contain one of {', '.join(ALL)}"
        )
    package = _package_of(folder)
    for layer in selected:
        found[layer] = f"{package}.{layer}"
        if not _is_own(folder, layer):
            foreign.add(layer)


def load(layer: str) -> ModuleType:
    if layer not in found:  # the page was named on the command line
        pytest.skip(f"{layer}.py is not in the folder that is tested")
    return importlib.import_module(found[layer])


def _package_of(folder: Path) -> str:
    """Return the name below which Python imports the layers of a folder."""
    # Beside its layers, the contract tests the modules that their project imports.
    above = (__package__ or "").rpartition(".")[0]
    if str(folder) in map(str, getattr(sys.modules.get(above), "__path__", ())):
        return above
    # Elsewhere, no installed package of the same name may hide them.
    outside = folder
    while (outside / "__init__.py").is_file():
        outside = outside.parent
    root = ModuleType(re.sub(r"\W", "_", f"layers_of_{__package__}"))
    root.__path__ = [str(outside)]
    sys.modules[root.__name__] = root
    return ".".join((root.__name__, *folder.relative_to(outside).parts))


def _is_own(folder: Path, module: str) -> bool:
    """Return whether a file, and each file that it imports, is tinyblock's or a copy."""
    path = folder / f"{module}.py"
    bases = folder / ".tinyblock"
    is_original = folder == ABOVE and not bases.exists()
    if not is_original and not (bases / f"{path.name}.base").is_file():
        return False
    imported = re.findall(
        r"^from \.(\w+) import", path.read_text("utf-8"), re.MULTILINE
    )
    return all(_is_own(folder, name) for name in imported)
