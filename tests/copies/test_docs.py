"""What docs/vendoring.md shows is what happens."""

import dataclasses
import importlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import torch
from copies.releases import PACKAGE, ROOT, edit
from isolated import WITHOUT_PACKAGE

from tinyblock.copies import installed_release

PAGE = (ROOT / "docs" / "vendoring.md").read_text(encoding="utf-8")


def blocks(kind):
    """Return the code blocks of a kind."""
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)


def command_that_starts_with(text):
    """Return the one command like that, outside of the sessions."""
    lines = "".join(blocks("sh")).splitlines()
    [command] = [line for line in lines if line.startswith(text)]
    return shlex.split(command)


@pytest.fixture
def project(project, monkeypatch):
    """A project that copies from this tinyblock."""
    monkeypatch.chdir(project.root)
    project.release = installed_release()
    return project


def replay(session, project):
    """Run the commands of a session in the project, and return it with what they print."""
    shown = []
    for line in re.findall(r"^\$ (.*)\n", session, re.MULTILINE):
        command, _, filters = line.partition(" | ")
        out = ""
        if command.startswith("tinyblock "):
            done = project.run(*shlex.split(command)[1:])
            assert done.err == ""
            out, command = done.out, filters or "cat"
        shell = subprocess.run(
            command, shell=True, input=out, capture_output=True, text=True
        )
        shown.append(f"$ {line}\n{shell.stdout}")
    return "".join(shown)


def test_sessions_print_what_they_show(project):
    copy, change, drop, verify, update = blocks("console")
    for session in (copy, change, drop, verify):
        assert replay(session, project) == session
    shutil.rmtree("my_project")
    new = project.release
    earlier = shutil.copytree(PACKAGE, project.root / "earlier")
    for name in ("ffn.py", "rope.py"):
        text = (earlier / name).read_text(encoding="utf-8")
        changed = text.replace("\n\n", "\n\n# This was the first line once.\n", 1)
        (earlier / name).write_text(changed, encoding="utf-8")
    project.release = dataclasses.replace(new, root=earlier, version="0.0.9")
    replay(copy, project)
    replay(change.partition("\n$")[0] + "\n", project)
    project.release = new
    assert replay(update, project) == update


def test_file_copied_by_hand_is_recorded_as_shown(project):
    [by_hand] = [block for block in blocks("python") if "shutil.copy" in block]
    exec(by_hand, {})
    [command] = re.findall(r"`tinyblock (add \w+ --to \.)`", PAGE)
    done = project.run(*command.split())
    assert done.rows["rope.py"] == "recorded"
    edit(project.root / "rope.py", "# fmt: off\n", "# fmt: off\n# Ours.\n")
    assert project.run("check", ".").rows == {"rope.py": "edited"}


def test_project_enables_typecheck_as_shown(project, monkeypatch):
    [init] = [block for block in blocks("python") if "typecheck(layer)" in block]
    assert project.run(*command_that_starts_with("tinyblock add")[1:]).code == 0
    path = init.partition("\n")[0].removeprefix("# ")
    (project.root / path).write_text(init)
    monkeypatch.syspath_prepend(project.root)
    monkeypatch.setitem(sys.modules, "tinyblock", None)  # importing it raises
    block = importlib.import_module("my_project.layers.block").Block(24, 4)
    assert block(torch.randn(3, 24)).shape == (3, 24)
    expected = r"my_project\.layers\.block\.Block\.forward[^$]*f32\[3,23\]"
    with pytest.raises(TypeError, match=expected):
        block(torch.randn(3, 23))


def test_hook_of_jaxtyping_checks_copies_as_shown(project):
    project.run("add", "rmsnorm", "--to", "my_project/layers")
    (project.root / "test_norm.py").write_text(
        "import torch\n"
        "from my_project.layers.rmsnorm import RMSNorm\n"
        "def test(): RMSNorm(8)(torch.ones(2, 9))\n"
    )
    arguments = [*command_that_starts_with("pytest "), "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        env=WITHOUT_PACKAGE,
        capture_output=True,
        text=True,
    )
    expected = r"E +jaxtyping\.TypeCheckError: .*my_project\.layers\.rmsnorm\.RMSNorm\."
    assert re.search(expected, done.stdout)
