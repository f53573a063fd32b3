"""Find and import the layers of a folder, or of a file."""

import importlib
import re
import sys
import traceback
from pathlib import Path
from types import ModuleType

from . import LAYERS


def load(path: Path) -> dict[str, ModuleType]:
    """Import the layers of a folder, or of a .py file; return them by name.

    A layer's file defines a class or function of tinyblock's name, and has a d_model or d_k; of several such files, the
    one of the layer's name is meant. No other file is imported; a folder with an __init__.py is imported as a package.

    Raises:
        LookupError: no layer was found, or more than one file defines it.
        ImportError: a file that holds a layer cannot be imported.
    """
    folder, files = (path, sorted(path.glob("*.py"))) if path.is_dir() else (path.parent, [path])
    stems = _find(files)
    if not stems:
        classes = ", ".join(names[0] for names in LAYERS.values())
        raise LookupError(f"{path} holds no layer, none of {classes}: give the folder or the file of the copies")
    package = _package_of(folder.resolve())
    return {layer: _import(f"{package}.{stem}", folder / f"{stem}.py") for layer, stem in stems.items()}


def make_importable(root: Path) -> None:
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    importlib.invalidate_caches()


def _find(files: list[Path]) -> dict[str, str]:
    """Return the stem of the file of each layer; no file is imported for that."""
    sources = {path.stem: path.read_text(encoding="utf-8", errors="replace") for path in files}
    found: dict[str, str] = {}
    for layer, names in LAYERS.items():
        ours = re.compile(rf"^(class|def) ({'|'.join(names)})\b.*\bd_(model|k)\b", re.MULTILINE | re.DOTALL)
        stems = [stem for stem, source in sources.items() if ours.search(source)]
        if layer in stems:
            stems = [layer]
        if len(stems) > 1:
            raise LookupError(f"{', '.join(stems)} all define {' or '.join(names)}: give the one file")
        if stems:
            found[layer] = stems[0]
    return found


def _package_of(folder: Path) -> str:
    """Return the name by which a folder is imported: as the package that it is, or as one made for it."""
    root = next(parent for parent in (folder, *folder.parents) if not (parent / "__init__.py").is_file())
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
        module = importlib.import_module(name.removesuffix(".__init__"))
    except (Exception, SystemExit) as error:
        files = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
        beside = [f"{file}, line {line}" for file, line in files if Path(file).parent == path.resolve().parent]
        place = beside[-1] if beside else path
        raise ImportError(f"{place}: {type(error).__name__}: {' '.join(str(error).split())}") from error
    if not path.samefile(str(module.__file__)):
        raise LookupError(f"{path} is {name}, but here that is another, {module.__file__}")
    return module
