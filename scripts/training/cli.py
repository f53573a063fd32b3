"""The command line of train_lm.py: its options, what they require, and how errors end."""

import argparse
import io
import math
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from lab.cli import Parser, check_outputs, device_of, run, seed
from lab.processes import launched
from lab.tables import plural

from tinyblock import Transformer

from .checkpoints import Checkpoint, DamagedCheckpoint
from .compare import compare, show_comparison
from .comparison import VARIANTS, Comparison, read_comparison
from .text import Found, Text, files_in, read_text, standard_library
from .trainer import Diverged, Settings

SIZES = {
    "steps": 2000,
    "batch_size": 8,
    "seq_len": 128,
    "d_model": 64,
    "num_layers": 3,
    "num_heads": 2,
}
COMPARED_SIZES = {
    "steps": 400,
    "batch_size": 8,
    "seq_len": 128,
    "d_model": 48,
    "num_layers": 3,
    "num_heads": 3,
}
SIZE_HELP = {
    "steps": "updates of the weights",
    "batch_size": "sequences in a batch",
    "seq_len": "bytes in a sequence",
    "d_model": "width of the model",
    "num_layers": "blocks of the model",
    "num_heads": "attention heads of a block",
}
SEEDS = 3
LEARNING_RATE = 5e-3
WARMUP = 50  # or a quarter of the steps
# Where options have no effect: --compare activations and --report leave only these.
ONLY = {"activations": {"compare", "plot"}, "report": {"report", "plot"}}
NOT_COMPARED = ("compile", "checkpoint", "every", "resume")
REMOVED = {
    "--tp": "examples/parallel.py trains on several processes",
    "--dp": "examples/parallel.py trains on several processes",
    "--keep": "the last two checkpoints are kept",
}
EPILOG = """\
examples:
  train for about two minutes on two cores:
    python scripts/train_lm.py
  train on your text, and write and draw the losses:
    python scripts/train_lm.py --data my_project notes.txt --plot loss.png --json loss.json
  save a checkpoint every 100 steps:
    python scripts/train_lm.py --checkpoint run --every 100
  after Ctrl-C, SIGTERM or a crash, continue with the same losses:
    python scripts/train_lm.py --checkpoint run --every 100 --resume
  compare norms at three learning rates:
    python scripts/train_lm.py --compare norm --lr 1e-3 3e-3 1e-2 --plot norm.png --json norm.json
  draw that comparison again:
    python scripts/train_lm.py --report norm.json --plot norm.png
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Train or compare as `argv` asks, and return the exit code.

    0: done. 1: the loss diverged, or memory ran out. 2: an argument or a file is unusable. 128 plus the number of the
    signal that stopped the run, such as 130 after Ctrl-C.
    """
    parser = _parser()
    # A run that stops prints the command that resumes it, with the words that the user typed.
    words = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(words)
    with parser.reporting():
        work = _prepare(args, words)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A sample of text may have characters that a terminal lacks.
        sys.stdout.reconfigure(errors="replace")
    return run(parser, partial(_run_reporting, parser, args, work))


def _run_reporting(
    parser: Parser, args: argparse.Namespace, work: Callable[[], int]
) -> int:
    """Do the work, and report in one line what ends it."""
    try:
        return work()
    except BrokenPipeError:
        raise
    except OSError as error:
        parser.error(
            f"{error.filename or args.json or 'standard output'}: {error.strerror}"
        )
    except DamagedCheckpoint as error:
        parser.error(str(error))
    except Diverged as error:
        advice = "use a lower --lr or a longer --warmup"
        print(f"{parser.prog}: error: {error}; {advice}", file=sys.stderr)
        return 1


def _parser() -> Parser:
    """Return the parser. An option that is not given is None: _reject_without_effect reports one that is."""
    about = "Train a byte-level language model made of tinyblock's layers, or compare variants of it."
    parser = Parser("train_lm.py", about, EPILOG, REMOVED)
    parser.add_argument(
        "--compare",
        choices=(*VARIANTS, "activations"),
        help="train variants of a layer on the same data; activations: only draw the functions",
    )
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="show a comparison that --json wrote, and train nothing",
    )
    _add_data_and_size(parser)
    _add_training(parser)
    _add_output(parser)
    return parser


