"""The command line of compare_profiles.py."""

from collections.abc import Sequence
from pathlib import Path

from lab.cli import Parser, run
from lab.tables import show

from .compare import common_sizes, compare
from .report import describe
from .storage import read_profile

_EXAMPLES = """examples:
  profile_block.py --json old.json
  ... change something ...
  profile_block.py --json new.json
  compare_profiles.py old.json new.json

exit codes: 0 if the profiles were compared, 2 if a file is not a profile or if no size is in both
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Compare two profiles, and return the exit code."""
    about = "Show new / old for every time that two profiles of profile_block.py have in common."
    parser = Parser("compare_profiles.py", about, _EXAMPLES)
    parser.add_argument("old", type=Path, metavar="OLD.json", help="the first profile")
    parser.add_argument("new", type=Path, metavar="NEW.json", help="the second profile")
    arguments = parser.parse_args(argv)
    with parser.reporting():
        old = read_profile(arguments.old, "OLD.json")
        new = read_profile(arguments.new, "NEW.json")
        if not common_sizes(old, new):
            sizes = describe(*(point.size for point in old.points))
            raise ValueError(
                f"NEW.json: {arguments.new} must have a size of OLD.json ({sizes}), got "
                f"{describe(*(point.size for point in new.points))}: profile the same size"
            )

    def work() -> int:
        show(compare(old, new))
        return 0

    return run(parser, work)
