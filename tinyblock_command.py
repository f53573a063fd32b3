"""The installed command `tinyblock`. It stands beside the package, whose import takes torch.

In a clone, `python3 tinyblock` does the same.
"""

import sys
from pathlib import Path

FOLDER = Path(__file__).with_name("tinyblock")


def main() -> int:
    """Run the command, and return its exit code."""
    sys.path.insert(0, str(FOLDER))
    from copies import main as run  # type: ignore[import-not-found]

    sys.path.remove(str(FOLDER))  # otherwise it hides a user's rope.py from `verify`
    code: int = run()
    return code
