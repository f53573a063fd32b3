"""What docs/vendoring.md shows is what happens."""

import importlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import torch
from isolated import WITHOUT_PACKAGE
from vendoring.project import PACKAGE, ROOT

from tinyblock import __version__
from tinyblock.vendoring.catalogue import Upstream
from tinyblock.vendoring.copies import Copies

INSTALLED = Upstream.installed()


def blocks(kind):
    """Return the code blocks of a kind."""
    text = (ROOT / "docs" / "vendoring.md").read_text(encoding="utf-8")
    return re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL)


def replay(session, project):
    """Run the commands of a session in the project, and return it with what they print."""
    shown = []
    for line in re.findall(r"^\$ (.*)\n", session, re.MULTILINE):
        command, _, filters = line.partition(" | ")
        out = ""
        if command.startswith("tinyblock "):
            done = project.run(*shlex.split(command)[1:], upstream=INSTALLED)
            assert done.err == ""
            out, command = done.out, filters or "cat"
        shell = subprocess.run(command, shell=True, input=out, cwd=project.root, capture_output=True, text=True)
        shown.append(f"$ {line}\n{shell.stdout}")
    return "".join(shown)


@pytest.mark.skipif(sys.platform != "linux", reason="the sessions use GNU sed")
def test_sessions_print_what_they_say(project, monkeypatch):
    monkeypatch.chdir(project.root)
    take, edit, verify, update = blocks("console")
    assert replay(take, project) == take
    assert replay(edit, project) == edit
    assert replay(verify, project) == verify
    layers = project.root / "my_project" / "layers"
    shutil.rmtree(layers)  # with what Python compiled there
    layers.mkdir()
    earlier = shutil.copytree(PACKAGE, project.root / "earlier") / "ffn.py"
    earlier.write_text(earlier.read_text() + "# Earlier, this was the last line.\n")
    Copies(layers, Upstream(earlier.parent, __version__)).add(["ffn"])
    assert replay(update, project) == update


def test_host_turns_the_checks_on_as_it_says(project, monkeypatch):
    [add] = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("tinyblock add")]
    [init] = blocks("python")
    path = project.root / init.partition("\n")[0].removeprefix("# ")
    monkeypatch.chdir(project.root)
    assert project.run(*shlex.split(add)[1:], upstream=INSTALLED).code == 0
    path.write_text(init)
    monkeypatch.syspath_prepend(project.root)
    monkeypatch.setitem(sys.modules, "tinyblock", None)  # so that importing it fails
    block = importlib.import_module("my_project.layers.block").Block(24, 4)
    assert block(torch.randn(3, 24)).shape == (3, 24)
    with pytest.raises(TypeError, match=r"my_project\.layers\.block\.Block\.forward[^$]*f32\[3,23\]"):
        block(torch.randn(3, 23))


USED = """
import torch
from my_project.layers.rmsnorm import RMSNorm
def test_right(): RMSNorm(8)(torch.ones(2, 8))
def test_wrong(): RMSNorm(8)(torch.ones(2, 9))
"""


def test_hook_of_jaxtyping_checks_copies_as_it_says(project):
    [line] = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("pytest ")]
    project.run("add", "rmsnorm", "--to", project.root / "my_project" / "layers", upstream=INSTALLED)
    (project.root / "test_used.py").write_text(USED)
    command = [sys.executable, "-m", *shlex.split(line), "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=project.root, env=WITHOUT_PACKAGE, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 1 passed" in done.stdout
    assert re.search(r"E +jaxtyping\.TypeCheckError: .*my_project\.layers\.rmsnorm\.RMSNorm\.forward", done.stdout)
