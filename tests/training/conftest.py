"""Signals as in a terminal: `make test` may run under nohup or in the background, which ignore them."""

import pytest
from processes import usual_handlers


@pytest.fixture(autouse=True)
def _usual_handlers():
    with usual_handlers():
        yield
