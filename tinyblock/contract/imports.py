"""Why a layer cannot be imported, and how to repair it, for `tinyblock verify`.

No project has a copy of this file.
"""

import ast
import importlib.util
import platform
import sys
import sysconfig
import traceback
from pathlib import Path

PIP = f"{sys.executable} -m pip install"  # for the Python that runs, not another one
INSTALLED = sysconfig.get_path("purelib")
PYTHON = ("<frozen ", sysconfig.get_path("stdlib"), str(Path(__file__).parent))


def explain(error: BaseException, layer: Path) -> str:
    """Return the line that fails while a layer's file is imported, and the repair.

    An error in the user's own code is shown as Python shows it.
    """
    if isinstance(error, SyntaxError):
        return (
            f"{error.filename}, line {error.lineno}: {error.msg}: this is Python "
            f"{platform.python_version()}; a newer one may read the file, and the "
            "course's edition of 2026 requires Python 3.12 or 3.13"
        )
    shown = traceback.TracebackException.from_exception(error)
    shown.stack[:] = [
        frame for frame in shown.stack if not frame.filename.startswith(PYTHON)
    ]
    if not isinstance(error, ModuleNotFoundError):
        files = [frame.filename for frame in shown.stack]
        if len(files) > 1 and files[0] == str(layer) and files[1] != files[0]:
            del shown.stack[0]  # the rest is the same for the other layers
        return "it cannot be imported:\n" + "".join(shown.format()).rstrip()
    *_, last = (
        frame for frame in shown.stack if not frame.filename.startswith(INSTALLED)
    )
    repair = repair_of(error, Path(last.filename))
    return f"{last.filename}, line {last.lineno}: {error}: {repair}"


def repair_of(error: ModuleNotFoundError, file: Path) -> str:
    """Return what to do if a file of the solution cannot import a module."""
    name = (error.name or "").partition(".")[0]
    if "metadata" in str(error):  # the solution's __init__.py reads its own version
        folder = file.parents[1]
        return f"install the solution: {PIP} --no-deps -e {folder}"
    if name == "tests":
        return "run verify in the folder of the solution, or set PYTHONPATH to it"
    if lies_in(file.parent, name):
        return f"it lies beside this file: add {file.parent} to PYTHONPATH"
    return f"{PIP} {' '.join(sorted({name, *missing_packages(file.parent)}))}"


def missing_packages(folder: Path) -> set[str]:
    """Return the packages that the files of a folder import, and that are missing.

    Python names one of them at a time.
    """
    missing = set()
    for file in folder.glob("*.py"):
        for package in packages_imported_by(file):
            is_installed = package == "tests" or lies_in(folder, package)
            if not is_installed and not importlib.util.find_spec(package):
                missing.add(package)
    return missing


def packages_imported_by(file: Path) -> set[str]:
    """Return the packages that a file imports, also in its functions."""
    names = []
    try:
        tree = ast.parse(file.read_bytes())
    except SyntaxError:
        return set()  # Python says so if it reads the file
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.append(node.module)
    return {name.partition(".")[0] for name in names}


def lies_in(folder: Path, name: str) -> bool:
    return (folder / f"{name}.py").exists() or (folder / name).is_dir()
