"""How the command starts from a clone: with any Python, and without a package."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMANDS = ("list", "add", "check", "diff", "update", "verify")


def run(*command, folder):
    return subprocess.run(
        [*map(str, command)], cwd=folder, capture_output=True, text=True, check=False
    )


@pytest.fixture
def clone(empty):
    """A clone that nobody has installed, and how it starts beside the project."""
    path = shutil.copytree(empty.tinyblock, empty.root.parent / "tinyblock")
    return [sys.executable, "-I", "-S", Path("..", path.name)]


def test_a_clone_works_without_any_package(empty, clone):
    """An installed wheel does the same, as .ci/run shows."""
    commands = {
        "list": ["list"],
        "add": ["add", "block", "typecheck", "--with-tests", "--to", empty.name],
        "check": ["check", empty.name],
        "diff": ["diff", empty.name],
        "update": ["update", empty.name],
    }
    for name, command in commands.items():
        done = run(*clone, *command, folder=empty.root)
        assert (done.returncode, done.stderr) == (0, ""), name
    done = run(*clone, "verify", empty.name, folder=empty.root)
    assert done.returncode == 2
    required = "verify requires torch, pytest, einops, jaxtyping: install them for "
    assert done.stderr.startswith(f"tinyblock: error: {required}")


def python(version):
    """Return the path of another Python, or skip the test."""
    if shutil.which("pyenv"):
        prefix = run("pyenv", "prefix", version, folder=ROOT).stdout.strip()
        if prefix:
            return Path(prefix, "bin", "python")
    return shutil.which(f"python{version}") or pytest.skip(f"requires Python {version}")


@pytest.mark.parametrize("version", ["2.7", "3.6", "3.9"])
def test_an_older_python_gets_one_line(version, empty, clone):
    done = run(python(version), clone[-1], "list", folder=empty.root)
    assert done.returncode == 2
    error = f"tinyblock: error: Python must be 3.10 or newer, got {version}"
    assert done.stderr.startswith(error)
    assert done.stderr.count("\n") == 1


def test_the_oldest_python_copies_and_merges(empty, clone):
    program = [python("3.10"), *clone[1:]]
    add = ["add", "block", "--to", empty.name]
    assert run(*program, *add, folder=empty.root).returncode == 0
    contents = empty.contents()
    empty.append("ffn.py", "# mine")
    empty.change("ffn.py", "import math\n", "import math  # new\n")
    shutil.copy(empty.tinyblock / "ffn.py", empty.root / clone[-1])
    done = run(*program, "update", empty.name, folder=empty.root)
    assert "ffn.py        merged with your edits\n" in done.stdout
    merged = contents["ffn.py"].replace(b"import math\n", b"import math  # new\n")
    assert empty.contents()["ffn.py"] == merged + b"# mine\n"


def test_a_reader_may_close_the_pipe(empty, clone):
    """As in `tinyblock list | head -1`, whose reader closes the pipe."""
    command = [*map(str, clone), "list"]
    options = {"cwd": empty.root, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **options) as process:
        process.stdout.close()
        assert process.stderr.read() == b""


def test_a_console_may_lack_a_letter_of_an_edit(project):
    project.append("rope.py", "# größer ∞")
    console = {"PYTHONIOENCODING": "cp1252"}
    command = [sys.executable, project.tinyblock, "diff", project.name]
    done = subprocess.run(command, cwd=project.root, env=console, capture_output=True)
    assert "+# größer \\u221e" in done.stdout.decode("cp1252")


def test_without_a_command_the_help_names_each(empty, clone):
    done = run(*clone, folder=empty.root)
    assert done.returncode == 0
    for command in COMMANDS:
        assert f"\n    {command} " in done.stdout


def test_list_shows_the_title_of_each_layer(empty, clone):
    titles = {
        path.stem: path.read_text().splitlines()[0].strip('"')
        for path in empty.tinyblock.glob("[!_]*.py")
        if path.stem != "copies"
    }
    printed = run(*clone, "list", folder=empty.root).stdout
    assert dict(line.split(maxsplit=1) for line in printed.splitlines()) == titles


# What is typed, and what the error must name.
ERRORS = {
    "a folder without copies": (["check", "no where"], "no where has no copy of a "),
    "a file for a folder": (["check", "a file"], "a file has no copy of a layer\n"),
    "layers without copies": (["update", "x", "rope.py", "mine"], "of mine rope\n"),
    "a device for a folder": (["add", "rope", "--to", "/dev/null"], "/dev/null"),
    "a folder in a file": (["add", "rope", "--to", "a file/x"], "'a file/x'\n"),
}


def test_an_error_is_one_line_and_names_what_was_typed(empty, clone):
    (empty.root / "a file").touch()
    (empty.root / "no where").mkdir()
    users = empty.root / "no where" / "ffn.py.partial"  # not tinyblock's to delete
    users.touch()
    for title, (command, named) in ERRORS.items():
        done = run(*clone, *command, folder=empty.root)
        assert (done.returncode, done.stdout) == (2, ""), title
        assert done.stderr.startswith("tinyblock: error: "), title
        assert named in done.stderr, title
        assert done.stderr.count("\n") == 1, title
    assert users.exists()


def test_wrong_arguments_copy_nothing(empty, clone):
    to = f"--to={empty.name}"
    for arguments in (["copies", to], ["conftest", to], ["rope"], [to]):
        done = run(*clone, "add", *arguments, folder=empty.root)
        assert done.returncode == 2, arguments
        assert not empty.folder.exists(), arguments
