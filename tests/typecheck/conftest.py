"""What the tests of typecheck share: a copy of a user's module."""

import __future__

import types
from pathlib import Path

import pytest

from tinyblock.typecheck import typecheck

USERS_MODULE = Path(__file__).with_name("users_module.py")


@pytest.fixture(scope="module", params=["annotations", "postponed annotations"])
def module(request):
    """A copy of users_module.py, checked; also as if it imported annotations from __future__."""
    postponed = request.param == "postponed annotations"
    flags = __future__.annotations.compiler_flag if postponed else 0
    module = types.ModuleType("users_module")
    source = USERS_MODULE.read_text()
    exec(compile(source, str(USERS_MODULE), "exec", flags), vars(module))
    return typecheck(module)
