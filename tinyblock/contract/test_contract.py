"""Check the properties in this folder for the layers of the folder above, with pytest."""

from pathlib import Path

import pytest

from .harness import PROPERTIES, Property
from .loading import load

_LAYERS = load(Path(__file__).parents[1])
_CHECKED = [prop for prop in PROPERTIES if prop.layer in _LAYERS]


@pytest.mark.parametrize(
    "prop", _CHECKED, ids=[f"{prop.layer}: {prop.name}" for prop in _CHECKED]
)
def test_contract(prop: Property) -> None:
    prop.run(_LAYERS)
