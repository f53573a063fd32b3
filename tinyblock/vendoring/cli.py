"""The command line: what may be typed, what is printed, and the exit code."""

import argparse
import dataclasses
import io
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from .. import __version__
from . import Refusal
from .catalogue import NAMES, Upstream
from .copies import Action, Copies, State
from .merging import encode
from .parser import OneLineParser

_EXAMPLES = """examples:
  tinyblock list                                  what there is to copy
  tinyblock add rope --to my_project/layers       copy rope.py, with its licence and a lock file
  tinyblock check my_project/layers               is anything outdated or missing? for CI
  tinyblock diff my_project/layers --upstream     what has changed in tinyblock since
  tinyblock update my_project/layers              merge that with your edits
  tinyblock verify my_project/layers              do the copies, as edited, still compute the right thing?

exit codes: 0 all is well; 1 something was found (outdated, missing, edited, a conflict, a property that fails);
2 refused, nothing changed; 130 interrupted, nothing changed
"""


def main(argv: Sequence[str] | None = None, upstream: Upstream | None = None) -> int:
    """Do what `argv` says, with the copies of `upstream` (default: this tinyblock), and return the exit code."""
    for stream in (sys.stdout, sys.stderr):  # a path that the terminal's encoding lacks is no reason to fail
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    arguments = _parser().parse_args(argv)
    try:
        code = int(arguments.run(arguments, upstream or Upstream.installed()))
        print(end="", flush=True)
        return code
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13
    except KeyboardInterrupt:
        print("tinyblock: interrupted", file=sys.stderr)
        return 130
    except Refusal as error:
        reason = str(error)
    except OSError as error:
        path = error.filename2 or error.filename  # the second is what was to be replaced
        reason = f"{path}: {error.strerror}" if path else str(error)
    print(f"tinyblock: error: {' '.join(reason.split())}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="tinyblock",
        description="Copy layers into your project, see what changed, merge it, and verify the copies as edited.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tinyblock {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    command = commands.add_parser("list", help="the layers, what each needs, and its convention")
    command.add_argument("--json", action="store_true", help="print JSON, with docstrings' conventions whole")
    command.set_defaults(run=_list)

    command = commands.add_parser("add", help="copy layers, and the siblings that they import, into a folder")
    command.add_argument("layers", nargs="+", metavar="LAYER", help=", ".join(NAMES))
    command.add_argument("--to", required=True, type=Path, metavar="DIR", help="the folder; it is made if need be")
    command.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")
    command.add_argument("--with-tests", action="store_true", help="also copy what they promise, as tests for pytest")
    command.add_argument("--with-typecheck", action="store_true", help="also copy typecheck.py, the shape checks")
    command.set_defaults(run=_add)

    command = commands.add_parser(
        "check", help="tell which copies are edited, outdated or missing; 1 if any of the last two"
    )
    command.add_argument("folder", type=Path, metavar="DIR")
    command.add_argument("--fail-on-edits", action="store_true", help="exit with 1 for an edited copy, too")
    command.set_defaults(run=_check)

    command = commands.add_parser("diff", help="show your edits, and what changed in tinyblock since")
    command.add_argument("folder", type=Path, metavar="DIR")
    only = command.add_mutually_exclusive_group()
    only.add_argument("--mine", action="store_true", help="your edits only")
    only.add_argument("--upstream", action="store_true", help="the changes in tinyblock only")
    command.set_defaults(run=_diff)

    command = commands.add_parser("update", help="merge what changed in tinyblock with your edits")
    command.add_argument("folder", type=Path, metavar="DIR")
    command.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")
    command.set_defaults(run=_update)

    command = commands.add_parser("verify", help="check that copies, edited or not, still compute the right thing")
    command.add_argument("target", metavar="DIR|FILE|MODULE", help="a folder, a file, or a name as in `import`")
    command.add_argument(
        "--skip", action="append", default=[], metavar="PROPERTY", help="one that you gave up on purpose"
    )
    command.set_defaults(run=_verify)
    return parser


def _list(arguments: argparse.Namespace, upstream: Upstream) -> int:
    layers = upstream.layers()
    if arguments.json:
        described = [dataclasses.asdict(layer) | {"file": f"{layer.name}.py"} for layer in layers]
        print(json.dumps({"tinyblock": upstream.version, "layers": described}, indent=2))
        return 0
    rows = []
    for layer in layers:
        needs = ", ".join([*(f"{sibling}.py" for sibling in layer.siblings), *layer.packages])
        rows.append((layer.name, needs, layer.convention.partition(". ")[0].removesuffix(".")))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, needs, convention in rows:
        print(f"{name:{widths[0]}}  needs {needs:{widths[1]}}  {convention}")
    return 0


def _add(arguments: argparse.Namespace, upstream: Upstream) -> int:
    copies = Copies(arguments.to, upstream)
    wanted = {"with_tests": arguments.with_tests, "with_typecheck": arguments.with_typecheck}
    actions = copies.add(arguments.layers, **wanted, dry_run=arguments.dry_run)
    _print_actions(copies, actions, arguments.dry_run)
    return 0


def _check(arguments: argparse.Namespace, upstream: Upstream) -> int:
    copies = Copies(arguments.folder, upstream).require_lock()
    states = copies.states()
    width, state_width = (max(map(len, column), default=0) for column in (states, states.values()))
    for name, state in states.items():
        taken, note = copies.entries[name].version, ""
        if state.is_outdated:
            note = f"{taken} -> {upstream.version}" if taken != upstream.version else f"{taken}, changed since"
        elif upstream.original(name) is None:
            note = "no longer in tinyblock"
        print(f"{name:{width}}  {state:{state_width}}  {note}".rstrip())
    fine = {State.PRISTINE} if arguments.fail_on_edits else {State.PRISTINE, State.EDITED}
    return 0 if fine.issuperset(states.values()) else 1


def _diff(arguments: argparse.Namespace, upstream: Upstream) -> int:
    copies = Copies(arguments.folder, upstream).require_lock()
    wanted = [copies.edits] if not arguments.upstream else []
    wanted += [copies.upstream_changes] if not arguments.mine else []
    text = "".join(difference(name) for difference in wanted for name in copies.entries)
    sys.stdout.buffer.write(encode(text))  # so that the patch can be applied, whatever the terminal's encoding
    if not text:
        print(f"tinyblock: no difference in {arguments.folder}", file=sys.stderr)
    return 0


def _update(arguments: argparse.Namespace, upstream: Upstream) -> int:
    copies = Copies(arguments.folder, upstream).require_lock()
    actions = copies.update(dry_run=arguments.dry_run)
    _print_actions(copies, actions, arguments.dry_run)
    if Action.CONFLICT in actions.values() and not arguments.dry_run:
        what = "resolve what stands between <<<<<<< and >>>>>>>; NAME.orig is the file as it was"
        print(f"tinyblock: {what}", file=sys.stderr)
    return int(any(action.needs_a_person for action in actions.values()))


def _verify(arguments: argparse.Namespace, upstream: Upstream) -> int:
    from ..contract import verify

    try:
        return verify.verify(arguments.target, arguments.skip)
    except (LookupError, ImportError) as error:
        raise Refusal(str(error)) from None


def _print_actions(copies: Copies, actions: dict[str, Action], dry_run: bool) -> None:
    width = max((len(name) for name in actions), default=0)
    for name, action in actions.items():
        print(f"{name:{width}}  {action}")
    if dry_run:
        print(f"dry run: nothing was written to {copies.folder}")
