"""Two releases of tinyblock, and a project that copies from the newer one."""

import pytest
from vendoring.project import FIRST, FIRST_OF_NEW, Project, edit, release


@pytest.fixture
def old(tmp_path):
    return release(tmp_path / "old", "0.1.0")


@pytest.fixture
def new(tmp_path):
    """The release after the old one: attention, rope and the harness of the contracts have changed."""
    upstream = release(tmp_path / "new", "0.2.0")
    for name in ("attention.py", "rope.py", "contract/harness.py"):
        edit(upstream.root / name, FIRST, FIRST_OF_NEW)
    return upstream


@pytest.fixture
def project(tmp_path, new, capsys):
    return Project(tmp_path, new, capsys)
