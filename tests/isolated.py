"""What a test hands to the Python processes that it starts."""

import os

WITHOUT_PACKAGE = {
    key: value for key, value in os.environ.items() if key != "PYTHONPATH"
}

# Code to run before the imports, which makes it as where neither of these is installed.
REFUSE_TINYBLOCK_AND_BEARTYPE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("tinyblock", "beartype"):
            raise ImportError(f"{name} is not to be had here")
sys.meta_path.insert(0, Refuse())
"""
