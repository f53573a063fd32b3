"""The command line of train_lm.py: what can be asked for, what is refused, and what comes of an error."""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from lab.cli import check_outputs
from lab.files import require_writable
from lab.memory import is_out_of_memory

from tinyblock import SwiGLU, Transformer
from tinyblock.vendoring.parser import OneLineParser

from .compare import COMPARISONS, compare
from .run import Diverged, Settings
from .session import train
from .text import SYMBOLS, TextFiles, files_in, open_text, standard_library

DEFAULTS = {"steps": 2000, "batch_size": 8, "seq_len": 128, "d_model": 64, "num_layers": 3, "num_heads": 2}
TO_COMPARE = {"steps": 400, "batch_size": 8, "seq_len": 128, "d_model": 48, "num_layers": 3, "num_heads": 3}
EPILOG = """\
examples:
  train_lm.py                                           about two minutes on two cores
  train_lm.py --data my_project notes.txt --plot loss.png --json loss.json
  train_lm.py --checkpoint run --every 100              ... Ctrl-C, or a crash ...
  train_lm.py --checkpoint run --every 100 --resume     goes on, to the same losses
  torchrun --nproc-per-node 4 scripts/train_lm.py --tp 2 --dp 2
  train_lm.py --compare norm --lr 1e-3 3e-3 1e-2 --plot norm.png --json norm.json
"""


class Parser(OneLineParser):
    """Refuse in one line, on the first process alone."""

    def error(self, message: str) -> NoReturn:
        if _rank():
            self.exit(2)
        super().error(message)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))  # torchrun sets it


