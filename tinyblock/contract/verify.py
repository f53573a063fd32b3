"""Run the promises on copies of layers, and say of each whether it holds."""

import difflib
import importlib.util
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from unittest import SkipTest

import tinyblock

from . import LAYERS
from .harness import PROPERTIES, Violation
from .loading import load, make_importable

__all__ = ["verify"]


def verify(target: str, skip: Sequence[str]) -> int:
    """Print what each property of the layers in `target` comes to, but those to skip; return the exit code.

    `target` is a folder, a .py file, or a package or module by its dotted name. What a property needs beside a layer is
    taken from there, or else from tinyblock.

    Raises:
        LookupError: there is no layer in `target`, or no property of a name to skip.
        ImportError: a layer cannot be imported.
    """
    make_importable(Path.cwd())
    path = Path(target) if Path(target).exists() else _locate(target)
    copies, upstream = load(path), {module.__name__.rpartition(".")[2]: module for module in tinyblock.LAYERS}
    properties = [promised for promised in PROPERTIES if promised.layer in copies]
    names = {name for promised in properties for name in (promised.name, f"{promised.layer}: {promised.name}")}
    for name in skip:
        if name not in names:
            near = difflib.get_close_matches(name, sorted(names), n=1, cutoff=0)
            raise LookupError(f"there is no property {name!r} to skip here: did you mean {near[0]!r}?")
    counts: Counter[str] = Counter()

    def tell(outcome: str, what: str, why: object = "") -> None:
        counts[outcome] += 1
        print(f"  {outcome:4}  {what}{why and ': '}{why}", flush=True)

    for layer in upstream:
        file = Path(str(copies[layer].__file__)) if layer in copies else path / f"{layer}.py"
        if not file.is_file():
            continue
        own = [promised for promised in properties if promised.layer == layer]
        borrowed = [name for name in upstream if name not in copies and any(name in it.needs for it in own)]
        shown = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
        print(f"{layer}: {shown}" + (f" (with the {', '.join(borrowed)} of tinyblock)" if borrowed else ""))
        classes = [name for name in LAYERS[layer] if name[0].isupper()]
        has_classes = re.search(r"^class ", file.read_text(encoding="utf-8"), re.MULTILINE)
        if has_classes and not any(hasattr(copies.get(layer), name) for name in classes):
            tell("FAIL", f"{classes[0]} is there", f"{file.name} does not define it, and it is not verified")
        for promised in own:
            if {promised.name, f"{layer}: {promised.name}"} & {*skip}:
                tell("skip", promised.name, "as you asked")
                continue
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    promised.run(upstream | copies)
                tell("ok", promised.name)
            except Violation as violation:
                tell("FAIL", promised.name, violation)
            except SkipTest as skipped:
                tell("skip", promised.name, skipped)
    print(f"{counts['ok']} hold, {counts['FAIL']} fail, {counts['skip']} skipped")
    return 1 if counts["FAIL"] else 0


def _locate(name: str) -> Path:
    """Return the folder of a package, or the file of a module, that can be imported from here."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # of what is above it
        spec = None
    path = Path([*(spec.submodule_search_locations or []), spec.origin or ""][0] if spec else "")
    if not path.exists() or path == Path():
        raise LookupError(f"{name} is not there: give a folder, a .py file, or a module as it is imported from here")
    return path
