"""The command `tinyblock`. `python3 tinyblock` runs it in a clone, without any package.

Every Python must be able to read this file, so that an old one can name what it lacks.
"""

import sys

if sys.version_info < (3, 10):
    sys.stderr.write(
        "tinyblock: error: Python must be 3.10 or newer, got "
        + sys.version.split()[0]
        + ": start the command with a newer one, as in `python3.12 tinyblock`\n"
    )
    sys.exit(2)

if __package__:
    from .copies import main
else:  # Python was given the folder, which is then a place of modules, not a package
    from copies import main  # type: ignore[import-not-found, no-redef]

if __name__ == "__main__":
    sys.exit(main())
