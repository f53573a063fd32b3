"""Write a profile as JSON, and read it back."""

from pathlib import Path

from lab.files import read_json, write_json
from lab.records import from_plain, to_plain

from .analysis import analyze
from .records import SCHEMA, OutOfMemory, Point, Profile, times_of

# The command that writes profiles.
_WRITER = "profile_block.py --json"


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
    document = read_json(path, SCHEMA, name, _WRITER)
    try:
        profile = from_plain(Profile, document)
        _require_times(profile)
        _require_printable(profile)
    except ValueError as error:
        advice = f"write it again with {_WRITER}"
        raise ValueError(f"{name}: {path}: {error}: {advice}") from None
    return profile


def _require_times(profile: Profile) -> None:
    if not profile.points:
        raise ValueError("points must have at least one size, got none")
    for index, point in enumerate(profile.points):
        if not isinstance(point, OutOfMemory) and not times_of(point):
            raise ValueError(f"points[{index}] must have a time, got none")


def _require_printable(profile: Profile) -> None:
    """Raise a ValueError for a text with control characters, which could change the terminal that shows it."""
    texts: dict[str, object] = {}
    for name, value in vars(profile.environment).items():
        texts[f"environment.{name}"] = value
    for index, point in enumerate(profile.points):
        names = [" ".join(key) for key in times_of(point)]
        texts[f"a name in points[{index}]"] = " ".join(names)
        if isinstance(point, Point):
            texts[f"points[{index}].attention_kernel"] = point.attention_kernel
    for where, text in texts.items():
        if not str(text).isprintable():
            raise ValueError(f"{where} must be printable, got {text!a:.60}")
