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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # This checkout's tinyblock and examples, installed or not.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "examples"))

import torch
from diverging.exchanges import Exchange, exchanges
from diverging.mistakes import wrong_in_backward, wrong_in_forward
from diverging.partners import Keys, Pair, partners
from diverging.rounding import Part, Rounding, rounding
from diverging.runs import Run
from diverging.subjects import Subject, subjects_of
from diverging.values import (
    TOLERANCE,
    Refused,
    error,
    floats,
    joined,
    numbers,
    tensors_in,
)
from float64 import in_float64
from lab.progress import show_progress
from lab.tables import number, share, terminal
from profile_block import DTYPES, device, new_file, users_build
from profiling.runs import Build, Inputs


@dataclass
class Answer:
    """The first line, the exit code, and a table."""

    line: str
    exit_code: int
    columns: list[str]
    rows: list[list[Any]]


def compare(ours: Subject, theirs: Subject) -> Answer | dict[str, str]:
    """Compare two models in float64. Return partners if they are the same function.

    Raises:
        Refused: they get other inputs, or their results have other sizes.
    """
    require_same_inputs(ours.inputs, theirs.inputs)
    a, b = ours.run_wide(), theirs.run_wide()
    if a.result.numel() != b.result.numel():
        sizes = f"{list(a.result.shape)} and {list(b.result.shape)}"
        raise Refused(f"results must have the same size, got {sizes}")
    keys = Keys()
    pairs = partners(a, b, keys)
    off = error(a.result, b.result)
    if off <= TOLERANCE:
        names = {pair.ours.name: pair.theirs.name for pair in pairs}
        return compare_backward(a, b, pairs, keys) or names
    others = exchanges(a, b, pairs)
    if others:
        functions = {each.ours.call.module: each.function for each in others}
        a = ours.run_wide(exchanged=functions)
        off = error(a.result, b.result)
        same_keys = {
            each.ours.call.module: keys[each.theirs.call.module] for each in others
        }
        keys = Keys(same_keys)
        differ = [each for each in others if each.off > TOLERANCE]
        if off <= TOLERANCE:
            return other_weights(differ or others)
        others = differ
        pairs = partners(a, b, keys)
    place, first = wrong_in_forward(a, pairs)
    same_numbers = keys[place.ours.module] == keys[place.theirs.module]
    if not same_numbers and holds_other_numbers(place):
        line = f"OTHER WEIGHTS in {place.names}, so a mistake in it would not be seen"
    else:
        line = (
            f"MISTAKE in forward, in {place.names}: its result is off by "
            f"{figure(place.result)}, the model's by {figure(off)}"
        )
    if first:
        line += f"; it shows first in {first.ours.name}"
    if others:
        line += f"; {len(others)} modules have other weights"
    return table_around(line, pairs, place)


def require_same_inputs(ours: Inputs, theirs: Inputs) -> None:
    """Require that one model gets all tensors of the other one; a port may take fewer."""
    fewer, more = sorted((tensors_in(ours), tensors_in(theirs)), key=len)
    equal = [
        any(each.shape == t.shape and error(each, t) == 0 for t in more)
        for each in fewer
    ]
    if equal and all(equal):
        return
    sizes = [[list(each.shape) for each in tensors_in(tree)] for tree in (ours, theirs)]
    raise Refused(
        f"both models must get the same input, got tensors of {sizes[0]} and {sizes[1]} "
        "which are not equal; draw them with a torch.Generator of the same seed"
    )


def holds_other_numbers(pair: Pair) -> bool:
    """Say whether each of two modules holds numbers that the other one lacks."""
    ours, theirs = (
        joined([numbers(each) for each in each.module.state_dict().values()])
        for each in (pair.ours, pair.theirs)
    )
    lacks = [~torch.isin(ours, theirs), ~torch.isin(theirs, ours)]
    return all(bool(each.any()) for each in lacks)


def compare_backward(
    ours: Run, theirs: Run, pairs: list[Pair], keys: Keys
) -> Answer | None:
    for run in (ours, theirs):
        run.forget_values()
        for weight in floats(run.model.parameters()):
            zeros = torch.zeros(weight.shape, device=weight.device)
            run.weight_gradients[weight] = zeros  # float32: 24 bits are enough
        with in_float64():
            run.backward()
    found = wrong_in_backward(ours, theirs, pairs, keys)
    if not found:
        return None
    place, off = found
    line = f"MISTAKE in backward, in {place.names}: its gradients are off by {off:.1e}"
    return table_around(line, pairs, place)


def table_around(line: str, pairs: list[Pair], place: Pair) -> Answer:
    at = pairs.index(place)
    columns = ["module", "partner", "input off by", "result off by"]
    rows = [
        [pair.ours.name, pair.theirs.name, pair.input, pair.result]
        for pair in pairs[max(at - 8, 0) : at + 5]
    ]
    return Answer(line, 1, columns, rows)


