"""Provide each layer as a fixture: the argument `rope` of a test is the imported rope.py.

Layers come from the folder above the tests, or from the target of `--layers`. If that
lacks a layer that another layer needs, the fixture imports it from tinyblock. A layer
is recognized by the name of its file.
"""

import contextlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

HERE = Path(__file__).parent
LAYERS = [path.stem.removeprefix("test_") for path in sorted(HERE.glob("test_*.py"))]


class Source(NamedTuple):
    """Where a layer is, and the name by which a program imports it."""

    path: Path
    name: str


SOURCES = pytest.StashKey[dict[str, Source]]()  # by layer


def pytest_addoption(parser: pytest.Parser) -> None:
    with contextlib.suppress(ValueError):  # another copy of this file has added it
        parser.addoption(
            "--layers",
            metavar="TARGET",
            help="folder, .py file, or importable module whose layers are tested "
            "(default: the folder above the tests)",
        )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cuda: needs a GPU")
    target = config.getoption("layers", default=None)
    if target is None:
        config.stash[SOURCES] = sources_of_path(HERE.parent)
        return
    path = config.invocation_params.dir / target
    sources = sources_of_path(path) if path.exists() else sources_of_name(target)
    if not sources:
        files = ", ".join(f"{layer}.py" for layer in LAYERS)
        raise pytest.UsageError(
            f"TARGET must be or contain one of {files}, got {target!r}: "
            "give the folder of the copies"
        )
    config.stash[SOURCES] = sources


def sources_of_path(path: Path) -> dict[str, Source]:
    """Find the layers in a folder, or the one in a file.

    A file is imported by the name that its package gives it. Without an __init__.py
    beside it, that is its own name.
    """
    folder = path if path.is_dir() else path.parent
    root = folder.resolve()
    package = ""
    while (root / "__init__.py").is_file():
        package = f"{root.name}.{package}"
        root = root.parent
    make_importable(root)
    sources = {}
    for layer in LAYERS:
        file = folder / f"{layer}.py"
        is_meant = path in (folder, file)
        if is_meant and file.is_file():
            sources[layer] = Source(file, package + layer)
    return sources


def sources_of_name(target: str) -> dict[str, Source]:
    """Find the layers in an importable package, or the one in an importable module."""
    spec = spec_of(target)
    folders = spec.submodule_search_locations  # of a package
    if folders is not None:
        return sources_of_package(target, folders)
    layer = target.rpartition(".")[2]
    if layer not in LAYERS:
        return {}
    return {layer: Source(Path(str(spec.origin)), target)}


def spec_of(target: str) -> ModuleSpec:
    """Return where Python finds a module, or raise a UsageError if it finds none."""
    make_importable(Path.cwd())
    try:
        spec = importlib.util.find_spec(target)
    except (Exception, SystemExit):  # a package above the module cannot be imported
        spec = None
    if spec is None:
        raise pytest.UsageError(
            f"{target!r} was not found: give a folder, a .py file, or a module that can be imported here"
        )
    return spec


def sources_of_package(package: str, folders: Iterable[str]) -> dict[str, Source]:
    """Find the layers of a package, each in the first of its folders that has the file."""
    sources = {}
    for layer in LAYERS:
        files = [Path(folder, f"{layer}.py") for folder in folders]
        found = [file for file in files if file.is_file()]
        if found:
            sources[layer] = Source(found[0], f"{package}.{layer}")
    return sources


def make_importable(root: Path) -> None:
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    importlib.invalidate_caches()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the tests of layers that are not there."""
    layer = collection_path.stem.removeprefix("test_")
    is_absent = layer in LAYERS and layer not in config.stash[SOURCES]
    return True if is_absent else None


def import_layer(source: Source) -> ModuleType:
    """Import a layer; fail the test in one line if that is not possible."""
    path, name = source
    try:
        module = importlib.import_module(name)
    except (Exception, SystemExit) as error:
        message = f"{place_of(error, path)}: {type(error).__name__}: {error}"
        if "relative import" in message:
            message += f"; add an __init__.py to {path.parent}"
        pytest.fail(message, pytrace=False)
    if not path.samefile(str(module.__file__)):
        other = f"that is already {module.__file__}"
        pytest.fail(f"{path} cannot be imported as {name}: {other}", pytrace=False)
    return module


def place_of(error: BaseException, path: Path) -> str:
    """Return the innermost line of a traceback that is in the folder of `path`, or else `path`."""
    place = str(path)
    folder = path.resolve().parent
    for frame in traceback.extract_tb(error.__traceback__):
        if Path(frame.filename).parent == folder:
            place = f"{frame.filename}, line {frame.lineno}"
    return place


def fixture_of(layer: str) -> Any:
    """Return a fixture that imports a layer, or tinyblock's where the target lacks it."""

    @pytest.fixture(scope="session", name=layer)
    def imported(request: pytest.FixtureRequest) -> ModuleType:
        source = request.config.stash[SOURCES].get(layer)
        if source is None:
            return pytest.importorskip(f"tinyblock.{layer}")
        return import_layer(source)

    return imported


for _layer in LAYERS:
    globals()[f"{_layer}_fixture"] = fixture_of(_layer)


@pytest.fixture(autouse=True)
def _same_start():
    """Give each test the same random numbers and one thread; leave those of other tests alone."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more threads only wait, on tensors this small
    with torch.random.fork_rng(devices=()), torch.enable_grad():
        torch.manual_seed(0)
        yield
    torch.set_num_threads(threads)
