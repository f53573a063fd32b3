"""`tinyblock verify` runs pytest on the contract, and returns what it found."""

import dataclasses
import zipfile

import pytest

CONFTEST = """
import os
import pytest

def pytest_addoption(parser):
    parser.addoption("--layers")

def pytest_configure(config):
    if config.getoption("layers") == "rejected":
        raise pytest.UsageError("no layers: give others")
    print("tested:", config.getoption("layers"))
    if config.getoption("layers") == "exits":
        os._exit(0)
"""
TESTS = """
def test_norm_holds():
    pass

def test_mlp_fails():
    assert False, "got 1, expected 2"
"""


@pytest.fixture
def verify(project, monkeypatch):
    """Return a function that verifies layers against two tests. One of them fails."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they are slow to import
    contract = project.release.root / "contract"
    for path in contract.glob("*.py"):
        path.unlink()
    (contract / "__init__.py").touch()
    (contract / "contract.ini").write_text("[pytest]\naddopts = --tb=line\n")
    (contract / "conftest.py").write_text(CONFTEST)
    (contract / "test_contract.py").write_text(TESTS)
    return lambda *argv: project.run("verify", *argv)


def test_verify_returns_1_if_a_property_fails(verify):
    code, out, err = verify("some layers")
    assert (code, err) == (1, "")
    assert "tested: some layers" in out
    assert "got 1, expected 2" in out
    assert "def test_mlp_fails" not in out  # as contract.ini sets


def test_verify_passes_arguments_on_to_pytest(verify):
    code, out, _ = verify("layers", "-k", "not mlp", "-v")
    assert code == 0
    assert "test_norm_holds PASSED" in out


def test_verify_rejects_a_second_target(verify, project, monkeypatch):
    monkeypatch.chdir(project.root)
    (project.root / "mlp").mkdir()
    code, _, err = verify("layers", "mlp")
    assert code == 2
    assert "verify takes one target, got layers and mlp" in err
    code, out, _ = verify("layers", "-k", "mlp")  # the value of an option
    assert code == 1
    assert "tested: layers" in out


def test_verify_reports_options_before_the_target_in_one_line(verify):
    expected = "verify takes the target first: tinyblock verify TARGET -k ..."
    assert verify("-k", "mlp", "layers") == (2, "", f"tinyblock: error: {expected}\n")


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("--no-such-option", "unrecognized arguments: --no-such-option"),
        ("--maxfail=x", "argument --maxfail: invalid int value: 'x'"),
        ("--layers=rejected", "no layers: give others"),
    ],
)
def test_verify_reports_wrong_options_of_pytest_in_one_line(verify, option, expected):
    assert verify("layers", option) == (2, "", f"tinyblock: error: {expected}\n")


def test_verify_returns_2_if_there_is_nothing_to_test(verify):
    code, _, err = verify("layers", "-k", "nothing")
    assert code == 2
    expected = "the arguments for pytest must select at least one test, got none: "
    assert err.startswith(f"tinyblock: error: {expected}")


def test_verify_uses_no_setting_of_the_user(verify, project, monkeypatch):
    monkeypatch.setenv("PYTEST_ADDOPTS", "--no-such-option")
    (project.root / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    (project.root / "conftest.py").write_text("raise RuntimeError\n")
    monkeypatch.chdir(project.root)
    before = sorted(project.root.rglob("*"))
    assert verify(".", "-k", "norm").code == 0
    assert sorted(project.root.rglob("*")) == before
    assert not list(project.release.root.rglob(".pytest_cache"))


def test_verify_reports_tests_that_end_early(verify):
    code, _, err = verify("exits")
    assert code == 2
    assert err.startswith("tinyblock: error: the tests ended early, with exit code 0")
    assert err.count("\n") == 1


def test_verify_without_pytest_names_the_command_that_installs_it(project, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    expected = "verify requires pytest: python -m pip install pytest\n"
    project.assert_rejected(expected, "verify", project.folder)


def test_verify_in_an_archive_is_rejected_with_the_fix(project):
    path = project.root / "tinyblock.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tinyblock/contract/__init__.py", "")
    root = zipfile.Path(path, "tinyblock/")
    project.release = dataclasses.replace(project.release, root=root)
    expected = "verify cannot read .*: install tinyblock with pip"
    project.assert_rejected(expected, "verify", project.folder)
