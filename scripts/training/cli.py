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

from .compare import COMPARISONS, compare
from .text import SYMBOLS, Text, files_in, read_text, standard_library
from .trainer import Diverged, Settings

DEFAULTS = {"steps": 2000, "batch_size": 8, "seq_len": 128, "d_model": 64, "num_layers": 3, "num_heads": 2}
TO_COMPARE = {"steps": 400, "batch_size": 8, "seq_len": 128, "d_model": 48, "num_layers": 3, "num_heads": 3}
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
        settings = _settings(args, sys.argv[1:] if argv is None else argv)
        check_outputs(args, "json", "plot")
        args.device = device_of(args.device)
        text = _text(args, settings)
        if args.compare:
            start = partial(compare, args, settings, text)
        else:
            from . import session  # which takes two seconds to import

            start = partial(session.train, args, settings, text, *session.begin(args, settings, text))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a sample of text may have characters that a terminal lacks

    def work() -> int:
        try:
            return start()
        except BrokenPipeError:
            raise
        except OSError as error:
            parser.error(f"{error.filename or args.json or 'standard output'}: {error.strerror}")
        except Diverged as error:
            if is_first():
                print(f"{parser.prog}: error: {error}; use a lower --lr or a longer --warmup", file=sys.stderr)
            return 1

    return run(parser, work)


def _parser() -> Parser:
    about = "Train a language model of bytes made of tinyblock's layers, or compare the choices that they offer."
    parser = Parser("train_lm.py", about, EPILOG)
    variants = "train variants on the same data (activations: draw the functions)"
    parser.add_argument("--compare", choices=COMPARISONS, help=variants)
    size = parser.add_argument_group("size")
    source = "files or folders (default: the source of Python's standard library)"
    size.add_argument("--data", type=Path, nargs="+", metavar="PATH", help=source)
    for name, default in DEFAULTS.items():
        compared = f"; {TO_COMPARE[name]} with --compare" if TO_COMPARE[name] != default else ""
        help = f"(default: {default}{compared})"
        size.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=help)
    size.add_argument("--max-seq-len", type=int, metavar="N", help="longest sequence (default: 4 times --seq-len)")
    how = parser.add_argument_group("how")
    how.add_argument("--seed", type=int, default=0, metavar="N", help="seed of weights and batches (default: 0)")
    how.add_argument("--seeds", type=int, default=3, metavar="N", help="number of seeds with --compare (default: 3)")
    highest = "highest learning rate (default: 5e-3)"
    how.add_argument("--lr", type=float, nargs="+", default=[5e-3], metavar="LR", help=highest)
    warmup = "steps in which the rate rises (default: 50, or a quarter of shorter runs)"
    how.add_argument("--warmup", type=int, metavar="N", help=warmup)
    how.add_argument("--compile", action="store_true", help="torch.compile the model")
    how.add_argument("--tp", type=int, default=1, metavar="N", help="processes that split each layer (default: 1)")
    how.add_argument("--dp", type=int, default=1, metavar="N", help="processes that split the batch (default: 1)")
    parser.add_device(how)
    out = parser.add_argument_group("output")
    each = "one line of JSON for each step; with --compare, one document with all runs"
    out.add_argument("--json", type=Path, metavar="FILE", help=each)
    out.add_argument("--plot", type=Path, metavar="FILE", help="draw the losses: .png, .svg, .pdf")
    checkpoint = "write a checkpoint to this folder at the end, at Ctrl-C, SIGTERM and SIGHUP"
    out.add_argument("--checkpoint", type=Path, metavar="DIR", help=checkpoint)
    out.add_argument("--every", type=int, metavar="N", help="also write one every N steps")
    out.add_argument("--keep", type=int, default=2, metavar="K", help="checkpoints to keep (default: 2)")
    out.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    return parser


def _settings(args: argparse.Namespace, argv: Sequence[str]) -> Settings:
    """Return the sizes, after the layers have accepted them without allocating anything."""
    if args.compare:
        for name, default in {"tp": 1, "dp": 1, "compile": False, "checkpoint": None, "resume": False}.items():
            if getattr(args, name) != default:
                raise ValueError(f"--compare does not support --{name}: remove it")
        if launched() > 1:
            raise ValueError("--compare trains in one process: start it without torchrun")
        if args.compare == "activations" and args.plot is None:
            raise ValueError("--compare activations needs --plot FILE")
    for name, default in (TO_COMPARE if args.compare else DEFAULTS).items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    args.max_seq_len = 4 * args.seq_len if args.max_seq_len is None else args.max_seq_len
    args.warmup = min(50, args.steps // 4) if args.warmup is None else args.warmup
    for name in ("every", "resume"):
        if getattr(args, name) and args.checkpoint is None:
            raise ValueError(f"--{name} needs --checkpoint DIR")
    args.every = args.steps if args.every is None else args.every
    for name in (*DEFAULTS, "max_seq_len", "seeds", "tp", "dp", "every", "keep"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if not 0 <= args.seed < 2**63 or args.steps >= 10**8:
        raise ValueError("--seed must be from 0 to 2**63 - 1, and --steps below 10**8")
    if not all(0 < lr < math.inf for lr in args.lr):
        raise ValueError(f"--lr must be positive and finite, got {' '.join(map(str, args.lr))}")
    if not 0 <= args.warmup <= args.steps:
        raise ValueError(f"--warmup must be from 0 to --steps {args.steps}, got {args.warmup}")
    if args.seq_len > args.max_seq_len:
        raise ValueError(f"--seq-len {args.seq_len} is longer than --max-seq-len {args.max_seq_len}")
    if len(args.lr) > 1 and args.compare != "norm":
        raise ValueError("several --lr need --compare norm")
    if args.batch_size % args.dp:
        raise ValueError(f"--batch-size {args.batch_size} is not a multiple of --dp {args.dp}")
    try:
        Transformer(1, args.d_model, args.num_heads, max_seq_len=args.max_seq_len, device="meta")
    except (RuntimeError, OverflowError) as error:
        raise ValueError(f"impossible size: {str(error).splitlines()[0]}") from None
    d_ff = SwiGLU(args.d_model, device="meta").d_ff
    for name, value in {"--num-heads": args.num_heads, "d_ff": d_ff, "the vocabulary": SYMBOLS}.items():
        if value % args.tp:
            raise ValueError(f"{name} {value} is not a multiple of --tp {args.tp}")
    needed = args.tp * args.dp
    if launched() != needed:
        command = shlex.join(["torchrun", "--nproc-per-node", str(needed), "scripts/train_lm.py", *argv])
        raise ValueError(f"--tp {args.tp} --dp {args.dp} needs {needed} processes, got {launched()}: {command}")
    return Settings(**{name: getattr(args, name) for name in Settings.__dataclass_fields__} | {"lr": args.lr[0]})


def _text(args: argparse.Namespace, settings: Settings) -> Text:
    outputs = [path for path in (args.json, args.plot) if path is not None]
    try:
        text = read_text(files_in(args.data, outputs) if args.data else standard_library())
    except OSError as error:
        raise ValueError(f"--data: cannot read {error.filename}: {error.strerror}") from None
    batch, window = settings.batch_size * settings.seq_len + 1, (args.max_seq_len if args.compare else args.seq_len) + 1
    if len(text.training) < batch or len(text.validation) < window:
        have = f"{len(text.training)} bytes for training and {len(text.validation)} for validation"
        raise ValueError(f"the text has {have}, but needs {batch} and {window}: add text, or lower --seq-len")
    return text
