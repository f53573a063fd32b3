"""What each layer guarantees: one file per layer. A project may copy only some of them, so this folder is listed.

`LAYERS` maps each layer with a contract to the names that its file defines. Only torch is imported.
"""

from importlib import import_module
from pkgutil import iter_modules

_TOOLS = {"harness", "loading", "test_contract", "verify"}
_LAYERS = [module.name for module in iter_modules(__path__) if module.name not in _TOOLS]
LAYERS: dict[str, tuple[str, ...]] = {name: import_module(f".{name}", __name__).DEFINES for name in _LAYERS}
