"""Copies of the layers, as people edit them, and what the contract finds in them."""

from pathlib import Path
from unittest import SkipTest

import tinyblock
from tinyblock.contract.harness import MISSING, PROPERTIES, Violation

PACKAGE = Path(tinyblock.__file__).parent
LAYERS = {module.__name__.rpartition(".")[2]: module for module in tinyblock.LAYERS}


def copy_layers(folder, *names, edits=()):
    """Copy layers to a folder, all where none is named, with edits (layer, old, new) of text that is there once."""
    folder.mkdir(parents=True, exist_ok=True)
    for layer in names or LAYERS:
        text = (PACKAGE / f"{layer}.py").read_text(encoding="utf-8")
        for _, old, new in (edit for edit in edits if edit[0] == layer):
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        (folder / f"{layer}.py").write_text(text, encoding="utf-8")
    return folder


def outcomes(modules, layer, names):
    """Run the properties of a layer that begin with these names; return the violations, and what the copy lacks."""
    violations, missing = {}, set()
    for prop in PROPERTIES:
        if prop.layer == layer and prop.name.startswith(names):
            try:
                prop.run(LAYERS | modules)
            except Violation as violation:
                violations[prop.name] = str(violation)
            except SkipTest:
                assert MISSING
            missing |= MISSING
    return violations, missing
