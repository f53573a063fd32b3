"""The command `tinyblock`, also `python -m tinyblock`."""

import sys

from .copies import main

if __name__ == "__main__":
    sys.exit(main())