def other_weights(exchanged: list[Exchange]) -> Answer:
    line = f"OTHER WEIGHTS in {len(exchanged)} modules, else the same function"
    columns = ["module", "partner", "result off by"]
    rows = [
        [each.ours.call.name, each.theirs.call.name, each.off] for each in exchanged
    ]
    return Answer(line, 1, columns, rows)


def describe(
    ours: Subject, own: Rounding, theirs: Rounding | None, pairs: dict[str, str]
) -> Answer:
    """Say where the error of a dtype comes from, beside the least one and the partner's.

    pairs: the name of a call of theirs for that of ours.
    """
    partner: dict[str, Part] = {}
    if theirs:
        for name, other in pairs.items():
            partner[own.names[name]] = theirs.parts[theirs.names[other]]
    rows, excess = rows_of_parts(own, partner, is_alone=theirs is None)
    columns = ["part", "calls", "error", "least", "of least", "share", "partner's"]
    line = f"in {str(ours.dtype)[6:]}, the result is off by {own.off:.1e}"
    if theirs:
        line += f", theirs by {theirs.off:.1e}"
    else:
        columns.pop()
    if rows:
        line += f"; most comes from {rows[0][0]} ({share(rows[0][5], 2)})"
    if excess:
        worst = max(excess, key=excess.__getitem__)
        than = "its partner's error" if theirs else "the least error"
        line += f"; at most {excess[worst]:.2f} times {than}: {worst}"
    return Answer(line, 0, columns, rows)


def rows_of_parts(
    own: Rounding, partner: dict[str, Part], is_alone: bool
) -> tuple[list[list[Any]], dict[str, float]]:
    """Return rows by their share, and how many times the expected error each part has."""
    rows: list[list[Any]] = []
    excess = {}
    missed = 1.0
    for name, part in sorted(own.parts.items(), key=lambda item: -item[1].share):
        missed -= part.share
        if not part.squares:
            continue
        rows.append([name, part.calls, part.error, part.least, part.ratio, part.share])
        if is_alone:
            excess[name] = part.ratio
            continue
        rows[-1].append(partner[name].ratio if name in partner else "")
        if name in partner:  # which cannot have less than the least error
            excess[name] = part.ratio / max(partner[name].ratio, 1.0)
    if own.off and abs(missed) > 0.01:
        rest = ["other experts, and second order", "", "", "", "", missed]
        rows.append(rest if is_alone else [*rest, ""])
    return rows, excess


def figure(value: float) -> str:
    return f"{value:.1e}" if value != float("inf") else "its size"


def cell(column: str, value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    if column == "share":
        return share(value, 2)
    return number(value) if 0.01 < value < 1e4 else f"{value:.1e}" if value else "0"


def progress(doing: str) -> None:
    if sys.stderr.isatty():
        show_progress(doing)


def answer(
    builds: list[Build],
    device: torch.device,
    dtype: torch.dtype,
    compiled: bool = False,
) -> Answer:
    """Build the models, and compare them, or one with itself in float64."""
    progress("building")
    subjects = subjects_of(builds, device, dtype)
    ours = subjects[0]
    prefix, partner, pairs = "", None, dict[str, str]()
    if len(subjects) > 1:
        progress("comparing in float64")
        found = compare(*subjects)
        if isinstance(found, Answer):
            return found
        pairs = found
        prefix = "SAME FUNCTION; "
        progress("comparing roundings")
        partner = rounding(subjects.pop())  # and free it
    own = rounding(ours)
    if compiled:
        eager, own = own, rounding(ours, compiled)
        if not partner:
            partner, pairs = eager, {name: name for name in own.names}
    described = describe(ours, own, partner, pairs)
    described.line = prefix + described.line
    return described


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
    add(
        "--device",
        type=device,
        choices=["cuda", "cpu"],
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="run on this device (default: %(default)s)",
    )
    add("--json", type=new_file, metavar="FILE", help="write all figures")
    typed = parser.parse_args(arguments)
    try:
        builds = [users_build(typed.ours, given_by="--ours")]
        if typed.theirs:
            builds.append(users_build(typed.theirs, given_by="--theirs"))
    except ValueError as error:
        parser.error(str(error))
    except Exception:  # of the user's module: 1 would say that it has a mistake
        traceback.print_exc()
        return 2
    place, dtype = torch.device(typed.device), getattr(torch, typed.dtype)
    try:
        found = answer(builds, place, dtype, typed.compile)
    except Refused as refused:
        parser.error(str(refused))
    except Exception:  # of the user's code: 1 would say that it has a mistake
        traceback.print_exc()
        return 2
    progress("")
    rows = [list(map(cell, found.columns, row)) for row in found.rows]
    print(found.line, terminal(found.columns, rows), sep="\n\n")
    if typed.json:
        typed.json.write_text(json.dumps(asdict(found), indent=1))
    return found.exit_code


if __name__ == "__main__":
    sys.exit(main())