def main(argv: Sequence[str] | None = None) -> int:
    """Train or compare as `argv` asks, and return the exit code.

    0: done. 1: the loss diverged, or memory ran out. 2: refused, or a file could not be written. 130: interrupted.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        settings, text, path, run = _checked(parser, args, sys.argv[1:] if argv is None else argv)
        if args.compare:
            return compare(args, settings, text)
        return train(args, settings, text, path, run)
    except OSError as error:
        parser.error(f"cannot write {error.filename or 'what it should'}: {error.strerror or error}")
    except Diverged as error:
        code, message = 1, f"stopped: {error}: try a lower --lr or a longer --warmup"
    except KeyboardInterrupt:
        code, message = 130, "interrupted"
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        code, message = 1, f"error: out of memory: {' '.join(str(error).split())}"
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if not _rank():
        print(f"{parser.prog}: {message}", file=sys.stderr)
    return code


def _checked(
    parser: Parser, args: argparse.Namespace, argv: Sequence[str]
) -> tuple[Settings, TextFiles, Path | None, dict[str, Any]]:
    """Return how to train, on what, and from which checkpoint; or refuse, before anything is allocated."""
    try:
        settings = _settings(args)
        _check_processes(args, argv)
        check_outputs(args, "json", "plot")
        if args.compare == "activations" and args.plot is None:
            raise ValueError("--compare activations draws, and needs --plot FILE")
        text = _text(args, settings)
        return settings, text, *_checkpoint(args, settings, text)
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"{error.filename}: {error.strerror}")


def _parser() -> Parser:
    parser = Parser(
        prog="train_lm.py",
        description="Train a language model of bytes made of tinyblock's layers, or compare what they offer.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--compare", choices=COMPARISONS, help="train the variants on the same data; activations: draw them alone"
    )
    size = parser.add_argument_group("size, in training and (in comparisons)")
    size.add_argument("--data", type=Path, nargs="+", metavar="PATH", help="files or folders (Python's own source)")
    for name, default in DEFAULTS.items():
        size.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=f"{default} ({TO_COMPARE[name]})")
    size.add_argument("--max-seq-len", type=int, metavar="N", help="positions that the model can have (4 seq_len)")
    how = parser.add_argument_group("how")
    how.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and batches (0)")
    how.add_argument("--seeds", type=int, default=3, metavar="N", help="of a comparison, from --seed on (3)")
    how.add_argument("--lr", type=float, nargs="+", default=[5e-3], metavar="LR", help="the highest (5e-3)")
    how.add_argument("--warmup", type=int, default=50, metavar="N", help="steps in which it rises (50)")
    how.add_argument("--accumulate", type=int, default=1, metavar="N", help="parts of a batch, one after another (1)")
    how.add_argument("--compile", action="store_true", help="torch.compile the model")
    how.add_argument("--tp", type=int, default=1, metavar="N", help="processes that split each layer (1)")
    how.add_argument("--dp", type=int, default=1, metavar="N", help="processes that split the batch (1)")
    out = parser.add_argument_group("output")
    out.add_argument("--json", type=Path, metavar="FILE", help="a line for each step; of a comparison, all of it")
    out.add_argument("--plot", type=Path, metavar="FILE", help="draw the losses: .png, .svg, .pdf")
    out.add_argument("--checkpoint", type=Path, metavar="DIR", help="write a checkpoint here at the end, and at Ctrl-C")
    out.add_argument("--every", type=int, metavar="N", help="and every N steps")
    out.add_argument("--keep", type=int, default=2, metavar="K", help="the last K checkpoints (2)")
    out.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    return parser


def _settings(args: argparse.Namespace) -> Settings:
    """Return the sizes, once the layers have taken them without allocating anything."""
    for name, default in (TO_COMPARE if args.compare else DEFAULTS).items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    args.max_seq_len = 4 * args.seq_len if args.max_seq_len is None else args.max_seq_len
    if args.every is not None and args.checkpoint is None:
        raise ValueError("--every needs --checkpoint DIR")
    args.every = args.steps if args.every is None else args.every
    for name in (*DEFAULTS, "max_seq_len", "seeds", "accumulate", "tp", "dp", "every", "keep"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if not 0 <= args.seed < 2**63 or args.warmup < 0 or min(args.lr) <= 0:
        raise ValueError("--seed must fit into 63 bits, --warmup must not be negative, and --lr must be above 0")
    if args.seq_len > args.max_seq_len:
        raise ValueError(f"--seq-len {args.seq_len} is longer than --max-seq-len {args.max_seq_len}")
    if len(args.lr) > 1 and args.compare != "norm":
        raise ValueError("several --lr are for --compare norm")
    names = [name for name in Settings.__dataclass_fields__ if name != "lr"]
    settings = Settings(**{name: getattr(args, name) for name in names}, lr=args.lr[0])
    if settings.batch_size % (args.dp * args.accumulate):
        parts = f"--dp {args.dp} times --accumulate {args.accumulate}"
        raise ValueError(f"--batch-size {settings.batch_size} is not a multiple of {parts}")
    try:
        Transformer(1, args.d_model, args.num_heads, max_seq_len=args.max_seq_len, device="meta")
    except (RuntimeError, OverflowError) as error:
        raise ValueError(f"impossible size: {str(error).splitlines()[0]}") from None
    d_ff = SwiGLU(args.d_model, device="meta").d_ff
    sizes = {"--num-heads": args.num_heads, "d_ff": d_ff, "the vocabulary": SYMBOLS}
    for name, value in sizes.items():
        if value % args.tp:
            raise ValueError(f"{name} {value} is not a multiple of --tp {args.tp}")
    return settings


def _check_processes(args: argparse.Namespace, argv: Sequence[str]) -> None:
    count, wanted = int(os.environ.get("WORLD_SIZE", "1")), args.tp * args.dp
    if args.compare and max(count, wanted) > 1:
        raise ValueError("--compare trains in one process")
    if count != wanted:
        command = shlex.join(["torchrun", "--nproc-per-node", str(wanted), "scripts/train_lm.py", *argv])
        raise ValueError(f"--tp {args.tp} --dp {args.dp} needs {wanted} processes, and there is {count}: {command}")


def _text(args: argparse.Namespace, settings: Settings) -> TextFiles:
    text = open_text(files_in(args.data) if args.data else standard_library())
    batch, window = settings.batch_size * settings.seq_len + 1, (args.max_seq_len if args.compare else args.seq_len) + 1
    if len(text.training) < batch or len(text.validation) < window:
        have = f"{len(text.training)} bytes for training and {len(text.validation)} for validation"
        raise ValueError(f"the text has {have}, and {batch} and {window} are needed: give more, or lower --seq-len")
    return text


def _checkpoint(args: argparse.Namespace, settings: Settings, text: TextFiles) -> tuple[Path | None, dict[str, Any]]:
    """Return the checkpoint to go on from, and its run so far; a run that has not begun, if there is none."""
    new: dict[str, Any] = {"settings": {**settings.must_agree(), "text": text.sha256}, "history": []}
    if args.checkpoint is None:
        if args.resume:
            raise ValueError("--resume needs --checkpoint DIR")
        return None, new
    if args.compare:
        raise ValueError("--compare writes no checkpoints")
    from . import checkpoints  # torch.distributed.checkpoint takes seconds to import

    if args.resume and not args.checkpoint.is_dir():
        raise ValueError(f"--resume: there is no folder {args.checkpoint}")
    args.checkpoint.mkdir(parents=True, exist_ok=True)
    require_writable(args.checkpoint / "run.json")
    saved = checkpoints.saved_in(args.checkpoint)
    if not saved:
        return None, new
    if not args.resume:
        raise ValueError(f"{args.checkpoint} has a checkpoint, {saved[-1].name}: add --resume, or name another folder")
    run = checkpoints.read(saved[-1])
    for name, value in new["settings"].items():
        if run["settings"].get(name) != value:
            theirs = run["settings"].get(name)
            raise ValueError(f"the checkpoint {saved[-1]} is of another run: its {name} is {theirs}, and here {value}")
    return saved[-1], run
