"""`tinyblock verify`: which tests run, on which layers."""

import importlib.util
import re
import subprocess

import forked
import pytest

from tinyblock import copies


def test_verify_runs_the_tests_that_layers_and_options_select():
    options = ["--collect-only", "-k", "float64 and equation"]
    code, printed = forked.verify(copies.ROOT, "ffn", "rope.py", *options)
    assert code == 0, printed
    collected = re.findall(r"test_(\w+)\.py.*, (\w+)\]$", printed, re.MULTILINE)
    assert set(collected) == {("ffn", "float64"), ("rope", "float64")}


def test_verify_tests_the_equation_first():
    """With `-x`, an edited copy fails in it before anything is compiled."""
    _, printed = forked.verify(copies.ROOT, "ffn", "rope", "--collect-only")
    names = re.findall(r"::(test_\w+)", printed)
    count = names.count("test_equation")
    assert set(names[:count]) == {"test_equation"}
    assert len(names) > count


class Pytest:
    """Takes the place of pytest: remembers the commands, and exits with a code."""

    def __init__(self):
        self.code = 0

    def run(self, command, **options):
        self.command = command
        return subprocess.CompletedProcess(command, self.code)


@pytest.fixture
def fake_pytest(monkeypatch):
    fake = Pytest()
    monkeypatch.setattr(subprocess, "run", fake.run)
    return fake


def test_verify_passes_layers_and_options_on_to_pytest(project, fake_pytest):
    project.run("verify", "rope", "ffn.py", "-k", "float64")
    selected = [part for part in fake_pytest.command if part.startswith("--layers=")]
    folder = project.folder.resolve()
    assert selected == [f"--layers={folder / name}" for name in ("rope.py", "ffn.py")]
    assert fake_pytest.command[-2:] == ["-k", "float64"]


def test_verify_runs_the_tests_beside_the_layers(project, fake_pytest):
    project.run("add", "rope", "--with-tests")
    project.run("verify")
    assert str(project.folder.resolve() / "contract") in fake_pytest.command
    assert f"--layers={project.folder.resolve()}" in fake_pytest.command


def test_verify_runs_tinyblocks_tests_where_there_are_none(project, fake_pytest):
    project.run("verify")
    assert str(copies.ROOT / "contract") in fake_pytest.command


def test_verify_of_a_file_runs_the_tests_beside_it(project, fake_pytest):
    project.run("add", "rope", "--with-tests")
    assert copies.main(["verify", str(project.rope)]) == 0
    assert str(project.folder.resolve() / "contract") in fake_pytest.command
    assert f"--layers={project.rope.resolve()}" in fake_pytest.command


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (1, 1), (4, 2), (5, 2)])
def test_verify_exits_with_2_unless_tests_passed_or_failed(
    code, expected, project, fake_pytest
):
    fake_pytest.code = code  # pytest's: 4 for wrong options, 5 if no test ran
    project.run("verify", code=expected)


@pytest.mark.parametrize("missing", ["torch", "pytest", "einops", "jaxtyping"])
def test_verify_names_a_missing_package(missing, monkeypatch, capsys):
    found = importlib.util.find_spec

    def find_spec(name):
        return None if name == missing else found(name)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    assert copies.main(["verify", "layers"]) == 2
    assert f"verify requires {missing}: install" in capsys.readouterr().err
