"""Check copies of layers, and report the properties that they violate."""

import difflib
import fnmatch
import importlib.util
import textwrap
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from unittest import SkipTest

import torch

import tinyblock

from .harness import MISSING, PROPERTIES, Property, Violation
from .loading import load, make_importable


def verify(target: str, skip: Sequence[str], verbose: bool = False) -> int:
    """Check the layers in `target`, print the properties that they violate, and return 1 if there are any, else 0.

    `target` is a folder, a .py file, or a package or module by its dotted name. Layers that a property needs but
    `target` lacks are taken from tinyblock. `skip` has names of properties, which may begin with "LAYER: " and contain
    wildcards, as in "block: equation*". `verbose` prints every property.

    Raises:
        LookupError: `target` has no layer, or a name to skip matches no property.
        ImportError: a layer cannot be imported.
    """
    torch.set_num_threads(
        1
    )  # on tensors this small, other threads only wait, and slow the first one down
    make_importable(Path.cwd())
    copies = load(Path(target) if Path(target).exists() else _locate(target))
    upstream = {
        module.__name__.rpartition(".")[2]: module for module in tinyblock.LAYERS
    }
    _require_matches(skip, [prop for prop in PROPERTIES if prop.layer in copies])
    counts: Counter[str] = Counter()
    unsound: set[str] = (
        set()
    )  # layers that violate their contract, or depend on one that does

    def report(outcome: str, text: str) -> None:
        counts[outcome] += 1
        if verbose or outcome in ("FAIL", "note"):
            print(
                textwrap.fill(f"  {outcome:4}  {text}", 200, subsequent_indent=" " * 8),
                flush=True,
            )

    for layer in filter(copies.get, upstream):
        own = [prop for prop in PROPERTIES if prop.layer == layer]
        file = Path(str(copies[layer].__file__))
        shown = (
            file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
        )
        print(f"{layer}: {shown}", flush=True)
        if broken := sorted(unsound & _imported(copies[layer], copies)):
            report(
                "note",
                f"not judged: {len(own)} properties that depend on {' and '.join(broken)}",
            )
            counts["not judged"] += len(own)
            unsound.add(layer)
            continue
        incomplete: dict[str, list[str]] = {}  # what the copy lacks: properties
        for prop in own:
            if any(_matches(prop, pattern) for pattern in skip):
                report("skip", f"{prop.name}: as requested")
                continue
            outcome, why = _check(prop, upstream | copies)
            report(outcome, f"{prop.name}{why and ': '}{why}")
            if outcome == "FAIL":
                unsound.add(layer)
            for what in sorted(MISSING):
                incomplete.setdefault(what, []).append(prop.name)
        expected = _expected(copies[layer], upstream[layer])
        if incomplete and not any(hasattr(copies[layer], name) for name in expected):
            fix = f"name it so, or skip '{layer}: *'"
            report(
                "FAIL",
                f"{file.name} does not define {' or '.join(expected)}, so it is not verified: {fix}",
            )
        for what, names in incomplete.items():
            report("note", f"{what}; not checked, or only in part: {', '.join(names)}")
    print(
        f"{counts['ok']} hold, {counts['FAIL']} fail, {counts['skip']} skipped, {counts['not judged']} not judged"
    )
    return 1 if counts["FAIL"] else 0


def _check(prop: Property, layers: Mapping[str, ModuleType]) -> tuple[str, str]:
    """Return whether the property is ok, and why not."""
    with warnings.catch_warnings(action="ignore"):
        try:
            prop.run(layers)
        except Violation as violation:
            return "FAIL", str(violation)
        except SkipTest as skipped:
            return "skip", str(skipped)
    return "ok", ""


def _expected(layer: ModuleType, upstream: ModuleType) -> list[str]:
    """Return names that define the layer; a copy needs one: classes, or functions if the copy has no class."""
    has_class = any(
        isinstance(it, type) and it.__module__ == layer.__name__
        for it in vars(layer).values()
    )
    return [name for name in upstream.__all__ if name[0].isupper() or not has_class]


def _matches(prop: Property, pattern: str) -> bool:
    return any(
        fnmatch.fnmatchcase(name, pattern)
        for name in (prop.name, f"{prop.layer}: {prop.name}")
    )


def _require_matches(patterns: Sequence[str], properties: list[Property]) -> None:
    """Raise a LookupError, with the most similar name, for a pattern without a match."""
    names = sorted(
        {
            name
            for prop in properties
            for name in (prop.name, f"{prop.layer}: {prop.name}")
        }
    )
    for pattern in patterns:
        if not any(_matches(prop, pattern) for prop in properties):
            [near] = difflib.get_close_matches(pattern, names, n=1, cutoff=0)
            raise LookupError(
                f"no property matches {pattern!r}: did you mean {near!r}?"
            )


def _imported(layer: ModuleType, copies: Mapping[str, ModuleType]) -> set[str]:
    """Return the layers whose functions and classes a layer has imported."""
    homes = {getattr(value, "__module__", None) for value in vars(layer).values()}
    return {name for name, module in copies.items() if module.__name__ in homes}


def _locate(name: str) -> Path:
    """Return the folder of a package, or the file of a module, that can be imported from here."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # of what is above it
        spec = None
    path = Path(
        [*(spec.submodule_search_locations or []), spec.origin or ""][0] if spec else ""
    )
    if not path.exists() or path == Path():
        raise LookupError(
            f"{name!r} was not found: give a folder, a .py file, or a module that can be imported here"
        )
    return path
