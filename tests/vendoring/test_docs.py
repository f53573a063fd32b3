"""What docs/vendoring.md shows is what happens."""

import importlib
import re
import shlex
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
    take, edit_, verify, update = blocks("console")
    assert replay(take, project) == take
    assert replay(edit_, project) == edit_
    if (PACKAGE / "contract").is_dir():
        assert replay(verify, project) == verify
    layers = project.root / "my_project" / "layers"
    for path in layers.iterdir():
        path.unlink()
    Copies(layers, Upstream(_with_earlier_ffn(project.root / "earlier"), __version__)).add(["ffn"])
    assert replay(update, project) == update


def _with_earlier_ffn(folder):
    folder.mkdir()
    for name in ("LICENSE", "ffn.py"):
        (folder / name).write_bytes((PACKAGE / name).read_bytes())
    with (folder / "ffn.py").open("a") as file:
        file.write("# Earlier, this was the last line.\n")
    return folder


def test_host_turns_the_checks_on_as_it_says(project, monkeypatch):
    [add] = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("tinyblock add")]
    [init] = blocks("python")
    path = project.root / init.partition("\n")[0].removeprefix("# ")
    monkeypatch.chdir(project.root)
    assert project.run(*shlex.split(add)[1:], upstream=INSTALLED).code == 0
    path.write_text(init)
    monkeypatch.syspath_prepend(project.root)
    block = importlib.import_module("my_project.layers.block").Block(24, 4)
    assert block(torch.randn(3, 24)).shape == (3, 24)
    with pytest.raises(TypeError, match=r"my_project\.layers\.block\.Block\.forward[^$]*f32\[3,23\]"):
        block(torch.randn(3, 23))
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_project"]:
        monkeypatch.delitem(sys.modules, name)


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
    assert re.search(
        r"^E +jaxtyping\.TypeCheckError: .*my_project\.layers\.rmsnorm\.RMSNorm\.forward", done.stdout, re.M
    )
