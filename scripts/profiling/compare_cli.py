"""The command line of compare_profiles.py."""

from collections.abc import Sequence
from pathlib import Path

from lab.cli import Parser, run
from lab.sizes import Size
from lab.tables import show

from .compare import compare, measured_sizes
from .records import Profile
from .report import describe
from .storage import read_profile

_EXAMPLES = """examples:
  profile before and after a change, and compare:
    python scripts/profile_block.py --json old.json
    python scripts/profile_block.py --json new.json
    python scripts/compare_profiles.py old.json new.json

exit codes: 0 if the profiles were compared, 2 if a file is not a profile or if no size was measured in both
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Compare two profiles, and return the exit code."""
    about = (
        "Divide each time of a new profile by the same time of an old one, and judge the ratio.\n"
        "scripts/profile_block.py --json writes the profiles."
    )
    parser = Parser("compare_profiles.py", about, _EXAMPLES)
    parser.add_argument("old", type=Path, metavar="OLD.json", help="the first profile")
    parser.add_argument("new", type=Path, metavar="NEW.json", help="the second profile")
    arguments = parser.parse_args(argv)
    with parser.reporting():
        old = read_profile(arguments.old, "OLD.json")
        new = read_profile(arguments.new, "NEW.json")
        old_sizes = _measured_sizes(old, f"OLD.json: {arguments.old}")
        new_sizes = _measured_sizes(new, f"NEW.json: {arguments.new}")
        if not set(old_sizes) & set(new_sizes):
            raise ValueError(
                f"NEW.json: {arguments.new} must have a size of OLD.json ({describe(*old_sizes)}), "
                f"got {describe(*new_sizes)}: profile the same size"
            )

    def work() -> int:
        show(compare(old, new))
        return 0

    return run(parser, work)


def _measured_sizes(profile: Profile, where: str) -> list[Size]:
    """Return the sizes with times; raise a ValueError if there are none."""
    sizes = measured_sizes(profile)
    if not sizes:
        raise ValueError(
            f"{where} must have a size that was measured, got none, because memory ran out: profile a smaller size"
        )
    return sizes
