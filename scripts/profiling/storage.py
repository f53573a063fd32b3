"""Write a profile as JSON, and read it back."""

from pathlib import Path

from lab.files import read_json, write_json
from lab.records import from_plain, to_plain

from .analysis import analyze
from .records import SCHEMA, Point, Profile, times_of


def write_profile(path: Path, profile: Profile) -> None:
    """Write a profile, whole or not at all, and what follows from each of its points."""
    document = to_plain(profile)
    for point, plain in zip(profile.points, document["points"], strict=True):
        if isinstance(point, Point):
            plain["analysis"] = to_plain(analyze(point, profile))
    write_json(path, document)


def read_profile(path: Path, name: str) -> Profile:
    """Read a profile.

    Args:
        path: the file.
        name: what the user calls the file, such as OLD.json. Messages begin with it.

    Raises:
        ValueError: The file cannot be read, has another schema, lacks a key, or has a value that cannot be right.
    """
    document = read_json(path, SCHEMA, name)
    try:
        profile = from_plain(Profile, document)
        _require_points(profile)
        _require_positive_times(profile)
    except ValueError as error:
        advice = "write it again with profile_block.py --json"
        raise ValueError(f"{name}: {path}: {error}: {advice}") from None
    return profile


def _require_points(profile: Profile) -> None:
    if not profile.points:
        raise ValueError("points must have at least one size, got none")


def _require_positive_times(profile: Profile) -> None:
    """Raise a ValueError for a rate or a time that is not above 0.

    Backward is a difference of two times, and noise may make it negative.
    """
    spreads = {
        "ceilings.flops_per_second": profile.ceilings.flops_per_second,
        "ceilings.bytes_per_second": profile.ceilings.bytes_per_second,
    }
    for index, point in enumerate(profile.points):
        for (part, name), seconds in times_of(point).items():
            if name != "backward":
                spreads[f"points[{index}]: the time of {part}, {name}"] = seconds
    for where, spread in spreads.items():
        least = min(spread.median, spread.p20, spread.p80)
        if least <= 0:
            raise ValueError(f"{where} must be above 0, got {least}")
