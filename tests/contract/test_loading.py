"""Layers are found wherever copies lie, and the contract runs beside them, in a project without tinyblock."""

import shutil
import subprocess
import sys

import pytest
from contract.copying import LAYERS, PACKAGE, copy_layers
from isolated import REFUSE_TINYBLOCK_AND_BEARTYPE, WITHOUT_PACKAGE

import tinyblock
from tinyblock.contract.loading import load


@pytest.fixture(autouse=True)
def _leave_imports_as_they_were(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if not name.startswith(("torch", "sympy", "numpy")):
            del sys.modules[name]


def test_load_of_our_own_folder_gives_the_checked_modules():
    assert load(PACKAGE) == LAYERS
    assert load(PACKAGE / "ffn.py") == {"ffn": tinyblock.ffn}


@pytest.mark.parametrize(
    "name", ["layers", "my layers", "v1.2", "Schichten-\u00fc\u03b8", "class", "[a]*"]
)
@pytest.mark.parametrize("package", [False, True])
def test_load_takes_any_folder(name, package, tmp_path):
    folder = copy_layers(tmp_path / name)
    if package:
        (folder / "__init__.py").touch()
    modules = load(folder)
    assert modules.keys() == LAYERS.keys()
    assert modules["block"].RMSNorm is modules["rmsnorm"].RMSNorm
    assert [module.__file__ for module in modules.values()] == [
        str(folder / f"{layer}.py") for layer in modules
    ]
    assert list(load(folder / "rope.py")) == ["rope"]


def test_load_imports_a_package_as_its_project_does(tmp_path):
    settings = "from ..settings import EPS\nfrom .ffn"
    edits = [
        ("block", "from .rmsnorm", "from host_project.layers.rmsnorm"),
        ("block", "from .ffn", settings),
    ]
    folder = copy_layers(tmp_path / "host_project" / "layers", edits=edits)
    for package in (folder, folder.parent):
        (package / "__init__.py").touch()
    (folder.parent / "settings.py").write_text("EPS = 1e-5")
    modules = load(folder)
    assert modules["block"].__name__ == "host_project.layers.block"
    assert load(folder / "rope.py") == {"rope": modules["rope"]}


def test_load_does_not_take_one_package_for_another(tmp_path):
    for project in ("a", "b"):
        (
            copy_layers(tmp_path / project / "host_layers", "rope") / "__init__.py"
        ).touch()
    load(tmp_path / "a" / "host_layers")
    with pytest.raises(
        LookupError, match=r"as host_layers.rope: that is already .*a.host_layers"
    ):
        load(tmp_path / "b" / "host_layers")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "raise RuntimeError('not\\ntoday')",
            r"rope.py, line 1: RuntimeError: not today$",
        ),
        ("raise SystemExit(3)", r"rope.py, line 1: SystemExit: 3$"),
        ("<<<<<<< mine", r"SyntaxError: invalid syntax \(rope.py, line 1\)$"),
        (
            "from .helper import x",
            r"helper.py, line 2: ZeroDivisionError: division by zero$",
        ),
    ],
)
@pytest.mark.parametrize("way", ["folder", "file"])
def test_load_reports_in_one_line_why_a_copy_cannot_be_imported(
    line, said, way, tmp_path
):
    folder = copy_layers(tmp_path, "rope")
    (folder / "helper.py").write_text("y = 0\nx = 1 / y")
    (folder / "rope.py").write_text(f"{line}\n{(folder / 'rope.py').read_text()}")
    with pytest.raises(ImportError, match=said) as caught:
        load({"folder": folder, "file": folder / "rope.py"}[way])
    assert "\n" not in str(caught.value)


def test_the_contract_runs_beside_the_copies(tmp_path):
    """In a folder, and in a package of a package."""
    for project in ("of_folders", "of_packages"):
        edits = [("rmsnorm", "0 < eps", "0 <= eps")]
        folder = copy_layers(
            tmp_path / project / "layers", "rmsnorm", "attention", edits=edits
        )
        (folder / "contract").mkdir()
        for name in (
            "__init__",
            "harness",
            "loading",
            "test_contract",
            "rmsnorm",
            "attention",
            "rope",
        ):
            shutil.copy(PACKAGE / "contract" / f"{name}.py", folder / "contract")
    for path in (folder, folder.parent):
        (path / "__init__.py").touch()
    (tmp_path / "conftest.py").write_text(REFUSE_TINYBLOCK_AND_BEARTYPE)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-W",
        "error",
        "-p",
        "no:cacheprovider",
        "-q",
        "-rs",
    ]
    command += ["-k", "keys or hyperparameters"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env=WITHOUT_PACKAGE
    )
    assert "2 failed, 4 passed, 2 skipped" in done.stdout, done.stdout + done.stderr
    assert (
        done.stdout.count(
            "Violation: RMSNorm(d_model=4, eps=0.0): was accepted, expected an error"
        )
        >= 2
    )
    assert "test_contract[rmsnorm: invalid hyperparameters rejected]" in done.stdout
    assert "this folder has no rope" in done.stdout
