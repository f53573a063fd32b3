"""The command `tinyblock`, also `python -m tinyblock`."""

import sys

from .vendoring.cli import main

if __name__ == "__main__":
    sys.exit(main())
