"""Start `tinyblock verify`. This file requires no package, so that it can name what is missing."""

import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path, PurePath

FOLDER = Path(__file__).parent


def start(path: Path, rest: Sequence[str]) -> int:
    """Test the layers of a folder, or the layer of a file, and return the exit code.

    rest: names of layers, then options of pytest.
    """
    required = ("torch", "pytest", "einops", "jaxtyping")
    missing = [name for name in required if importlib.util.find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(
            f"verify requires {', '.join(missing)}: install them for "
            f"{sys.executable}, or start the command with another Python"
        )
    # By its path, because the package tinyblock may not be found, and imports its layers.
    spec = importlib.util.spec_from_file_location(
        "tinyblock_verify", FOLDER / "__init__.py"
    )
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = package
    spec.loader.exec_module(package)
    options = list(rest)
    layers = []
    while options and not options[0].startswith("-"):
        layers.append(PurePath(options.pop(0)).stem.removeprefix("test_"))
    # `python3 tinyblock` puts this folder there, which would hide a user's rope.py.
    root = FOLDER.parent.resolve()
    others = [path for path in sys.path if Path(path).resolve() != root]
    sys.path[:] = [os.getcwd(), *others]  # as `python -m pytest` does
    return int(package.run(path.resolve(), layers, options))
