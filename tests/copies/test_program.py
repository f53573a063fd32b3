"""How the command starts: installed, or as `python3 tinyblock` with Python alone."""

import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tinyblock import copies

PACKAGE = copies.ROOT


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A clone in the folder above, which nobody has installed."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return shutil.copytree(
        PACKAGE, tmp_path / "tinyblock", ignore=shutil.ignore_patterns("__pycache__")
    )


def bare(*arguments):
    """Run a command with Python alone: without a package, a path, or a user's folder."""
    command = [sys.executable, "-I", "-S", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def contents(folder):
    return {
        path.relative_to(folder): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_clone_writes_the_same_files_as_the_installed_command(clone):
    done = bare("../tinyblock", "add", "block", "--with-tests", "--to", "from_clone")
    assert (done.returncode, done.stderr) == (0, "")
    copies.main(["add", "block", "--with-tests", "--to", "installed"])
    assert contents(Path("from_clone")) == contents(Path("installed"))


@pytest.mark.parametrize("command", ["check", "diff", "update"])
def test_a_command_on_copies_needs_no_package(command, clone):
    copies.main(["add", "rope", "--to", "layers"])
    done = bare("../tinyblock", command, "layers")
    assert (done.returncode, done.stderr) == (0, "")


def test_list_needs_no_package(clone):
    done = bare("../tinyblock", "list")
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(copies.TITLES)


def test_verify_names_the_packages_that_it_requires(clone):
    done = bare("../tinyblock", "verify", "layers")
    assert done.returncode == 2
    assert done.stderr.startswith(
        "tinyblock: error: verify requires torch, pytest, einops, jaxtyping: "
        f"install them for {sys.executable}"
    )


def test_a_reader_may_close_the_pipe(clone):
    """As in `tinyblock list | head -1`, whose reader closes the pipe."""
    command = [sys.executable, "-I", "-S", "../tinyblock", "list"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as run:
        run.stdout.close()
        assert run.stderr.read() == b""


def test_hints_name_the_folder_of_a_clone_as_it_was_typed(clone):
    python = Path(sys.executable).name
    done = bare("../tinyblock", "add", "rope", "--to", "layers")
    assert f"`{python} ../tinyblock add typecheck --to layers`" in done.stdout
    done = bare("../tinyblock", "check", "other")
    assert f"run `{python} ../tinyblock add LAYER --to other`" in done.stderr
    done = bare("../tinyblock", "--help")
    assert done.stdout.startswith(f"usage: {python} ../tinyblock ")


def test_hints_name_a_module_that_was_started_with_m(monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(PACKAGE / "__main__.py"), "list"])
    assert copies.started_as() == f"{Path(sys.executable).name} -m tinyblock"


def test_hints_name_the_installed_command(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/tinyblock", "list"])
    assert copies.started_as() == "tinyblock"


@pytest.mark.parametrize("version", [(2, 7, 18), (3, 9, 25)], ids=["2.7", "3.9"])
def test_an_older_python_gets_one_line(version, monkeypatch, capsys):
    monkeypatch.setattr(sys, "version_info", version)
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(PACKAGE / "__main__.py"), run_name="__main__")
    printed = capsys.readouterr().err
    running = sys.version.split()[0]
    assert printed.startswith(
        f"tinyblock: error: Python must be 3.10 or newer, got {running}: start "
    )
    assert printed.count("\n") == 1


def test_the_oldest_python_that_the_error_names_is_accepted(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 10, 0))
    monkeypatch.setitem(sys.modules, "copies", copies)  # as from a folder on the path
    assert runpy.run_path(str(PACKAGE / "__main__.py"))["main"] is copies.main


def test_without_a_command_the_help_is_printed(capsys):
    with pytest.raises(SystemExit, match="0"):
        copies.main([])
    printed = capsys.readouterr().out
    assert printed.startswith("usage: tinyblock ")
    for command in ("list", "add", "check", "diff", "update", "verify"):
        assert f"\n    {command} " in printed


def test_list_shows_names_and_titles(capsys):
    assert copies.main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in lines]
    layers = ["attention", "block", "ffn", "rmsnorm", "rope", "transformer"]
    assert names == sorted([*layers, "parallelize", "typecheck"])
    assert "rope         Rotary position embedding (RoPE): rotate" in "\n".join(lines)


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("check nowhere", "nowhere has no copy of LAYER"),
        (f"check {__file__}", f"must be a folder, got the file {__file__}"),
        ("update nowhere rope.py", "`tinyblock add rope --to nowhere`"),
        ("diff 'no where'", "`tinyblock add LAYER --to 'no where'`"),
        ("add x --to y", "'x'"),
        ("add copies --to y", "'copies'"),
        ("add rope", "--to"),
        ("diff nowhere --mine --upstream", "--upstream"),
        ("add rope --to /dev/null", "/dev/null"),
        ("wrong", "'wrong'"),
    ],
    ids=[
        "a folder without copies",
        "a file for a folder",
        "the repair names what was typed",
        "the repair quotes a folder with a space",
        "no such layer",
        "no layer",
        "add without a folder",
        "two options that exclude each other",
        "a folder that cannot be made",
        "no such command",
    ],
)
def test_an_error_is_one_line_and_names_what_was_typed(command, named, capsys):
    assert copies.main(shlex.split(command)) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("tinyblock: error: ")
    assert named in printed.err
    assert printed.err.count("\n") == 1
