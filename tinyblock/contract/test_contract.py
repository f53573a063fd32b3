"""Run the contract on the layers in this folder, with pytest: copied beside them, it needs contract.py and no more."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

_FOLDER = Path(__file__).parent
_SPEC = importlib.util.spec_from_file_location(f"{__name__}_of", _FOLDER / "contract.py")
assert _SPEC is not None
assert _SPEC.loader is not None
contract = sys.modules[_SPEC.name] = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(contract)
_LAYERS = contract.load(_FOLDER)
_PROPERTIES = [held for held in contract.PROPERTIES if held.layer in _LAYERS]


@pytest.mark.parametrize("held", _PROPERTIES, ids=[f"{held.layer}: {held.name}" for held in _PROPERTIES])
def test_contract(held: Any) -> None:
    missing = ", ".join(sorted(held.needs - _LAYERS.keys()))
    if missing:
        pytest.skip(f"it needs {missing} in this folder too")
    held.run(_LAYERS)
