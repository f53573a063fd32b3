"""What a test hands to the Python processes that it starts."""

import os
from pathlib import Path

WITHOUT_PACKAGE = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
WITH_PACKAGE = {**WITHOUT_PACKAGE, "PYTHONPATH": str(Path(__file__).parents[1])}


def refuse(*packages: str) -> str:
    """Return code to run before the imports, which makes it as where none of these is installed."""
    return f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {packages!r}:
            raise ImportError(f"{{name}} is not to be had here")
sys.meta_path.insert(0, Refuse())
"""


REFUSE_TINYBLOCK_AND_BEARTYPE = refuse("tinyblock", "beartype")
