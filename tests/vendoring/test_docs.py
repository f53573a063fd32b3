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

from tinyblock.vendoring.catalogue import Upstream


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
            done = project.run(*shlex.split(command)[1:], upstream=Upstream())
            assert done.err == ""
            out, command = done.out, filters or "cat"
        shell = subprocess.run(
            command,
            shell=True,
            input=out,
            cwd=project.root,
            capture_output=True,
            text=True,
        )
        shown.append(f"$ {line}\n{shell.stdout}")
    return "".join(shown)


@pytest.mark.skipif(sys.platform != "linux", reason="the sessions use GNU sed")
def test_sessions_print_what_they_show(project, monkeypatch):
    monkeypatch.chdir(project.root)
    add, edit, verify, update = blocks("console")
    for session in (add, edit, verify):
        assert replay(session, project) == session
    shutil.rmtree("my_project")
    earlier = shutil.copytree(PACKAGE, project.root / "earlier")
    for name in ("ffn.py", "rope.py"):
        (earlier / name).write_text(
            (PACKAGE / name).read_text() + "# This was the last line once.\n"
        )
    add = ["add", "block", "rope", "--to", "my_project/layers"]
    assert project.run(*add, upstream=Upstream(earlier, "0.0.9")).code == 0
    replay(edit.partition("\n$")[0] + "\n", project)
    assert replay(update, project) == update


def test_project_enables_typecheck_as_shown(project, monkeypatch):
    [add] = [
        line
        for block in blocks("sh")
        for line in block.splitlines()
        if line.startswith("tinyblock add")
    ]
    [init] = blocks("python")
    monkeypatch.chdir(project.root)
    assert project.run(*shlex.split(add)[1:], upstream=Upstream()).code == 0
    (project.root / init.partition("\n")[0].removeprefix("# ")).write_text(init)
    monkeypatch.syspath_prepend(project.root)
    monkeypatch.setitem(sys.modules, "tinyblock", None)  # importing it raises
    block = importlib.import_module("my_project.layers.block").Block(24, 4)
    assert block(torch.randn(3, 24)).shape == (3, 24)
    with pytest.raises(
        TypeError, match=r"my_project\.layers\.block\.Block\.forward[^$]*f32\[3,23\]"
    ):
        block(torch.randn(3, 23))


def test_hook_of_jaxtyping_checks_copies_as_shown(project):
    [line] = [
        line
        for block in blocks("sh")
        for line in block.splitlines()
        if line.startswith("pytest ")
    ]
    project.run(
        "add",
        "rmsnorm",
        "--to",
        project.root / "my_project" / "layers",
        upstream=Upstream(),
    )
    norm = "import torch\nfrom my_project.layers.rmsnorm import RMSNorm\n"
    (project.root / "test_norm.py").write_text(
        f"{norm}def test(): RMSNorm(8)(torch.ones(2, 9))\n"
    )
    command = [sys.executable, "-m", *shlex.split(line), "-p", "no:cacheprovider"]
    done = subprocess.run(
        command, cwd=project.root, env=WITHOUT_PACKAGE, capture_output=True, text=True
    )
    assert re.search(
        r"E +jaxtyping\.TypeCheckError: .*my_project\.layers\.rmsnorm\.RMSNorm\.forward",
        done.stdout,
    )
