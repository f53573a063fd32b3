"""Import this to find out whether copies import tinyblock or beartype."""

import sys


class Refuse:
    """Refuse to import both, as where neither is installed."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("tinyblock", "beartype"):
            raise ImportError(f"a copy imports {name}")


sys.meta_path.insert(0, Refuse())
