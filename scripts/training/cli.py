"""The command line of train_lm.py: its options, what they require, and how errors end."""

import argparse
import io
import math
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from lab.cli import Parser, check_outputs, device_of, run
from lab.processes import is_first, launched

from tinyblock import SwiGLU, Transformer

from .compare import VARIANTS, compare
from .text import SYMBOLS, Text, files_in, read_text, standard_library
from .trainer import Diverged, Settings

# The default, and that with --compare.
SIZES = {"steps": (2000, 400), "batch_size": (8, 8), "seq_len": (128, 128)}
SIZES |= {"d_model": (64, 48), "num_layers": (3, 3), "num_heads": (2, 3)}
EPILOG = """\
examples:
  train_lm.py                                           about two minutes on two cores
  train_lm.py --data my_project notes.txt --plot loss.png --json loss.json
  train_lm.py --checkpoint run --every 100              ... Ctrl-C, SIGTERM, or a crash ...
  train_lm.py --checkpoint run --every 100 --resume     continues to the same losses
  torchrun --nproc-per-node 4 scripts/train_lm.py --tp 2 --dp 2
  train_lm.py --compare norm --lr 1e-3 3e-3 1e-2 --plot norm.png --json norm.json
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Train or compare as `argv` asks, and return the exit code.

    0: done. 1: the loss diverged, or memory ran out. 2: an argument or a file is unusable. 128 plus the number of the
    signal that stopped the run, such as 130 after Ctrl-C.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    with parser.reporting():
        settings = _settings(parser, args, sys.argv[1:] if argv is None else argv)
        check_outputs(args, "json", "plot")
        args.device = device_of(args.device)
        text = _text(args, settings)
        if args.compare:
            start = partial(compare, args, settings, text)
        else:
            from . import session  # which takes two seconds to import

            start = partial(
                session.train, args, settings, text, session.begin(args, settings, text)
            )
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(
            errors="replace"
        )  # a sample of text may have characters that a terminal lacks

    def work() -> int:
        try:
            return start()
        except BrokenPipeError:
            raise
        except OSError as error:
            parser.error(
                f"{error.filename or args.json or 'standard output'}: {error.strerror}"
            )
        except Diverged as error:
            if is_first():
                print(
                    f"{parser.prog}: error: {error}; use a lower --lr or a longer --warmup",
                    file=sys.stderr,
                )
            return 1

    return run(parser, work)


def _parser() -> Parser:
    about = "Train a byte-level language model made of tinyblock's layers, or compare variants of it."
    parser = Parser("train_lm.py", about, EPILOG)
    about = "train and compare variants of a layer on the same data (activations: draw the functions)"
    parser.add_argument("--compare", choices=(*VARIANTS, "activations"), help=about)
    add = parser.add_argument_group("data and size").add_argument
    add(
        "--data",
        type=Path,
        nargs="+",
        metavar="PATH",
        help="files or folders (default: Python's standard library)",
    )
    for name, (alone, compared) in SIZES.items():
        help = (
            f"(default: {alone})"
            if alone == compared
            else f"(default: {alone}; {compared} with --compare)"
        )
        add(f"--{name.replace('_', '-')}", type=int, metavar="N", help=help)
    training = parser.add_argument_group("training")
    add = training.add_argument
    add(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of weights and batches (default: 0)",
    )
    add(
        "--seeds",
        type=int,
        default=3,
        metavar="N",
        help="number of seeds with --compare (default: 3)",
    )
    add(
        "--lr",
        type=float,
        nargs="+",
        default=[5e-3],
        metavar="LR",
        help="highest learning rate (default: 5e-3)",
    )
    add(
        "--warmup",
        type=int,
        metavar="N",
        help="steps of rising learning rate (default: 50, at most --steps / 4)",
    )
    add("--compile", action="store_true", help="torch.compile the model")
    add(
        "--tp",
        type=int,
        default=1,
        metavar="N",
        help="processes that split each layer (default: 1)",
    )
    add(
        "--dp",
        type=int,
        default=1,
        metavar="N",
        help="processes that split the batch (default: 1)",
    )
    parser.add_device(training)
    add = parser.add_argument_group("output").add_argument
    add(
        "--json",
        type=Path,
        metavar="FILE",
        help="a line of JSON for each step; with --compare, one document",
    )
    add("--plot", type=Path, metavar="FILE", help="draw the losses: .png, .svg, .pdf")
    add(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="save a checkpoint in DIR at the end, Ctrl-C, SIGTERM or SIGHUP",
    )
    add("--every", type=int, metavar="N", help="also save a checkpoint every N steps")
    add(
        "--keep",
        type=int,
        default=2,
        metavar="K",
        help="keep the last K checkpoints (default: 2)",
    )
    add("--resume", action="store_true", help="continue from the last checkpoint")
    return parser


def _settings(
    parser: Parser, args: argparse.Namespace, argv: Sequence[str]
) -> Settings:
    """Return the sizes, after the layers have accepted them without allocating anything."""
    for name in ("tp", "dp", "compile", "checkpoint", "resume") if args.compare else ():
        if getattr(args, name) != parser.get_default(name):
            raise ValueError(f"--compare does not support --{name}: remove it")
    for name, defaults in SIZES.items():
        if getattr(args, name) is None:
            setattr(args, name, defaults[bool(args.compare)])
    args.max_seq_len = 4 * args.seq_len  # which --compare positions validates on
    args.warmup = min(50, args.steps // 4) if args.warmup is None else args.warmup
    for name in (*SIZES, "seeds", "tp", "dp", "every", "keep"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(
                f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}"
            )
    try:
        Transformer(
            1, args.d_model, args.num_heads, max_seq_len=args.max_seq_len, device="meta"
        )
    except (RuntimeError, OverflowError) as error:
        raise ValueError(f"impossible size: {str(error).splitlines()[0]}") from None
    tp, dp, d_ff = args.tp, args.dp, SwiGLU(args.d_model, device="meta").d_ff
    command = shlex.join(
        ["torchrun", "--nproc-per-node", str(tp * dp), "scripts/train_lm.py", *argv]
    )
    rules = {
        "--every and --resume need --checkpoint DIR": args.checkpoint
        or not (args.every or args.resume),
        "--compare activations needs --plot FILE": args.compare != "activations"
        or args.plot,
        f"--lr must be one rate without --compare norm, got {args.lr}": len(args.lr)
        == 1
        or args.compare == "norm",
        f"--seed must be from 0 to 2**63 - 1, got {args.seed}": 0 <= args.seed < 2**63,
        f"--steps must be below 10**8, got {args.steps}": args.steps < 10**8,
        f"--lr must be positive and finite, got {args.lr}": all(
            0 < lr < math.inf for lr in args.lr
        ),
        f"--warmup must be from 0 to --steps {args.steps}, got {args.warmup}": 0
        <= args.warmup
        <= args.steps,
        f"--batch-size must be a multiple of --dp {dp}, got {args.batch_size}": args.batch_size
        % dp
        == 0,
        f"--num-heads must be a multiple of --tp {tp}, got {args.num_heads}": args.num_heads
        % tp
        == 0,
        f"--tp must divide d_ff {d_ff} and the vocabulary {SYMBOLS}, got {tp}": d_ff
        % tp
        == SYMBOLS % tp
        == 0,
        f"--tp {tp} --dp {dp} needs {tp * dp} processes, got {launched()}: {command}": launched()
        == tp * dp,
    }
    for rule, met in rules.items():
        if not met:
            raise ValueError(rule)
    return Settings(
        **{name: getattr(args, name) for name in Settings.__dataclass_fields__}
        | {"lr": args.lr[0]}
    )


def _text(args: argparse.Namespace, settings: Settings) -> Text:
    outputs = [path for path in (args.json, args.plot) if path is not None]
    try:
        text = read_text(
            files_in(args.data, outputs) if args.data else standard_library()
        )
    except OSError as error:
        raise ValueError(
            f"--data: cannot read {error.filename}: {error.strerror}"
        ) from None
    batch, window = (
        settings.batch_size * settings.seq_len + 1,
        (args.max_seq_len if args.compare else args.seq_len) + 1,
    )
    if len(text.training) < batch or len(text.validation) < window:
        have = f"{len(text.training)} bytes for training and {len(text.validation)} for validation"
        raise ValueError(
            f"the text has {have}, but needs {batch} and {window}: add text, or lower --seq-len"
        )
    return text
