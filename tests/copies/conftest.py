"""Two releases, and a project that copies from the newer one."""

import pytest
from copies.releases import FIRST, FIRST_OF_NEW, Project, edit, make_release


@pytest.fixture
def old(tmp_path):
    return make_release(tmp_path / "old", "0.1.0")


@pytest.fixture
def new(tmp_path):
    """The release after the old one: mlp, rope and the checks have changed."""
    release = make_release(tmp_path / "new", "0.2.0")
    for name in ("mlp.py", "rope.py", "contract/checks.py"):
        edit(release.root / name, FIRST, FIRST_OF_NEW)
    return release


@pytest.fixture
def project(tmp_path, new, capfd):
    return Project(tmp_path, new, capfd)
