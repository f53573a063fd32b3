"""What tests of profiles share: a clock, the events of a profiler, and the keys that a document has."""

import io
import itertools
import json
import random
import re
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace

from profiling.cli import main

TINY = [
    "--device=cpu",
    "--batch-size=2",
    "--seq-len=6",
    "--d-model=16",
    "--num-heads=4",
    "--num-kv-heads=2",
]
TINY += ["--d-ff=24", "--rounds=2"]


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


def profile(folder, *options, code=0):
    """Run the profiler in this process, and return what it wrote as JSON, as a picture's texts, and to stdout."""
    with redirect_stdout(io.StringIO()) as out:
        assert (
            main([*TINY, *options, "--json", str(folder / "profile.json")], ticking())
            == code
        )
    document, picture = (
        json.loads((folder / "profile.json").read_text()),
        folder / "plot.svg",
    )
    texts = (
        re.findall("<!-- (.*) -->", picture.read_text()) if picture.exists() else []
    )  # which are drawn as curves
    return SimpleNamespace(
        document=document, texts=texts, out=out.getvalue(), folder=folder
    )
