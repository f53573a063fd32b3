"""What the parts of an acceptance are told: where their results go, and how much of them to run."""

import argparse
from pathlib import Path


def parse(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("out", type=Path, help="the folder of the results")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu walks the same code (cuda)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, of which nothing is judged")
    parser.add_argument("--seconds", type=float, default=120, metavar="N", help="start nothing more after N (120)")
    return parser.parse_args()
