"""Find and import the layers of a folder, or of a file."""

import importlib
import sys
import traceback
from pathlib import Path
from types import ModuleType

from . import LAYERS


def load(path: Path) -> dict[str, ModuleType]:
    """Import the layers of a folder, or of a .py file; return them by name.

    A layer is recognized by the name of its file. A folder with an __init__.py is imported as the package that it is.

    Raises:
        LookupError: no layer was found.
        ImportError: the file of a layer cannot be imported.
    """
    folder = path if path.is_dir() else path.parent
    layers = [
        layer
        for layer in LAYERS
        if (path / f"{layer}.py").is_file() or path.name == f"{layer}.py"
    ]
    if not layers:
        names = ", ".join(f"{layer}.py" for layer in LAYERS)
        raise LookupError(
            f"{path} has no layer, none of {names}: give the folder or the file of the copies"
        )
    package = _package_of(folder.resolve())
    return {
        layer: _import(f"{package}.{layer}", folder / f"{layer}.py") for layer in layers
    }


def make_importable(root: Path) -> None:
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    importlib.invalidate_caches()


def _package_of(folder: Path) -> str:
    """Return the name by which a folder is imported: as the package that it is, or as one made for it."""
    root = next(
        parent
        for parent in (folder, *folder.parents)
        if not (parent / "__init__.py").is_file()
    )
    parts = folder.relative_to(root).parts
    if parts and not any("." in part for part in parts):
        make_importable(root)
        return ".".join(parts)
    package = ModuleType(f"_copies_{len(sys.modules)}")
    package.__path__ = [str(folder)]
    sys.modules[package.__name__] = package
    return package.__name__


def _import(name: str, path: Path) -> ModuleType:
    try:
        module = importlib.import_module(name)
    except (Exception, SystemExit) as error:
        files = [
            (frame.filename, frame.lineno)
            for frame in traceback.extract_tb(error.__traceback__)
        ]
        beside = [
            f"{file}, line {line}"
            for file, line in files
            if Path(file).parent == path.resolve().parent
        ]
        place = beside[-1] if beside else path
        raise ImportError(
            f"{place}: {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error
    if not path.samefile(str(module.__file__)):
        raise LookupError(
            f"{path} cannot be imported as {name}: that is already {module.__file__}"
        )
    return module
