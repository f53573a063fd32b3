"""The command line: what it hands over, prints and refuses; and the command as people run it."""

import io
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from unittest.mock import Mock

import pytest
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


def test_verify_hands_over_what_was_asked_and_refuses_what_cannot_be_loaded(project, monkeypatch):
    verify = Mock(side_effect=[1, LookupError("there is\nno layer"), ImportError("there is\nno layer")])
    monkeypatch.setattr("tinyblock.contract.verify.verify", verify)
    assert project.run("verify", "my.layers", "--skip", "rope: a", "--skip", "b").code == 1
    verify.assert_called_with("my.layers", ["rope: a", "b"])
    for _ in range(2):
        project.assert_refused("there is no layer\n", "verify", "elsewhere")


def test_command_imports_the_standard_library_only():
    for path in [*(PACKAGE / "vendoring").glob("*.py"), PACKAGE / "__main__.py"]:
        imported = re.findall(r"^ *(?:from|import) ([a-z]\w*)", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert set(imported) <= sys.stdlib_module_names


def test_add_works_from_a_zip_archive(project, new):
    packed = shutil.make_archive(str(project.root / "with space"), "zip", new.root.parent, new.root.name)
    archive = zipfile.Path(packed, f"{new.root.name}/")
    project.add("transformer", "--with-tests", "--with-typecheck", upstream=Upstream(archive, "0.2.0"))
    assert {"transformer.py", "typecheck.py", "contract/harness.py"} <= project.names()
    assert set(project.states().values()) == {"pristine"}


def test_path_that_the_terminal_cannot_show_is_no_error(project, monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(["add", "rope", "--to", "läyers", "--dry-run"], project.upstream) == 0
    assert terminal.buffer.getvalue().endswith(b"nothing was written to l\\xe4yers\n")


def test_closed_output_is_no_traceback(tmp_path):
    line = f"{shlex.quote(sys.executable)} -m tinyblock list --json | true"
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=WITH_PACKAGE, capture_output=True, text=True)
    assert not re.search("Traceback|BrokenPipe|tinyblock:", done.stderr), done.stderr
