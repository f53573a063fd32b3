"""The command line: what it rejects, prints and returns."""

import io
import os
import re
import shutil
import subprocess
import sys
from unittest.mock import Mock

import pytest
from vendoring.project import PACKAGE

from tinyblock.vendoring.catalogue import Upstream
from tinyblock.vendoring.cli import main


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["unknown", "x"],
        ["add", "rope"],
        ["add", "rope", "--to", ""],
        ["remove", "x"],
    ],
)
def test_wrong_usage_is_rejected_in_one_line(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        main(argv)
    out, err = capsys.readouterr()
    assert (stop.value.code, out, err.count("\n")) == (2, "", 1)


def test_verify_passes_its_arguments_on_and_reports_what_cannot_be_loaded(
    project, monkeypatch
):
    verify = Mock(
        side_effect=[
            1,
            LookupError("there is\nno layer"),
            ImportError("there is\nno layer"),
        ]
    )
    monkeypatch.setattr("tinyblock.contract.verify.verify", verify)
    project.add("rope")
    project.path("tinyblock.skip").write_text("# We need no tables.\n\nrope: a\n")
    assert (
        project.run(
            "verify", project.folder, "--skip", "b", "--skip", "c: d", "-v"
        ).code
        == 1
    )
    verify.assert_called_with(str(project.folder), ["b", "c: d", "rope: a"], True)
    for _ in range(2):
        project.assert_rejected("there is no layer\n", "verify", "elsewhere")


def test_command_imports_the_standard_library_only():
    for path in [*(PACKAGE / "vendoring").glob("*.py"), PACKAGE / "__main__.py"]:
        imported = re.findall(
            r"^ *(?:from|import) ([a-z]\w*)",
            path.read_text(encoding="utf-8"),
            re.MULTILINE,
        )
        assert set(imported) <= sys.stdlib_module_names


def test_add_of_a_block_without_rope_prints_how_to_add_it_once(project):
    hint = f"Block adds positions only with rope=; to copy RoPE: tinyblock add rope --to {project.folder}\n"
    assert project.add("block").out.endswith(hint)
    assert hint not in project.add("block").out
    for layers in (["block", "rope"], ["transformer"]):
        shutil.rmtree(project.folder)
        assert hint not in project.add(*layers).out


def test_diff_can_be_applied_whatever_the_encoding_of_the_terminal(
    project, monkeypatch
):
    (project.upstream.root / "typecheck.py").write_text(
        "# beartype, é, and no newline at the end", encoding="utf-8"
    )
    project.add("typecheck")
    pristine = project.path("typecheck.py").read_bytes()
    edited = pristine.replace(b"beartype", b"nothing")
    project.path("typecheck.py").write_bytes(edited)
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(["diff", str(project.folder)], project.upstream) == 0
    (project.root / "copy.py").write_bytes(pristine)
    patch = re.sub(
        rb"(?m)^(---|\+\+\+) .*$", rb"\1 a/copy.py", terminal.buffer.getvalue()
    )
    subprocess.run(["git", "apply", "-"], input=patch, cwd=project.root, check=True)
    assert (project.root / "copy.py").read_bytes() == edited


def test_closed_output_is_no_error(project, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(["list"], project.upstream) == 141


def test_interrupted_command_is_reported(project):
    upstream = Mock(spec=Upstream, layer=Mock(side_effect=KeyboardInterrupt))
    assert project.run("list", upstream=upstream) == (
        130,
        "",
        "tinyblock: interrupted\n",
    )