def _add_data_and_size(parser: Parser) -> None:
    group = parser.add_argument_group("data and size")
    group.add_argument(
        "--data",
        type=Path,
        nargs="+",
        metavar="PATH",
        help="files or folders; binary files in folders are skipped (default: the source of Python's standard library)",
    )
    for name, default in SIZES.items():
        defaults = f"default: {default}"
        if COMPARED_SIZES[name] != default:
            defaults += f"; {COMPARED_SIZES[name]} with --compare"
        group.add_argument(
            _option(name),
            type=int,
            metavar="N",
            help=f"{SIZE_HELP[name]} ({defaults})",
        )


def _add_training(parser: Parser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument(
        "--seed",
        type=seed,
        metavar="N",
        help="seed of weights and batches (default: 0)",
    )
    group.add_argument(
        "--seeds",
        type=int,
        metavar="N",
        help=f"number of seeds of a comparison (default: {SEEDS})",
    )
    group.add_argument(
        "--lr",
        type=float,
        nargs="+",
        metavar="LR",
        help=f"peak learning rate; --compare norm takes several (default: {LEARNING_RATE:g})",
    )
    group.add_argument(
        "--warmup",
        type=int,
        metavar="N",
        help=f"warm-up steps (default: {WARMUP}, at most --steps / 4; a resumed run keeps its own)",
    )
    group.add_argument(
        "--compile",
        action="store_true",
        default=None,  # not False: see _parser
        help="compile the model with torch.compile",
    )
    parser.add_device(group)


def _add_output(parser: Parser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write a line of JSON for each step or, with --compare, one document",
    )
    group.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the losses: .png, .svg or .pdf"
    )
    group.add_argument(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="save checkpoints in DIR: when training ends, and on Ctrl-C or SIGTERM; the last two are kept",
    )
    group.add_argument(
        "--every", type=int, metavar="N", help="also save a checkpoint every N steps"
    )
    group.add_argument(
        "--resume",
        action="store_true",
        default=None,  # not False: see _parser
        help="continue from the last checkpoint in DIR; another --steps changes the learning rates that follow",
    )


def _prepare(args: argparse.Namespace, words: Sequence[str]) -> Callable[[], int]:
    """Check everything that can be checked before memory is allocated, and return what is to be done."""
    _reject_without_effect(args)
    if args.compare == "activations" and args.plot is None:
        raise ValueError("--compare activations requires --plot FILE: add it")
    check_outputs(args, "json", "plot")
    if args.report is not None:
        return partial(show_comparison, read_comparison(args.report), args.plot)
    if args.compare == "activations":
        return partial(_draw_activations, args.plot)
    if launched() > 1:
        raise ValueError(
            "train_lm.py runs in one process: start it with python; examples/parallel.py uses several"
        )
    settings = _settings(args)
    device = device_of(args.device)
    text = _text(args, settings)
    if args.compare is not None:
        comparison = Comparison.of(
            args.compare, device, settings, _rates(args), args.seeds or SEEDS, text
        )
        return partial(compare, comparison, text, device, args.json, args.plot)
    return _prepare_training(args, words, settings, text, device)


def _prepare_training(
    args: argparse.Namespace,
    words: Sequence[str],
    settings: Settings,
    text: Text,
    device: torch.device,
) -> Callable[[], int]:
    from . import session  # importing it takes two seconds

    checkpoint: Checkpoint | None = None
    if args.checkpoint is not None:
        checkpoint = session.open_folder(args.checkpoint, bool(args.resume))
    if checkpoint is not None:
        # Settings with fewer steps than the warm-up of the checkpoint would raise an error about --warmup.
        session.require_steps(checkpoint, settings.steps)
        if args.warmup is None:
            settings = replace(settings, warmup=checkpoint.settings.warmup)
        session.require_same_run(checkpoint, settings, text)
    planned = session.Run(
        settings=settings,
        text=text,
        source=_source(args),
        device=device,
        compile=bool(args.compile),
        folder=args.checkpoint,
        every=args.every,
        losses=args.json,
        picture=args.plot,
        command=_command_to_resume(args, words),
    )
    return partial(session.train, planned, checkpoint)


def _source(args: argparse.Namespace) -> str:
    """Return where the text comes from."""
    if args.data is None:
        return "Python's standard library"
    return ", ".join(path.name for path in args.data)


def _command_to_resume(args: argparse.Namespace, words: Sequence[str]) -> str:
    command = ["python", sys.argv[0], *words]
    if not args.resume:
        command.append("--resume")
    return shlex.join(command)


