"""Progress of long work."""

import sys


def show_progress(doing: str) -> None:
    """Say what is being measured: at a terminal, in place of what was said before."""
    if sys.stderr.isatty():
        print(f"\r\033[K{doing}", end="", file=sys.stderr, flush=True)
    elif doing:
        print(doing, file=sys.stderr, flush=True)
