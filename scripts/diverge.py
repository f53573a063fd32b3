"""Find where two models part, and say whether that is a mistake or rounding.

PYTHONPATH=FOLDER python scripts/diverge.py --ours my_port:build --theirs hf:build
PYTHONPATH=FOLDER python scripts/diverge.py --ours my_model:build --dtype bfloat16

A mistake survives float64, and rounding does not. MODULE:FUNCTION is called without
arguments, and returns an nn.Module and its inputs: a tuple, or a dict of keywords. The exit
code is 0 for the same function, 1 for a mistake and for other weights, and 2 for bad input.
See docs/diverge.md.
"""

import argparse
import json
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # This checkout's tinyblock and examples, installed or not.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "examples"))

import torch
from diverging.mistakes import Answer, compare
from diverging.rounding import Rounding, rounding
from diverging.runs import subjects_of
from lab.options import Refused
from lab.progress import show_progress
from lab.tables import number, share, terminal
from profile_block import DTYPES, add_device, new_file, users_build
from profiling.runs import Build


def answer(
    builds: list[Build],
    device: torch.device,
    dtype: torch.dtype,
    compiled: bool = False,
) -> Answer:
    """Build the models, and compare them, or one with itself in float64."""
    show_progress("building")
    subjects = subjects_of(builds, device, dtype)
    ours, same = subjects[0], ""
    partner, pairs = None, dict[str, str]()
    if len(subjects) > 1:
        show_progress("comparing in float64")
        found = compare(*subjects)
        if isinstance(found, Answer):
            return found
        same, pairs = "SAME FUNCTION; ", found
        show_progress("comparing roundings")
        partner = rounding(subjects.pop())  # and free it
    elif compiled:
        partner = rounding(ours)
        pairs = {name: name for name in partner.parts}
    described = describe(rounding(ours, compiled), partner, pairs)
    described.line = f"{same}in {str(ours.dtype)[6:]}, {described.line}"
    return described


def describe(own: Rounding, theirs: Rounding | None, pairs: dict[str, str]) -> Answer:
    """Say where the error of a dtype comes from, beside the least one and the partner's.

    pairs: the name of a call of theirs for that of ours.
    """
    parts = sorted(dict.fromkeys(own.parts.values()), key=lambda part: -part.share)
    line = f"the result is off by {own.off:.1e}"
    columns = ["part", "calls", "error", "least", "of least", "share"]
    than, expected = "the least error", dict.fromkeys(parts, 1.0)
    if theirs:
        line += f", theirs by {theirs.off:.1e}"
        columns.append("partner's")
        than, expected = "its partner's error", {}
        for name, other in pairs.items():
            expected[own.parts[name]] = theirs.parts[other].ratio
    rows: list[list[Any]] = []
    for part in parts:
        if part.errors or part.share:
            row = [
                part.name,
                part.calls,
                part.error,
                part.least,
                part.ratio,
                part.share,
            ]
            rows.append([*row, expected.get(part, "")] if theirs else row)
    if rows:
        line += f"; most comes from {rows[0][0]} ({share(rows[0][5], 2)})"
    # No part can have less than the least error.
    known = [part for part in parts if part in expected]
    excess = {part: part.ratio / max(expected[part], 1.0) for part in known}
    if excess:
        worst = max(excess, key=excess.__getitem__)
        line += f"; at most {excess[worst]:.2f} times {than}: {worst.name}"
    return Answer(line, 0, columns, rows)


def cell(column: str, value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    if column == "share":
        return share(value, 2)
    return number(value) if 0.01 < value < 1e4 else f"{value:.1e}" if value else "0"


def main(arguments: list[str] | None = None) -> int:
    """Print the answer, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    form = "MODULE:FUNCTION"
    add("--ours", metavar=form, required=True, help="check the model that it returns")
    add("--theirs", metavar=form, help="compare with the model that it returns")
    add(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="cast the models to this dtype (default: leave them as they are built)",
    )
    add("--compile", action="store_true", help="compile each module of ours alone")
    add_device(add)
    add("--json", type=new_file, metavar="FILE", help="write all figures")
    typed = parser.parse_args(arguments)
    place, dtype = torch.device(typed.device), getattr(torch, typed.dtype)
    try:
        builds = [users_build(typed.ours, given_by="--ours")]
        if typed.theirs:
            builds.append(users_build(typed.theirs, given_by="--theirs"))
        found = answer(builds, place, dtype, typed.compile)
    except Refused as refused:
        parser.error(str(refused))
    except Exception as error:  # of the user's code, in which 1 would mean a mistake
        traceback.print_exc()
        may_lack_float64 = "double" in str(error).lower() or "float64" in str(error)
        if may_lack_float64 or isinstance(error, NotImplementedError):
            print(
                "If an operation has no float64, build the model with its eager form, "
                "such as attn_implementation='eager'.",
                file=sys.stderr,
            )
        return 2
    show_progress("")
    rows = [list(map(cell, found.columns, row)) for row in found.rows]
    print(found.line, terminal(found.columns, rows), sep="\n\n")
    if typed.json:
        typed.json.write_text(json.dumps(asdict(found), indent=1))
    return found.exit_code


if __name__ == "__main__":
    sys.exit(main())
