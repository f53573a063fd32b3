"""What there is to copy: the layers as their texts describe them, and what a wish brings along.

A text is read, and not run; it may lie in a zip archive.
"""

import ast
import difflib
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

from .. import LAYERS, __version__
from . import Refusal
from .lock import LICENCE, Original
from .merging import decode

LAYER_NAMES = tuple(layer.__name__.rpartition(".")[2] for layer in LAYERS)
NAMES = (*LAYER_NAMES, "parallelize")  # what can be copied by name; it is no layer, and has no promises
TESTS = ("contract/__init__.py", "contract/test_contract.py")  # these import the rest, but for the layers' promises


@dataclass(frozen=True)
class Layer:
    """What a layer file says of itself."""

    name: str
    summary: str
    convention: str
    siblings: tuple[str, ...]
    packages: tuple[str, ...]
    exports: tuple[str, ...]

    @classmethod
    def read(cls, name: str, text: str) -> "Layer":
        tree = ast.parse(text)
        docstring = ast.get_docstring(tree) or ""
        convention = re.search(r"^Convention: (.*?)(?=^[A-Z]\w+: |\Z)", docstring, re.MULTILINE | re.DOTALL)
        packages, exports = set(), list[str]()
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and not node.level:
                packages.add(str(node.module).partition(".")[0])
            elif isinstance(node, ast.Import):
                packages |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                exports = ast.literal_eval(node.value)
        return cls(
            name,
            summary=docstring.partition("\n")[0],
            convention=" ".join(convention[1].split()) if convention else "",
            siblings=tuple(sorted(module for _, module in _relative_imports(tree))),
            packages=tuple(sorted(packages - sys.stdlib_module_names)),
            exports=tuple(exports),
        )


@dataclass(frozen=True)
class Upstream:
    """The tinyblock that copies are taken from."""

    root: Traversable
    version: str

    @classmethod
    def installed(cls) -> "Upstream":
        return cls(files("tinyblock"), __version__)

    def original(self, name: str) -> Original | None:
        """Return what a copy of that name is taken from, or None where this tinyblock has no such file."""
        source = self.root.joinpath("LICENSE" if name == LICENCE else name)
        return Original.of(name, self.version, decode(source.read_bytes())) if source.is_file() else None

    def require(self, name: str) -> Original:
        if (original := self.original(name)) is None:
            raise Refusal(f"tinyblock {self.version} has no {name}")
        return original

    def layers(self) -> list[Layer]:
        return [Layer.read(name, self.require(f"{name}.py").pristine) for name in NAMES]

    def require_layer(self, name: str) -> None:
        """Raise a Refusal, with the nearest name, unless `name` is a layer."""
        if name in NAMES:
            return
        homes = {export.casefold(): layer.name for layer in self.layers() for export in layer.exports}
        near = difflib.get_close_matches(name.casefold(), [*NAMES, *homes], n=1)
        way_out = f"did you mean {homes.get(near[0], near[0])}?" if near else f"there are {', '.join(NAMES)}"
        raise Refusal(f"there is no layer {name!r}: {way_out}")

    def with_needs(self, names: Iterable[str], with_tests: bool = False) -> list[str]:
        """Return files and all that they need, each once, layers first.

        A file needs what it imports from tinyblock, and the promises of a layer need that layer. `with_tests`, each
        layer also needs its promises, and these what runs them.
        """
        found = [*names, *(TESTS if with_tests else ())]
        for name in found:  # which grows meanwhile
            found += [needed for needed in self._needs(name, with_tests) if needed not in found]
        return sorted(dict.fromkeys(found), key=lambda name: "/" in name)

    def _needs(self, name: str, with_tests: bool) -> Iterator[str]:
        folder, _, file = name.rpartition("/")
        for level, module in _relative_imports(ast.parse(self.require(name).pristine)):
            needed = f"{folder}/{module}.py" if folder and level == 1 else f"{module}.py"
            if self.original(needed) is not None:  # else it is a name of the package itself
                yield needed
        if file.removesuffix(".py") in LAYER_NAMES:
            if folder:
                yield file
            elif with_tests:
                yield f"contract/{file}"


def _relative_imports(tree: ast.Module) -> list[tuple[int, str]]:
    """Return the number of dots and the module of each `from .module import name` and `from . import module`."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            found += [(node.level, name) for name in ([node.module] if node.module else [a.name for a in node.names])]
    return found
