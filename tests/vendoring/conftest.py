"""Two releases of a tinyblock of stand-ins, and a project that copies from the newer one."""

import pytest
from vendoring.project import FILES, FIRST, FIRST_OF_NEW, Project, release


@pytest.fixture
def old(tmp_path):
    return release(tmp_path / "old", "0.1.0")


@pytest.fixture
def new(tmp_path):
    """The release after the old one: attention, rope and the harness of the contracts have changed."""
    names = ("attention.py", "rope.py", "contract/harness.py")
    return release(tmp_path / "new", "0.2.0", {name: FILES[name].replace(FIRST, FIRST_OF_NEW) for name in names})


@pytest.fixture
def project(tmp_path, new, capsys):
    return Project(tmp_path, new, capsys)
