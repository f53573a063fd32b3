"""The command line: its arguments, what it prints, and its exit codes."""

import argparse
import ast
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from .. import __version__
from . import CommandError
from .catalogue import NAMES, Upstream
from .copies import CONFLICT, UP_TO_DATE, Copies, Copy, Step
from .files import decode, encode, read

SKIP = "tinyblock.skip"  # in a folder of copies, the properties that `verify` skips
EXAMPLES = """examples:
  tinyblock list
  tinyblock add rope --to my_project/layers
  tinyblock check my_project/layers
  tinyblock diff my_project/layers rope --upstream
  tinyblock update my_project/layers
  tinyblock remove my_project/layers rope
  tinyblock verify my_project/layers

exit codes: 0 success; 1 findings (an outdated or missing copy, a conflict, a failed property);
2 error and 130 interruption, without any change to files
"""


def list_(arguments: argparse.Namespace, upstream: Upstream) -> int:
    """List what can be copied."""
    for name in NAMES:
        layer = upstream.layer(name)
        title = re.split("[:,.]", ast.get_docstring(ast.parse(layer.text)) or "")[0]
        siblings = {file.removesuffix(".py") for file in layer.imports()}
        indirect = {
            file.removesuffix(".py")
            for sibling in siblings
            for file in upstream.layer(sibling).imports()
        }
        needs = ", ".join(sorted(siblings - indirect))
        print(f"{name:11}  {title}{needs and f' (needs {needs})'}")
    return 0


def add(arguments: argparse.Namespace, upstream: Upstream) -> int:
    """Copy layers, and what they import, into a folder."""
    copies = Copies(arguments.folder, upstream, new=True)
    steps = copies.add(arguments.layers, arguments.with_tests)
    code = _carry_out(copies, steps, arguments.dry_run)
    copied = {copy.base.name for copy, step in steps.items() if step.done == "copied"}
    if "block.py" in copied and "rope.py" not in copied | copies.originals.keys():
        print(
            f"Block adds positions only with rope=; to copy RoPE: tinyblock add rope --to {arguments.folder}"
        )
    return code


def check(arguments: argparse.Namespace, upstream: Upstream) -> int:
    """Report edited, outdated and missing copies."""
    copies = Copies(arguments.folder, upstream).select(arguments.layers)
    versions = {
        copy: f": {copy.base.version} -> {upstream.version}"
        for copy in copies
        if "outdated" in copy.state
    }
    _print(
        {copy.base.name: copy.state + versions.get(copy, "") for copy in copies},
        "pristine",
    )
    accepted = {"pristine"} if arguments.fail_on_edits else {"pristine", "edited"}
    return int(any(copy.state not in accepted for copy in copies))


def diff(arguments: argparse.Namespace, upstream: Upstream) -> int:
    """Show your edits, and later changes in tinyblock."""
    copies = Copies(arguments.folder, upstream).select(arguments.layers)
    edits = [] if arguments.upstream else [copy.edits() for copy in copies]
    changes = [] if arguments.mine else [copy.upstream_changes() for copy in copies]
    sys.stdout.buffer.write(
        encode("".join(edits + changes))
    )  # a patch, independent of the terminal's encoding
    return 0


def update(arguments: argparse.Namespace, upstream: Upstream) -> int:
    """Merge later changes in tinyblock with your edits."""
    copies = Copies(arguments.folder, upstream)
    return _carry_out(copies, copies.update(arguments.layers), arguments.dry_run)


def remove(arguments: argparse.Namespace, upstream: Upstream) -> int:
    """Delete copies that have no edits and that no other copy imports."""
    copies = Copies(arguments.folder, upstream)
    return _carry_out(copies, copies.remove(arguments.layers), arguments.dry_run)


def verify(arguments: argparse.Namespace, upstream: Upstream) -> int:
    """Test copies, with your edits, against the contracts of tinyblock's layers."""
    from ..contract.verify import verify

    stored = decode(read(Path(arguments.target, SKIP)) or b"").splitlines()
    skip = [
        *arguments.skip,
        *(line for line in stored if line and not line.startswith("#")),
    ]
    try:
        return verify(arguments.target, skip, arguments.verbose)
    except (LookupError, ImportError) as error:
        raise CommandError(str(error)) from None


