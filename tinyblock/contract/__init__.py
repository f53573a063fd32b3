"""What each layer promises: one file a layer, found by looking into this folder, as a project copies only some.

`LAYERS` has, for each layer that promises something, the names that its file defines. Only torch is imported.
"""

from importlib import import_module
from pkgutil import iter_modules

_TOOLS = {"harness", "loading", "test_contract", "verify"}
_LAYERS = [module.name for module in iter_modules(__path__) if module.name not in _TOOLS]
LAYERS: dict[str, tuple[str, ...]] = {name: import_module(f".{name}", __name__).DEFINES for name in _LAYERS}
