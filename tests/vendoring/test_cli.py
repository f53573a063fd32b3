"""The command line: what it hands over, prints and refuses; and the command as people run it."""

import ast
import importlib
import io
import re
import shlex
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from isolated import WITH_PACKAGE
from vendoring.project import PACKAGE

from tinyblock.vendoring.catalogue import Upstream
from tinyblock.vendoring.cli import main


def test_wrong_usage_is_refused_in_one_line(capsys):
    for argv in ([], ["remove", "x"], ["add", "rope"], ["diff", "x", "--mine", "--upstream"]):
        with pytest.raises(SystemExit) as stop:
            main(argv)
        assert stop.value.code == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)


@pytest.fixture
def verified(monkeypatch):
    """What was handed to a stand-in of verify, which returns 1 or raises what the target is called."""
    calls = list[tuple[str, Sequence[str]]]()

    def verify(target, skip):
        calls.append((target, skip))
        raised = {"LookupError": LookupError, "ImportError": ImportError}.get(target)
        if raised is not None:
            raise raised("there is\nno layer")
        return 1

    contract = ModuleType("tinyblock.contract")
    vars(contract).update(verify=SimpleNamespace(verify=verify))
    monkeypatch.setitem(sys.modules, "tinyblock.contract", contract)
    return calls


def test_verify_hands_over_what_was_asked(verified, project):
    assert project.run("verify", "my.layers", "--skip", "rope: a", "--skip", "b").code == 1
    assert verified == [("my.layers", ["rope: a", "b"])]


def test_verify_refuses_what_cannot_be_loaded(verified, project):
    for target in ("LookupError", "ImportError"):
        project.assert_refused("there is no layer\n", "verify", target)
    assert verified == [("LookupError", []), ("ImportError", [])]


def test_diff_is_written_byte_for_byte(new, tmp_path, capsysbinary):
    main(["add", "rope", "--to", str(tmp_path)], new)
    with (tmp_path / "rope.py").open("ab") as file:
        file.write(b"# caf\xe9\n")
    capsysbinary.readouterr()
    assert main(["diff", str(tmp_path)], new) == 0
    assert b"\n+# caf\xe9\n" in capsysbinary.readouterr().out


def test_command_imports_the_standard_library_only():
    for path in [*(PACKAGE / "vendoring").glob("*.py"), PACKAGE / "__main__.py"]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                assert {alias.name.partition(".")[0] for alias in node.names} <= sys.stdlib_module_names
            elif isinstance(node, ast.ImportFrom) and not node.level:
                assert str(node.module).partition(".")[0] in sys.stdlib_module_names
            elif isinstance(node, ast.ImportFrom) and node.level == 2 and node.module is None:
                assert {alias.name for alias in node.names} <= {"LAYERS", "__version__"}


def test_add_works_from_a_zip_archive(project, new):
    assert isinstance(new.root, Path)
    with zipfile.ZipFile(project.root / "with space.zip", "w") as file:
        for path in new.root.rglob("*"):
            file.write(path, Path("tinyblock") / path.relative_to(new.root))
    archive = zipfile.Path(project.root / "with space.zip", "tinyblock/")
    project.add("transformer", "--with-tests", "--with-typecheck", upstream=Upstream(archive, "0.2.0"))
    assert {"transformer.py", "typecheck.py", "contract/harness.py"} <= project.names()
    assert set(project.states().values()) == {"pristine"}


def test_path_that_the_terminal_cannot_show_is_no_error(project, monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(["add", "rope", "--to", "läyers", "--dry-run"], project.upstream) == 0
    assert terminal.buffer.getvalue().endswith(b"nothing was written to l\\xe4yers\n")


def test_no_output_is_no_error(project, monkeypatch):
    project.add("rope")
    project.path("rope.py").write_text("ours\n")
    monkeypatch.setattr(sys, "stdout", None)
    assert [main(argv, project.upstream) for argv in (["list"], ["diff", str(project.folder)])] == [0, 0]


@pytest.mark.skipif(sys.platform == "win32", reason="a shell of POSIX")
def test_closed_output_is_no_traceback(tmp_path):
    line = f"{shlex.quote(sys.executable)} -m tinyblock list --json | true"
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=WITH_PACKAGE, capture_output=True, text=True)
    assert not re.search("Traceback|BrokenPipe|tinyblock:", done.stderr), done.stderr


def test_host_package_imports_the_copies_without_tinyblock(project, monkeypatch):
    package = project.root / "host_of_copies"  # a package without an __init__.py
    project.run("add", "transformer", "--to", package / "layers", upstream=Upstream.installed())
    (package / "model.py").write_text("from .layers.transformer import Transformer\n")
    monkeypatch.syspath_prepend(project.root)
    for name in ("tinyblock", "beartype"):
        monkeypatch.setitem(sys.modules, name, None)  # so that importing it fails
    model = importlib.import_module("host_of_copies.model").Transformer(2, 24, 4, max_seq_len=8)
    model(torch.randn(2, 5, 24)).sum().backward()
    assert Path(sys.modules["host_of_copies.layers.block"].__file__ or "") == package / "layers" / "block.py"