def _carry_out(copies: Copies, steps: dict[Copy, Step], dry_run: bool) -> int:
    if not dry_run:
        copies.carry_out(steps)
    _print({copy.base.name: step.done for copy, step in steps.items()}, UP_TO_DATE)
    if dry_run:
        print(f"dry run: nothing was written to {copies.folder}")
    return int(CONFLICT in [step.done for step in steps.values()])


def _print(outcomes: Mapping[str, str], usual: str) -> None:
    """Print each outcome that is not the usual one, and the number of files with the usual outcome."""
    for name, outcome in outcomes.items():
        if outcome != usual:
            print(f"{name:25}  {outcome}")
    if usual in outcomes.values():
        print(f"{[*outcomes.values()].count(usual)} {usual}")


def main(argv: Sequence[str] | None = None, upstream: Upstream | None = None) -> int:
    """Run a command with the files of `upstream` (default: the installed tinyblock), and return the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments, upstream or Upstream())
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # for example, of `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13
    except KeyboardInterrupt:
        print("tinyblock: interrupted", file=sys.stderr)
        return 130
    except (CommandError, OSError) as error:
        print(f"tinyblock: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


class OneLineParser(argparse.ArgumentParser):
    """Report wrong arguments in one line, without the usage, and exit with 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def _parser() -> OneLineParser:
    parser = OneLineParser(
        "tinyblock",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=EXAMPLES,
    )
    parser.description = "Copy layers into your project, review and merge changes, and verify the copies."
    parser.add_argument(
        "--version", action="version", version=f"tinyblock {__version__}"
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    folder, some, dry_run = (OneLineParser(add_help=False) for _ in range(3))
    folder.add_argument(
        "folder", type=_folder, metavar="DIR", help="the folder of the copies"
    )
    some.add_argument(
        "layers", nargs="*", metavar="LAYER", help="only these layers (default: all)"
    )
    dry_run.add_argument(
        "--dry-run", action="store_true", help="print the changes without making them"
    )

    def command(
        run: Callable[[argparse.Namespace, Upstream], int], *parents: OneLineParser
    ) -> OneLineParser:
        name, text = run.__name__.strip("_"), run.__doc__
        [example] = re.findall(rf"tinyblock {name}\b.*", EXAMPLES)
        made = commands.add_parser(
            name,
            parents=parents,
            help=text,
            description=text,
            epilog=f"example: {example}",
        )
        made.set_defaults(run=run)
        return made

    command(list_)
    made = command(add, dry_run)
    made.add_argument("layers", nargs="+", metavar="LAYER", help=", ".join(NAMES))
    made.add_argument(
        "--to",
        dest="folder",
        required=True,
        type=_folder,
        metavar="DIR",
        help="new or existing folder",
    )
    made.add_argument(
        "--with-tests",
        action="store_true",
        help="also copy the layers' contracts, as pytest files",
    )
    command(check, folder, some).add_argument(
        "--fail-on-edits", action="store_true", help="also exit with 1 for edits"
    )
    made = command(diff, folder, some)
    made.add_argument("--mine", action="store_true", help="only your edits")
    made.add_argument(
        "--upstream", action="store_true", help="only changes in tinyblock"
    )
    command(update, folder, some, dry_run)
    command(remove, folder, dry_run).add_argument(
        "layers", nargs="+", metavar="LAYER", help="the layers to delete"
    )
    made = command(verify)
    made.add_argument(
        "target",
        metavar="DIR|FILE|MODULE",
        help="a folder, a file, or a name as in `import`",
    )
    made.add_argument(
        "--skip",
        action="append",
        default=[],
        metavar="PROPERTY",
        help=f"skip it; DIR/{SKIP} lists more",
    )
    made.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="print all properties (default: those that fail)",
    )
    return parser


def _folder(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError(
            "must be a path, got an empty string; for the current folder, give ."
        )
    return Path(text)
