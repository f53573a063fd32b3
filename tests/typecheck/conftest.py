"""What the tests of typecheck share: a copy of a user's module."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from tinyblock.typecheck import typecheck

USERS_MODULE = Path(__file__).with_name("users_module.py")


@pytest.fixture(
    scope="module", params=["", "from __future__ import annotations\n"], ids=repr
)
def module(request, tmp_path_factory):
    """A copy of users_module.py, checked; also if it postpones its annotations."""
    file = tmp_path_factory.mktemp("copy") / USERS_MODULE.name
    file.write_text(request.param + USERS_MODULE.read_text())
    spec = spec_from_file_location("users_module", file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return typecheck(module)
