"""Where an error was raised, and why a layer cannot be imported, with the repair."""

import ast
import importlib.util
import platform
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path

PIP = f"{sys.executable} -m pip install"  # for the Python that runs, not another one
LIBRARIES = ("site-packages", "dist-packages")
PYTHON = (sysconfig.get_path("stdlib"), "<frozen ")


def is_own(file: str) -> bool:
    """Return whether a file is of the solution, not of Python, a package, or a contract."""
    is_library = any(part in LIBRARIES for part in Path(file).parts)
    return not (is_library or is_of_tests(file) or file.startswith(PYTHON))


def is_of_tests(file: str) -> bool:
    """Return whether a file is of this folder, or of a contract, which may be a copy."""
    folder = Path(file).parent
    return folder == Path(__file__).parent or (folder / "every_layer.py").exists()


def last_own_frame(error: BaseException) -> traceback.FrameSummary | None:
    """Return the last line that ran in the solution's own files."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if is_own(frame.filename)]
    return own[-1] if own else None


def explain_import(error: BaseException, layer: Path, roots: Iterable[Path]) -> str:
    """Return the line that fails while a layer's file is imported, and the repair.

    An error in the user's own code is shown as Python shows it. `roots` are the files of
    all layers.
    """
    if isinstance(error, SyntaxError):
        return (
            f"{error.filename}, line {error.lineno}: {error.msg}: this is Python "
            f"{platform.python_version()}; a newer one may read the file, and the "
            "course's edition of 2026 requires Python 3.12 or 3.13"
        )
    if isinstance(error, ModuleNotFoundError):
        *_, last = (
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if is_own(frame.filename)
        )
        repair = repair_of(error, Path(last.filename), roots)
        return f"{last.filename}, line {last.lineno}: {error}: {repair}"
    shown = traceback.TracebackException.from_exception(error)
    shown.stack[:] = [
        frame
        for frame in shown.stack
        if not frame.filename.startswith(PYTHON) and not is_of_tests(frame.filename)
    ]
    files = [frame.filename for frame in shown.stack]
    if len(files) > 1 and files[0] == str(layer) and files[1] != files[0]:
        del shown.stack[0]  # the rest is the same for the other layers
    return "it cannot be imported:\n" + "".join(shown.format()).rstrip()


def repair_of(error: ModuleNotFoundError, file: Path, roots: Iterable[Path]) -> str:
    """Return what to do if a file of the solution cannot import a module."""
    name = (error.name or "").partition(".")[0]
    if "metadata" in str(error):  # the solution's __init__.py reads its own version
        folder = file.parents[1]
        return f"install the solution: {PIP} --no-deps -e {folder}"
    if name == "tests":
        return "run verify in the folder of the solution, or set PYTHONPATH to it"
    if lies_in(file.parent, name):
        return f"it lies beside this file: add {file.parent} to PYTHONPATH"
    return f"{PIP} {' '.join(sorted({name, *missing_packages(roots)}))}"


def missing_packages(roots: Iterable[Path]) -> set[str]:
    """Return the packages that are missing, of all that these files import in the end.

    Python names one of them at a time.
    """
    missing = set()
    files = [file for file in roots if file.is_file()]
    for file in files:  # which grows
        for level, module in imports_of(file):
            package = module.partition(".")[0]
            if not level and not lies_in(file.parent, package) and is_missing(package):
                missing.add(package)
            for imported in own_files(file, level, module):
                if imported not in files:
                    files.append(imported)
    return missing - {"tests"}


def is_missing(package: str) -> bool:
    return package not in sys.modules and importlib.util.find_spec(package) is None


def imports_of(file: Path) -> Iterator[tuple[int, str]]:
    """Yield what a file imports, also in its functions: the level and `package.module.name`.

    What stands in `try` is left out: the file may do without it.
    """
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return  # Python says so if it reads the file
    tried = {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.Try)
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if node in tried:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield 0, alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node.level, ".".join(filter(None, (node.module, alias.name)))


def own_files(importer: Path, level: int, module: str) -> list[Path]:
    """Return the files of the solution that Python reads to import a module."""
    parts = module.split(".")
    found: list[Path] = []
    if level:  # 1 stands for the folder of the importer, 2 for the folder above it
        places = [importer.parents[level - 1]]
    else:
        package = parts.pop(0)
        loaded = sys.modules.get(package)
        spec = loaded.__spec__ if loaded else importlib.util.find_spec(package)
        if spec is None or not is_own(spec.origin or ""):
            return []
        places = [Path(place) for place in spec.submodule_search_locations or ()]
        found = [Path(spec.origin or "")]
    for part in parts:
        for place in places:
            found += [place / f"{part}.py", place / part / "__init__.py"]
        places = [place / part for place in places]
    return [file for file in found if file.is_file()]


def lies_in(folder: Path, name: str) -> bool:
    return (folder / f"{name}.py").exists() or (folder / name).is_dir()
