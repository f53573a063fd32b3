"""The command `tinyblock`, also `python -m tinyblock`: copy layers into a project, and keep them known and right."""

import argparse
import dataclasses
import difflib
import importlib
import io
import json
import os
import signal
import sys
import unittest
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from .. import __version__
from .copies import LAYERS, Action, Copies, Edited, Refusal, State, Upstream
from .parser import OneLineParser
from .staging import SIGNALS

_EXAMPLES = """examples:
  tinyblock list                                  what there is to copy
  tinyblock add rope --to my_project/layers       copy rope.py, with its licence and a lock file
  tinyblock add block --to my_project/layers --with-tests
  tinyblock check my_project/layers               is anything outdated or missing? for CI
  tinyblock diff my_project/layers --upstream     what has changed in tinyblock since
  tinyblock update my_project/layers              merge that with your edits
  tinyblock verify my_project/layers              do the copies, as edited, still compute the right thing?
  tinyblock verify my_project.layers.rope         the same, of one module

exit codes: 0 all is well; 1 something was found (outdated, missing, edited, a conflict, a property that fails);
2 refused, nothing changed; 130 interrupted, nothing changed
"""


def main(argv: Sequence[str] | None = None, upstream: Upstream | None = None) -> int:
    """Do what `argv` says, with the copies of `upstream` (default: this tinyblock), and return the exit code."""
    for stream in (sys.stdout, sys.stderr):  # a path that the terminal's encoding lacks is no reason to fail
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    arguments = _parser().parse_args(argv)
    with suppress(ValueError):  # it is for the main thread
        for number in SIGNALS:
            signal.signal(number, signal.default_int_handler)  # what was begun is then undone, as by Ctrl-C
    try:
        code = int(arguments.run(arguments, upstream or Upstream.installed()))
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13
    except Refusal as error:
        return _refuse(str(error))
    except OSError as error:
        return _refuse(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except KeyboardInterrupt:
        print("tinyblock: interrupted", file=sys.stderr)
        return 130


def _refuse(message: str) -> int:
    print(f"tinyblock: error: {' '.join(message.split())}", file=sys.stderr)
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
    command.add_argument("layers", nargs="+", metavar="LAYER", help=f"{', '.join(LAYERS)}")
    command.add_argument("--to", required=True, type=_folder, metavar="DIR", help="the folder; it is made if need be")
    command.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")
    command.add_argument(
        "--with-tests", action="store_true", help="also copy the contract and a pytest file that runs it"
    )
    command.add_argument("--with-typecheck", action="store_true", help="also copy typecheck.py, the shape checks")
    command.set_defaults(run=_add)

    command = commands.add_parser(
        "check", help="tell which copies are edited, outdated or missing; 1 if any of the last two"
    )
    command.add_argument("folder", type=_folder, metavar="DIR")
    command.add_argument("--fail-on-edits", action="store_true", help="exit with 1 for an edited copy, too")
    command.set_defaults(run=_check)

    command = commands.add_parser("diff", help="show your edits, and what changed in tinyblock since")
    command.add_argument("folder", type=_folder, metavar="DIR")
    only = command.add_mutually_exclusive_group()
    only.add_argument("--mine", action="store_true", help="your edits only")
    only.add_argument("--upstream", action="store_true", help="the changes in tinyblock only")
    command.set_defaults(run=_diff)

    command = commands.add_parser("update", help="merge what changed in tinyblock with your edits")
    command.add_argument("folder", type=_folder, metavar="DIR")
    command.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")
    command.set_defaults(run=_update)

    command = commands.add_parser("verify", help="check that copies, edited or not, still compute the right thing")
    command.add_argument("target", metavar="DIR|FILE|MODULE", help="a folder, a file, or a name as in `import`")
    command.add_argument(
        "--skip", action="append", default=[], metavar="PROPERTY", help="one that you gave up on purpose"
    )
    command.set_defaults(run=_verify)
    return parser


def _folder(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("it is empty; the current folder is .")
    return Path(text)


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
    try:
        actions = copies.add(arguments.layers, **wanted, dry_run=arguments.dry_run)
    except Edited as error:
        _write(error.diff)
        names = ", ".join(error.names)
        print(f"tinyblock: nothing was copied: {arguments.to} has {names} already, edited as shown", file=sys.stderr)
        return 1
    _print_actions(copies, actions, arguments.dry_run)
    return 0


def _check(arguments: argparse.Namespace, upstream: Upstream) -> int:
    copies = Copies(arguments.folder, upstream).require_lock()
    states = copies.states()
    width = max(map(len, states), default=0)
    for name, state in states.items():
        old = copies.entries[name].version
        since = f"{old} -> {upstream.version}" if old != upstream.version else f"{old}, changed since"
        since = since if state.is_outdated else "no longer in tinyblock" if copies.is_gone(name) else ""
        print(f"{name:{width}}  {state:8}  {since}".rstrip())
    fine = {State.PRISTINE} if arguments.fail_on_edits else {State.PRISTINE, State.EDITED}
    return 0 if fine.issuperset(states.values()) else 1


def _diff(arguments: argparse.Namespace, upstream: Upstream) -> int:
    copies = Copies(arguments.folder, upstream).require_lock()
    wanted = [copies.edits] if not arguments.upstream else []
    wanted += [copies.news] if not arguments.mine else []
    text = "".join(difference(name) for difference in wanted for name in copies.entries)
    _write(text)
    if not text:
        print(f"no difference: {arguments.folder}", file=sys.stderr)
    return 0


def _update(arguments: argparse.Namespace, upstream: Upstream) -> int:
    copies = Copies(arguments.folder, upstream).require_lock()
    actions = copies.update(dry_run=arguments.dry_run)
    _print_actions(copies, actions, arguments.dry_run)
    if Action.CONFLICT in actions.values() and not arguments.dry_run:
        print("resolve what stands between <<<<<<< and >>>>>>>; NAME.orig is the file as it was", file=sys.stderr)
    return 1 if {Action.CONFLICT, Action.UNRESOLVED, Action.MISMATCH} & set(actions.values()) else 0


def _verify(arguments: argparse.Namespace, upstream: Upstream) -> int:
    from .. import contract

    try:
        copies = contract.load(arguments.target)
    except (LookupError, ImportError) as error:
        raise Refusal(str(error)) from None
    properties = [prop for prop in contract.PROPERTIES if prop.layer in copies]
    names = {name for prop in properties for name in (prop.name, f"{prop.layer}: {prop.name}")}
    for name in arguments.skip:
        if name not in names:
            near = difflib.get_close_matches(name, sorted(names), n=1, cutoff=0)
            raise Refusal(f"there is no property {name!r} to skip here: did you mean {near[0]!r}?")
    modules = {layer: importlib.import_module(f"tinyblock.{layer}") for layer in LAYERS} | copies
    counts = {"ok": 0, "FAIL": 0, "skip": 0}

    def tell(outcome: str, what: str, why: str = "") -> None:
        counts[outcome] += 1
        print(f"  {outcome:4}  {what}{why and ': '}{why}", flush=True)

    for layer, module in copies.items():
        own = [prop for prop in properties if prop.layer == layer]
        borrowed = ", ".join(sorted({need for prop in own for need in prop.needs} - copies.keys()))
        path = Path(str(module.__file__))
        shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        print(f"{layer}: {shown}{borrowed and f' (with the {borrowed} of tinyblock)'}")
        classes = [name for name in contract.LAYERS[layer] if name[0].isupper()]
        own_types = {k: v for k, v in vars(module).items() if isinstance(v, type) and v.__module__ == module.__name__}
        others = [name for name in own_types if name[0].isupper()]
        if others and not any(name in others for name in classes):
            tell("FAIL", f"{classes[0]} is there", f"{path.name} has {', '.join(others)} only, which is not verified")
        for prop in own:
            try:
                if prop.name in arguments.skip or f"{layer}: {prop.name}" in arguments.skip:
                    raise unittest.SkipTest("as you asked")
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    prop.run(modules)
                tell("ok", prop.name)
            except contract.Violation as error:
                tell("FAIL", prop.name, str(error))
            except unittest.SkipTest as error:
                tell("skip", prop.name, str(error))
    for path in sorted(Path(arguments.target).glob("*.py")):
        if path.stem in LAYERS and path.stem not in copies:
            print(f"{path.stem}: {path}")
            tell(
                "FAIL",
                f"{contract.LAYERS[path.stem][0]} is there",
                f"{path.name} does not define it, and is not verified",
            )
    print(f"{counts['ok']} hold, {counts['FAIL']} fail, {counts['skip']} skipped")
    return 1 if counts["FAIL"] else 0


def _write(text: str) -> None:
    """Write a patch byte for byte, whatever the terminal's encoding, so that it can be applied."""
    if sys.stdout is not None:
        sys.stdout.flush()
        sys.stdout.buffer.write(text.encode(errors="surrogateescape"))


def _print_actions(copies: Copies, actions: dict[str, Action], dry_run: bool) -> None:
    width = max((len(name) for name in actions), default=0)
    for name, action in actions.items():
        print(f"{name:{width}}  {action}")
    if dry_run:
        print(f"dry run: nothing was written to {copies.folder}")
