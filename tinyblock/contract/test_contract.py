"""Run the promises in this folder on the layers of the folder above, with pytest."""

from pathlib import Path

import pytest

from .harness import PROPERTIES, Property
from .loading import load

_LAYERS = load(Path(__file__).parents[1])
_PROMISED = [promised for promised in PROPERTIES if promised.layer in _LAYERS]


@pytest.mark.parametrize("promised", _PROMISED, ids=[f"{promised.layer}: {promised.name}" for promised in _PROMISED])
def test_contract(promised: Property) -> None:
    promised.run(_LAYERS)
