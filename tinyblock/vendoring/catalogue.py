"""What can be copied: the files of one version of tinyblock, and which of them each file needs.

Files are read, not imported; they may be inside a zip archive.
"""

import ast
import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import PurePosixPath

from .. import LAYERS, __version__
from . import CommandError
from .files import decode

LICENSE = "LICENSE.tinyblock"
HEADER = f"# Copied from tinyblock {{version}}: {{name}} (license: {LICENSE})\n# SPDX-License-Identifier: MIT\n"
LAYER_NAMES = tuple(layer.__name__.rpartition(".")[2] for layer in LAYERS)
NAMES = (
    *LAYER_NAMES,
    "parallelize",
    "typecheck",
)  # what `add` accepts; the last two have no contract
TESTS = (
    "contract/__init__.py",
    "contract/test_contract.py",
)  # these import what runs the contracts


@dataclass(frozen=True)
class Original:
    """A copy as it is written first, with its header."""

    name: str
    version: str
    text: str

    @property
    def label(self) -> str:
        return f"tinyblock {self.version}: {self.name}"

    def imports(self) -> set[str]:
        """Return the file names of all relative imports; a name imported from a package need not be a file."""
        found = set[str]()
        for node in ast.walk(ast.parse(self.text)) if self.name.endswith(".py") else ():
            if isinstance(node, ast.ImportFrom) and node.level:
                modules = (
                    [node.module]
                    if node.module
                    else [alias.name for alias in node.names]
                )
                found |= {
                    PurePosixPath(self.name).with_name(f"{module}.py").as_posix()
                    for module in modules
                }
        return found


@dataclass(frozen=True)
class Upstream:
    """The tinyblock that copies are taken from (default: the installed one)."""

    root: Traversable = field(default_factory=lambda: files("tinyblock"))
    version: str = __version__

    def find(self, name: str) -> Original | None:
        """Return the original of a copy of that name, or None if this tinyblock has no such file."""
        source = self.root.joinpath("LICENSE" if name == LICENSE else name)
        if not source.is_file():
            return None
        header = (
            "" if name == LICENSE else HEADER.format(version=self.version, name=name)
        )
        return Original(name, self.version, header + decode(source.read_bytes()))

    def layer(self, name: str) -> Original:
        """Return the original of a layer, or raise a CommandError that suggests the nearest name."""
        if name in NAMES and (original := self.find(f"{name}.py")):
            return original
        homes = {
            public.casefold(): layer.__name__.rpartition(".")[2]
            for layer in LAYERS
            for public in layer.__all__
        }
        near = difflib.get_close_matches(name.casefold(), [*NAMES, *homes], n=1)
        fix = (
            f"did you mean {homes.get(near[0], near[0])}?"
            if near
            else f"choose from {', '.join(NAMES)}"
        )
        raise CommandError(f"there is no layer {name!r}: {fix}")

    def with_imports(self, names: Iterable[str], with_tests: bool = False) -> list[str]:
        """Return files and everything that they import from tinyblock, layers first.

        The contract of a layer comes with that layer. With `with_tests`, each layer comes with its contract, too.
        """
        found = [*names, *(TESTS if with_tests else ())]
        for name in found:  # grows during the loop
            original, file = self.find(name), PurePosixPath(name).name
            needed = (
                {imported for imported in original.imports() if self.find(imported)}
                if original
                else set()
            )
            if file.removesuffix(".py") in LAYER_NAMES:
                needed |= {file, f"contract/{file}"} if with_tests else {file}
            found += sorted(needed.difference(found))
        return sorted(found, key=lambda name: ("/" in name, name))
