"""What a script says while it measures."""

import sys


def show_progress(doing: str) -> None:
    """Say at a terminal what is being measured, in place of what was said before."""
    if sys.stderr.isatty():
        print(f"\r\033[K{doing}", end="", file=sys.stderr, flush=True)