def _reject_without_effect(args: argparse.Namespace) -> None:
    """Raise a ValueError for an option that would change nothing."""
    given = {name for name, value in vars(args).items() if value is not None}
    if args.report is not None:
        unused = given - ONLY["report"]
        where = "with --report"
    elif args.compare == "activations":
        unused = given - ONLY["activations"]
        where = "with --compare activations"
    elif args.compare is not None:
        unused = given.intersection(NOT_COMPARED)
        where = "with --compare"
    else:
        unused = given.intersection({"seeds"})
        where = "without --compare"
    if unused:
        raise ValueError(f"{_option(min(unused))} has no effect {where}: remove it")
    if args.checkpoint is None and (args.every is not None or args.resume):
        raise ValueError("--every and --resume require --checkpoint DIR: add it")


def _rates(args: argparse.Namespace) -> list[float]:
    return args.lr or [LEARNING_RATE]


def _settings(args: argparse.Namespace) -> Settings:
    """Return the settings, after the layers have accepted them without allocating anything."""
    _require_counts(args)
    sizes = dict(SIZES if args.compare is None else COMPARED_SIZES)
    for name in sizes:
        given = getattr(args, name)
        if given is not None:
            sizes[name] = given
    steps = sizes["steps"]
    if steps >= 10**8:
        raise ValueError(f"--steps must be below 10**8, got {steps}")
    warmup = min(WARMUP, steps // 4) if args.warmup is None else args.warmup
    if not 0 <= warmup <= steps:
        raise ValueError(f"--warmup must be from 0 to --steps {steps}, got {warmup}")
    _require_rates(args)
    settings = Settings(**sizes, seed=args.seed or 0, lr=_rates(args)[0], warmup=warmup)
    _require_heads(settings)
    return settings


def _require_counts(args: argparse.Namespace) -> None:
    for name in (*SIZES, "seeds", "every"):
        given = getattr(args, name)
        if given is not None and given < 1:
            raise ValueError(f"{_option(name)} must be at least 1, got {given}")


def _require_rates(args: argparse.Namespace) -> None:
    rates = _rates(args)
    if not all(0 < lr < math.inf for lr in rates):
        raise ValueError(f"--lr must be positive and finite, got {rates}")
    if len(set(rates)) < len(rates):
        raise ValueError(f"--lr must have each rate once, got {rates}: remove one")
    if len(rates) > 1 and args.compare != "norm":
        raise ValueError(
            f"--lr must be one rate without --compare norm, got {rates}: remove all but one"
        )


def _require_heads(settings: Settings) -> None:
    """Raise a ValueError for sizes that no model can have."""
    d_model = settings.d_model
    num_heads = settings.num_heads
    if d_model % num_heads:
        raise ValueError(
            f"--d-model must be a multiple of --num-heads {num_heads}, got {d_model}"
        )
    if d_model // num_heads % 2:
        raise ValueError(
            f"--d-model / --num-heads must be even for RoPE, got {d_model} / {num_heads}"
        )
    try:
        Transformer(
            1, d_model, num_heads, max_seq_len=settings.max_seq_len, device="meta"
        )
    except (RuntimeError, OverflowError):
        raise ValueError(
            f"--d-model and --seq-len must be sizes that torch can represent, got {d_model} "
            f"and {settings.seq_len}: lower them"
        ) from None


def _text(args: argparse.Namespace, settings: Settings) -> Text:
    """Read the text, and raise a ValueError if it is too short."""
    try:
        found = _found(args)
        text = read_text(found.files)
    except OSError as error:
        raise ValueError(
            f"--data: cannot read {error.filename}: {error.strerror}"
        ) from None
    if found.binary:
        skipped = plural(found.binary, "binary file")
        print(
            f"--data: skipped {skipped} in folders; name a file to read its bytes",
            file=sys.stderr,
        )
    longest = settings.seq_len if args.compare is None else settings.max_seq_len
    training = settings.batch_size * settings.seq_len + 1
    validation = longest + 1
    if len(text.training) < training or len(text.validation) < validation:
        raise ValueError(
            f"the text must have at least {training} bytes for training and {validation} for validation, "
            f"got {len(text.training)} and {len(text.validation)}: add text, or lower --seq-len"
        )
    return text


def _found(args: argparse.Namespace) -> Found:
    """Find the files of --data, or those of the standard library."""
    if args.data is None:
        return Found(standard_library(), binary=0)
    outputs = [path for path in (args.json, args.plot) if path is not None]
    return files_in(args.data, outputs)


def _draw_activations(path: Path) -> int:
    from .plot import plot_activations

    plot_activations(path)
    return 0


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
