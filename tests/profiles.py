"""What tests of profiles share: a clock, the events of a profiler, and the keys that a document has."""

import itertools
import random
import re
from pathlib import Path
from types import SimpleNamespace


def ticking():
    """Return a clock by which everything takes 1 to 2 s, however busy the machine is, so that no call is repeated."""
    draw = random.Random(0)
    return itertools.accumulate(draw.uniform(1, 2) for _ in itertools.count()).__next__


def event(name, start, end, device="CUDA", annotation=False):
    """Return an event as torch.profiler gives it, with its times in microseconds."""
    times, device_type = (
        SimpleNamespace(start=start, end=end),
        SimpleNamespace(name=device),
    )
    return SimpleNamespace(
        name=name,
        time_range=times,
        device_type=device_type,
        is_user_annotation=annotation,
    )


def undocumented(document):
    """Return the keys of a document that docs/profile_schema.md does not name."""
    page = (Path(__file__).parents[1] / "docs" / "profile_schema.md").read_text()

    def keys(value):
        if isinstance(value, dict):
            yield from value
        for item in (
            value.values()
            if isinstance(value, dict)
            else value
            if isinstance(value, list)
            else ()
        ):
            yield from keys(item)

    return set(keys(document)) - set(re.findall(r"[`\"]([a-z0-9_]+)[`\"]", page))
