"""What each layer guarantees: one file per layer, which imports only torch.

A project may copy only some of the files, so `LAYERS` has the layers whose files are in this folder.
"""

from importlib import import_module
from pkgutil import iter_modules

_TOOLS = {"harness", "loading", "test_contract", "verify"}
LAYERS = [module.name for module in iter_modules(__path__) if module.name not in _TOOLS]
for _layer in LAYERS:
    import_module(f".{_layer}", __name__)
